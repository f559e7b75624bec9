"""Descriptors and addresses that are cut, changed, foreign, forged or out of date."""

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory, PeerFactory
from tests.support import sealing
from tests.support.limits import WAIT_S
from tests.support.operations import DATA_KINDS, Operations
from tests.support.patterns import CANARY

DECODERS = {"address": xr.Address.from_bytes, "descriptor": xr.RegionDescriptor.from_bytes}


@pytest.fixture(params=["address", "descriptor"])
def encoded(request: pytest.FixtureRequest, engine: xr.Engine) -> tuple[str, bytes]:
    value = engine.address if request.param == "address" else engine.alloc(1000).descriptor
    return request.param, value.to_bytes()


def rejected(kind: str, data: bytes, *words: str) -> None:
    with pytest.raises(xr.UsageError) as failure:
        DECODERS[kind](data)
    for word in words:
        assert word in str(failure.value)


def test_every_truncation_is_rejected(encoded: tuple[str, bytes]) -> None:
    kind, data = encoded
    for length in range(len(data)):
        rejected(kind, data[:length])
        if length > sealing.CHECKSUM_BYTES:
            rejected(kind, sealing.resealed(data[:length]))


def test_every_flipped_bit_is_rejected(encoded: tuple[str, bytes]) -> None:
    kind, data = encoded
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        rejected(kind, bytes(changed))


def test_bytes_behind_the_end_are_rejected(encoded: tuple[str, bytes]) -> None:
    kind, data = encoded
    rejected(kind, data + b"\0")
    rejected(kind, sealing.sealed(data[: -sealing.CHECKSUM_BYTES] + b"\0"))
    rejected(kind, data + bytes(1_000_000))


def test_another_version_is_rejected_with_advice(encoded: tuple[str, bytes]) -> None:
    kind, data = encoded
    rejected(kind, sealing.with_version(data, 7), "version", "7")


def test_an_unknown_transport_is_rejected(encoded: tuple[str, bytes]) -> None:
    kind, data = encoded
    rejected(kind, sealing.with_transports(data, sealing.SHM | 1 << 17), "transport", str(sealing.SHM | 1 << 17))
    rejected(kind, sealing.with_transports(data, 0), "no transport")


@pytest.mark.parametrize(
    ("transports", "endpoints", "words"),
    [
        (sealing.TCP, [], ["0 endpoints", "tcp"]),
        (sealing.SHM, sealing.ENDPOINTS, ["2 endpoints", "shm"]),
        (sealing.TCP, [sealing.make_endpoint()] * 17, ["17 endpoints", "16"]),
        (sealing.TCP, [sealing.make_endpoint(family=5)], ["family 5"]),
        (sealing.TCP, [sealing.make_endpoint(port=0)], ["port 0"]),
        (sealing.TCP, [sealing.make_endpoint(bytes(4))], ["unspecified"]),
        (sealing.TCP, [sealing.make_endpoint(bytes(16))], ["unspecified"]),
        (sealing.TCP, [sealing.make_endpoint(prefix_bits=33)], ["33 bits"]),
        (sealing.TCP, [sealing.make_endpoint(b"\1" * 16, prefix_bits=129)], ["129 bits"]),
    ],
)
def test_endpoints_that_make_no_sense_are_rejected(transports: int, endpoints: list[bytes], words: list[str]) -> None:
    rejected("address", sealing.make_address(transports=transports, endpoints=endpoints), *words)
    rejected("descriptor", sealing.make_descriptor(transports=transports, endpoints=endpoints), *words)


VERBS, OFI = sealing.VERBS, sealing.OFI
LONG = bytes(65)


@pytest.mark.parametrize(
    ("rdma", "words"),
    [
        ({VERBS: sealing.make_rdma(())}, ["0 rails of verbs"]),
        ({OFI: sealing.make_rdma(())}, ["0 rails of ofi"]),
        ({VERBS: sealing.make_rdma((b"x",) * 17)}, ["17 rails of verbs"]),
        ({VERBS: sealing.make_rdma((b"x",), count=255)}, ["255 rails of verbs"]),
        ({VERBS: sealing.make_rdma((b"x",), count=2)}, ["too early"]),
        ({VERBS: sealing.make_rdma((b"",))}, ["0 bytes"]),
        ({OFI: sealing.make_rdma((LONG,))}, ["65 bytes"]),
        ({OFI: sealing.make_rdma(fabric=b"\xff")}, ["UTF-8"]),
        ({OFI: sealing.make_rdma(fabric=b"x" * 33)}, ["too long"]),
        ({VERBS: sealing.make_rdma((b"x",) * 9), OFI: sealing.make_rdma((b"x",) * 8)}, ["17 rails", "together"]),
        ({}, ["too early"]),
    ],
)
def test_rdma_rails_that_make_no_sense_are_rejected(rdma: dict[int, bytes], words: list[str]) -> None:
    kinds = sum(rdma) or VERBS
    rejected("address", sealing.make_address(transports=kinds, rdma=rdma), *words)


def test_keys_of_a_descriptor_are_as_many_as_rails() -> None:
    reach = {"transports": VERBS, "rdma": {VERBS: sealing.make_rdma((b"x", b"y"))}}
    xr.RegionDescriptor.from_bytes(sealing.make_descriptor(**reach, keys={VERBS: sealing.make_keys((1, 2))}))
    for keys in ((1,), (1, 2, 3)):
        data = sealing.make_descriptor(**reach, keys={VERBS: sealing.make_keys(keys)})
        with pytest.raises(xr.UsageError):
            xr.RegionDescriptor.from_bytes(data)


def test_base_at_the_end_of_the_address_space_is_rejected() -> None:
    reach = {"transports": VERBS, "rdma": {VERBS: sealing.make_rdma()}, "nbytes": 4096}
    fits, passes = (sealing.make_keys(base=2**64 - 1 - 4096 + more) for more in (0, 1))
    xr.RegionDescriptor.from_bytes(sealing.make_descriptor(**reach, keys={VERBS: fits}))
    rejected("descriptor", sealing.make_descriptor(**reach, keys={VERBS: passes}), "end of the address space")


def test_an_address_says_which_rdma_rails_it_has() -> None:
    address = xr.Address.from_bytes(sealing.make_address(transports=VERBS | OFI, rdma=sealing.RDMA))
    assert address.transports == ("verbs", "ofi")
    assert address.rails == 2
    assert "verbs x 2" in repr(address) and "ofi x 1" in repr(address) and "efa" in repr(address)


def test_one_kind_is_not_taken_for_the_other(engine: xr.Engine) -> None:
    rejected("address", engine.alloc(10).descriptor.to_bytes(), "address")
    rejected("descriptor", engine.address.to_bytes(), "descriptor")


@pytest.mark.parametrize("kind", ["address", "descriptor"])
@pytest.mark.parametrize("thing", [None, 5, "text", [1, 2], 1.5])
def test_what_is_no_bytes_is_rejected(kind: str, thing: object) -> None:
    with pytest.raises(xr.UsageError, match=r"^data must be bytes"):
        DECODERS[kind](thing)


@pytest.mark.parametrize("buffer", [bytearray, memoryview])
def test_what_came_into_a_buffer_is_read_from_there(encoded: tuple[str, bytes], buffer: type) -> None:
    kind, data = encoded

    assert DECODERS[kind](buffer(data)).to_bytes() == data


def test_name_that_is_no_utf8_does_not_crash(engine: xr.Engine) -> None:
    data = sealing.with_bytes(engine.address.to_bytes(), sealing.NAME_AT + 1, b"\xff")

    try:
        address = xr.Address.from_bytes(data)
    except xr.UsageError:
        return
    assert isinstance(address.name, str) and repr(address) and str(address)


def test_access_and_length_out_of_range_are_rejected(engine: xr.Engine) -> None:
    data = engine.alloc(1000).descriptor.to_bytes()
    rejected("descriptor", sealing.with_access(data, 2), "access")
    rejected("descriptor", sealing.with_memory(data, 2), "kind of memory 2")
    rejected("descriptor", sealing.with_length(data, 0), "length")
    rejected("descriptor", sealing.with_length(data, 2**63), "length")


# --- well-formed, but wrong ---


def as_of_a_gpu(descriptor: xr.RegionDescriptor) -> xr.RegionDescriptor:
    there = xr.RegionDescriptor.from_bytes(sealing.with_memory(descriptor.to_bytes(), 1))
    assert (descriptor.device, there.device) == ("cpu", "cuda")
    return there


@pytest.mark.parametrize("operation", ["write", "read"])
def test_memory_of_a_gpu_is_refused_where_nothing_moves_it(open_engine: EngineFactory, operation: str) -> None:
    engine = open_engine(transport="null")
    region = engine.alloc(1000)
    there = as_of_a_gpu(region.descriptor)
    with pytest.raises(xr.UsageError, match=r"is on a GPU, and .* is reached by null, which moves host memory only"):
        engine.submit_write(region, there) if operation == "write" else engine.submit_read(region, there)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_where_memory_is_its_owner_knows_and_no_descriptor(open_engine: EngineFactory, transport: str) -> None:
    """One that calls a host's memory a GPU's moves what it should: no driver is asked, and here there is none."""
    here, owner = open_engine("here", transport=transport), open_engine("owner", transport=transport)
    src, dst, back = here.alloc(1000), owner.alloc(1000), here.alloc(1000)
    src.array()[:] = [i % 251 for i in range(1000)]
    there = as_of_a_gpu(dst.descriptor)

    here.submit_write(src, there).wait(WAIT_S)
    here.submit_read(back, there).wait(WAIT_S)

    assert bytes(dst.array()) == bytes(src.array()) == bytes(back.array())


def test_descriptor_of_another_transport_is_refused(engine: xr.Engine) -> None:
    with xr.Engine("elsewhere", transport="null") as elsewhere:
        region = elsewhere.alloc(1000)
        src = engine.alloc(1000)

        with pytest.raises(xr.UsageError, match="transport"):
            engine.submit_write(src, region.descriptor)
        with pytest.raises(xr.UsageError, match="transport"):
            engine.connect(elsewhere.address)


def test_descriptor_of_another_host_is_refused_by_shared_memory(open_engine: EngineFactory) -> None:
    engine, other = open_engine(transport="shm"), open_engine(transport="shm")
    target = other.alloc(1000)
    data = target.descriptor.to_bytes()
    name_bytes = data[sealing.NAME_AT]
    host_at = sealing.NAME_AT + 1 + name_bytes + 1
    foreign = xr.RegionDescriptor.from_bytes(sealing.with_bytes(data, host_at, b"another-host"))

    with pytest.raises((xr.UsageError, xr.PeerLost), match="host"):
        engine.submit_write(engine.alloc(1000), foreign).wait(WAIT_S)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("memory", ["mapped", "private"])
@pytest.mark.parametrize("kind", DATA_KINDS)
def test_forged_length_is_refused_by_the_target(
    engine: xr.Engine, other: xr.Engine, spawn_peer: PeerFactory, processes: int, memory: str, kind: str
) -> None:
    if processes == 2:
        remote = spawn_peer().open().memory(1000, memory)
        true = remote.descriptor
    else:
        region = other.alloc(1000) if memory == "mapped" else other.register(np.full(1000, CANARY, np.uint8))
        true = region.descriptor
    forged = xr.RegionDescriptor.from_bytes(sealing.with_length(true.to_bytes(), 9_000_000))
    mine = engine.alloc(9_000_000)

    transfer = Operations(engine, mine, [forged]).submit(kind)

    with pytest.raises(xr.RemoteAccessError):
        transfer.wait(WAIT_S)
    if processes == 2:
        assert (remote.content() == CANARY).all()
    engine.submit_write(mine, true, 1000, imm=1).wait(WAIT_S)  # the peer is as well as before


@pytest.mark.parametrize("memory", ["mapped", "private"])
@pytest.mark.parametrize("access", ["local", "read"])
def test_forged_access_is_refused_by_the_target(
    engine: xr.Engine, spawn_peer: PeerFactory, access: str, memory: str
) -> None:
    remote = spawn_peer().open().memory(1000, "private", access=access)
    data = remote.descriptor.to_bytes()
    forged = xr.RegionDescriptor.from_bytes(sealing.with_access(data, 3))
    mine = engine.alloc(1000) if memory == "mapped" else engine.register(bytearray(1000))

    with pytest.raises(xr.RemoteAccessError):
        engine.submit_write(mine, forged).wait(WAIT_S)
    if access == "local":
        with pytest.raises(xr.RemoteAccessError):
            engine.submit_read(mine, forged).wait(WAIT_S)

    assert (remote.content() == CANARY).all()


@pytest.mark.parametrize("processes", [1, 2])
def test_region_that_never_was_is_refused_by_the_target(
    engine: xr.Engine, other: xr.Engine, spawn_peer: PeerFactory, processes: int
) -> None:
    target = spawn_peer().open().memory(1000) if processes == 2 else other.alloc(1000)
    true = target.descriptor
    mine = engine.alloc(1000)

    for region_id in (1, 2, 0xFFFF, 0xFFFFFFFF, 2**32 + 5, 2**63, 2**64 - 1):
        data = sealing.with_region_id(true.to_bytes(), region_id)
        if data == true.to_bytes():
            continue
        transfer = engine.submit_write(mine, xr.RegionDescriptor.from_bytes(data))
        with pytest.raises(xr.RemoteRegionClosed):
            transfer.wait(WAIT_S)

    engine.submit_write(mine, true).wait(WAIT_S)


def test_address_with_other_rails_than_the_engine_has_does_no_harm(
    open_engine: EngineFactory, spawn_peer: PeerFactory
) -> None:
    engine = open_engine(rails=16)
    there = spawn_peer().open(rails=1)
    remote = there.memory(1000)
    data = remote.descriptor.to_bytes()
    rails_at = len(data) + sealing.REGION_ID_AT - 2  # behind it only the number of endpoints, 0
    forged = xr.RegionDescriptor.from_bytes(sealing.with_bytes(data, rails_at, b"\x10"))

    try:
        engine.submit_write(engine.alloc(1000), forged, imm=1).wait(WAIT_S)
    except (xr.TransferError, xr.UsageError):
        pass  # refusing is as good as working: only crash, hang and silent loss are not

    engine.forget_peer(there.address)
    engine.submit_write(engine.alloc(1000), remote.descriptor, imm=2).wait(WAIT_S)
    there.expect_count(2, 1)
