"""The caller's mistakes: a UsageError at the call that names the argument, its value and the bound; nothing moves."""

import asyncio
import ctypes
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

import crossrail as xr
from tests.support.limits import WAIT_S
from tests.support.patterns import CANARY, assert_same_bytes, pattern
from tests.support.process import assert_clean, run_script

NBYTES = 1000


@dataclass
class Bench:
    """Two regions of NBYTES: `src` of our engine, `dst` of another."""

    engine: xr.Engine
    src: xr.Region
    dst: xr.Region

    def write(self, **how: object) -> xr.Transfer:
        return self.engine.submit_write(self.src, self.dst.descriptor, **how)

    def read(self, **how: object) -> xr.Transfer:
        return self.engine.submit_read(self.src, self.dst.descriptor, **how)

    def paged(
        self, src_pages: object = None, dst_pages: object = None, page_bytes: int = 100, **how: object
    ) -> xr.Transfer:
        src_pages = np.arange(10) if src_pages is None else src_pages
        dst_pages = np.arange(10) if dst_pages is None else dst_pages
        return self.engine.submit_paged_writes(self.src, src_pages, self.dst.descriptor, dst_pages, page_bytes, **how)


@pytest.fixture
def bench(engine: xr.Engine, other: xr.Engine) -> Iterator[Bench]:
    """Afterwards both regions must be as they were, nothing may have been counted, and a write must still work."""
    src, dst = engine.alloc(NBYTES), other.alloc(NBYTES)
    src.array()[:] = pattern(1, NBYTES)
    dst.array()[:] = CANARY
    yield Bench(engine, src, dst)
    assert_same_bytes(src.array(), pattern(1, NBYTES), "source")
    assert (dst.array() == CANARY).all(), "bytes moved although the call was refused"
    assert engine.stats()["transfers_submitted"] == 0
    engine.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
    other.imm_counter(1).wait(1, WAIT_S)


def refused(call: Callable[[], object], *words: object) -> None:
    """The call raises a UsageError whose text holds all of `words`."""
    with pytest.raises(xr.UsageError) as failure:
        call()
    for word in words:
        assert str(word) in str(failure.value)


@pytest.mark.parametrize("operation", ["write", "read"])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"length": 1001}, ("length", 1001, 1000)),
        ({"length": 1, "src_offset": 1000}, ("src", "offset", 1000)),
        ({"length": 1, "dst_offset": 1000}, ("dst", "offset", 1000)),
        ({"length": 500, "src_offset": 501}, ("src", "offset", 501, 1000)),
        ({"length": 500, "dst_offset": 501}, ("dst", "offset", 501, 1000)),
        ({"length": 0, "src_offset": 1001}, ("src", "offset", 1001, 1000)),
        ({"length": 0, "dst_offset": 1001}, ("dst", "offset", 1001, 1000)),
        ({"length": 2**64 - 1}, ("length", 2**64 - 1, 1000)),
        ({"length": 2**63, "src_offset": 2**63}, ("offset", 2**63, 1000)),
        ({"length": 2, "dst_offset": 2**64 - 1}, ("dst", "offset", 2**64 - 1, 1000)),
        ({"length": 2**64}, ("length",)),
        ({"length": -1}, ("length", -1)),
        ({"src_offset": -1}, ("src_offset", -1)),
        ({"dst_offset": -1}, ("dst_offset", -1)),
        ({"length": 1.5}, ("length",)),
        ({"length": "ten"}, ("length",)),
        ({"rail": 1}, ("rail", 1)),
        ({"rail": 16}, ("rail", 16)),
        ({"rail": -1}, ("rail", -1)),
    ],
    ids=str,
)
def test_range_past_the_region_rejected(
    bench: Bench, operation: str, how: dict[str, object], words: tuple[object, ...]
) -> None:
    refused(lambda: getattr(bench, operation)(**how), *words)


@pytest.mark.parametrize("imm", [-1, 2**28, 2**32 - 1, 2**32, 2**100])
def test_immediate_past_28_bits_rejected(bench: Bench, imm: int) -> None:
    group = bench.engine.add_peer_group([bench.dst.descriptor.owner])

    refused(lambda: bench.write(imm=imm), "imm", imm, 2**28 - 1)
    refused(lambda: bench.paged(imm=imm), "imm", imm, 2**28 - 1)
    refused(lambda: bench.engine.submit_barrier(group, imm), "imm", imm, 2**28 - 1)


@pytest.mark.parametrize("imm", [1.0, "5", b"5"])
def test_immediate_that_is_no_number_rejected(bench: Bench, imm: object) -> None:
    refused(lambda: bench.write(imm=imm), "imm")


@pytest.mark.parametrize("which", ["src_pages", "dst_pages"])
@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
def test_page_index_out_of_range_rejected(bench: Bench, which: str, dtype: str) -> None:
    for index in {10, 11, np.iinfo(dtype).max}:
        pages = np.arange(10, dtype=dtype)
        pages[7] = index
        refused(lambda pages=pages: bench.paged(**{which: pages}), which, index)


@pytest.mark.parametrize("which", ["src_pages", "dst_pages"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_negative_page_index_rejected(bench: Bench, which: str, dtype: str) -> None:
    for index in (-1, np.iinfo(dtype).min):
        pages = np.arange(10, dtype=dtype)
        pages[3] = index
        refused(lambda pages=pages: bench.paged(**{which: pages}), which, index)


@pytest.mark.parametrize("which", ["src_pages", "dst_pages"])
@pytest.mark.parametrize(
    "pages",
    [
        np.arange(10, dtype=np.float64),
        np.arange(10, dtype=np.int16),
        np.arange(10, dtype=np.uint8),
        np.zeros(10, bool),
        np.arange(10, dtype=">i8"),
        np.array([object()] * 10),
        bytes(80),
    ],
    ids=["float64", "int16", "uint8", "bool", "big-endian", "object", "bytes"],
)
def test_page_index_of_wrong_dtype_rejected(bench: Bench, which: str, pages: object) -> None:
    refused(lambda: bench.paged(**{which: pages}), which)


@pytest.mark.parametrize("which", ["src_pages", "dst_pages"])
def test_list_of_page_indices_rejected_with_the_way_to_make_an_array(bench: Bench, which: str) -> None:
    refused(lambda: bench.paged(**{which: [1, 2]}), which, f"numpy.asarray({which}, dtype=numpy.int64)")


@pytest.mark.parametrize("which", ["src_pages", "dst_pages"])
@pytest.mark.parametrize(
    "pages",
    [np.arange(20)[::2], np.arange(10)[::-1], np.arange(10).reshape(2, 5), np.arange(10).reshape(10, 1), np.array(5)],
    ids=["step", "reversed", "2-d", "column", "0-d"],
)
def test_page_index_not_one_contiguous_row_rejected(bench: Bench, which: str, pages: object) -> None:
    refused(lambda: bench.paged(**{which: pages}), which)


@pytest.mark.parametrize("which", ["src_pages", "dst_pages"])
@pytest.mark.parametrize(
    "pages", [list(range(10)), range(10), None, 5, "0123"], ids=["list", "range", "none", "int", "str"]
)
def test_page_index_that_is_no_array_rejected(bench: Bench, which: str, pages: object) -> None:
    arguments = {"src_pages": np.arange(10), "dst_pages": np.arange(10)} | {which: pages}

    refused(
        lambda: bench.engine.submit_paged_writes(
            bench.src, arguments["src_pages"], bench.dst.descriptor, arguments["dst_pages"], 100
        ),
        which,
    )


def test_page_index_arrays_of_different_length_rejected(bench: Bench) -> None:
    refused(lambda: bench.paged(src_pages=np.arange(9)), "src_pages", "dst_pages", 9, 10)
    refused(lambda: bench.paged(dst_pages=np.arange(9)), "src_pages", "dst_pages", 9, 10)


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ({"page_bytes": -100}, "page_bytes"),
        ({"page_bytes": 2**64}, "page_bytes"),
        ({"page_bytes": 101}, "pages"),
        ({"page_bytes": 2**63}, "page"),
        ({"src_stride": 101}, "src_pages"),
        ({"dst_stride": 101}, "dst_pages"),
        ({"src_stride": 2**61}, "src_"),  # 2**61 * 8 would wrap to 0
        ({"dst_stride": 2**61}, "dst_"),
        ({"src_stride": -1}, "src_stride"),
        ({"dst_stride": -1}, "dst_stride"),
        ({"src_offset": 1}, "src_"),
        ({"dst_offset": 1}, "dst_"),
        ({"src_offset": -1}, "src_offset"),
        ({"dst_offset": 2**64 - 1}, "dst_"),
        ({"rail": 1}, "rail"),
    ],
    ids=str,
)
def test_page_layout_past_the_region_rejected(bench: Bench, how: dict[str, object], word: str) -> None:
    refused(lambda: bench.paged(**how), word)


def test_pages_of_no_bytes_only_count(engine: xr.Engine) -> None:
    region = engine.alloc(NBYTES)

    engine.submit_paged_writes(region, np.arange(10), region.descriptor, np.arange(10), 0, imm=1).wait(WAIT_S)

    engine.imm_counter(1).wait(10, WAIT_S)
    assert not region.array().any()


def test_no_pages_at_all_rejected_or_done(engine: xr.Engine) -> None:
    region = engine.alloc(NBYTES)
    none = np.zeros(0, np.int64)

    try:
        transfer = engine.submit_paged_writes(region, none, region.descriptor, none, 100, imm=1)
    except xr.UsageError as error:
        assert "src_pages" in str(error)
    else:
        transfer.wait(WAIT_S)
        assert engine.imm_counter(1).poll() == 0


@pytest.mark.parametrize("dst", [None, 5, b"bytes", "text", object()], ids=["None", "5", "bytes", "text", "object"])
def test_target_that_is_no_descriptor_rejected(bench: Bench, dst: object) -> None:
    pages = np.arange(10)

    for call in (
        lambda: bench.engine.submit_write(bench.src, dst),
        lambda: bench.engine.submit_read(bench.src, dst),
        lambda: bench.engine.submit_paged_writes(bench.src, pages, dst, pages, 100),
    ):
        with pytest.raises((xr.UsageError, TypeError)):
            call()


@pytest.mark.parametrize(
    "src", [None, 5, bytearray(NBYTES), np.zeros(NBYTES, np.uint8)], ids=["none", "int", "bytearray", "numpy"]
)
def test_source_that_is_no_region_rejected(bench: Bench, src: object) -> None:
    with pytest.raises((xr.UsageError, TypeError)):
        bench.engine.submit_write(src, bench.dst.descriptor)


def test_region_of_another_engine_rejected(bench: Bench) -> None:
    refused(lambda: bench.engine.submit_write(bench.dst, bench.src.descriptor), "src", "engine")
    refused(lambda: bench.engine.submit_read(bench.dst, bench.src.descriptor), "dst", "engine")


def test_read_into_read_only_memory_rejected(bench: Bench) -> None:
    constant = bench.engine.register(bytes(NBYTES))

    refused(lambda: bench.engine.submit_read(constant, bench.dst.descriptor), "read")


@pytest.mark.parametrize("timeout_s", ["soon", float("nan"), -0.5])
def test_senseless_connect_timeout_rejected(bench: Bench, timeout_s: object) -> None:
    with pytest.raises((xr.UsageError, TypeError), match="timeout_s"):
        bench.engine.connect(bench.dst.descriptor.owner, timeout_s)


@pytest.mark.parametrize("timeout_s", ["soon", float("nan"), -0.5, []])
def test_senseless_timeout_is_one_also_when_nothing_is_to_wait_for(
    engine: xr.Engine, other: xr.Engine, timeout_s: object
) -> None:
    """Else the mistake shows on the day when something is slow."""
    target = other.alloc(10)
    transfer = engine.submit_write(engine.alloc(10), target.descriptor)
    transfer.wait(WAIT_S)
    with pytest.raises(xr.UsageError, match="timeout_s"):
        transfer.wait(timeout_s)
    with pytest.raises(xr.UsageError, match="timeout_s"):
        engine.imm_counter(1).wait(0, timeout_s)


@pytest.mark.parametrize("timeout_s", ["soon", float("nan"), -0.5, [], True])
def test_senseless_timeout_is_one_on_an_event_loop_too(engine: xr.Engine, timeout_s: object) -> None:
    region, pool = engine.alloc(1), engine.submit_recvs(2, 16)
    engine.submit_write(region, region.descriptor, imm=1).wait(WAIT_S)
    engine.submit_send(engine.address, b"x").wait(WAIT_S)

    for call in (engine.imm_counter(1).wait_async, lambda _, timeout_s: pool.recv_async(timeout_s)):
        with pytest.raises(xr.UsageError, match=r"^timeout_s"):
            asyncio.run(call(1, timeout_s))


@pytest.mark.parametrize("imported", ["import asyncio, crossrail", "import crossrail"])
def test_await_without_an_event_loop_of_asyncio_is_told_what_it_needs(imported: str) -> None:
    """As trio awaits: whoever drives the coroutine is not asyncio."""
    script = run_script(f"""
        {imported}

        async def awaited(transfer):
            await transfer

        with crossrail.Engine(transport="tcp", rails=["127.0.0.1"]) as engine:
            transfer = engine.submit_send(engine.address, b"held back")
            for what in (awaited(transfer), engine.imm_counter(1).wait_async(1, 5)):
                try:
                    what.send(None)
                except crossrail.UsageError as error:
                    print("asyncio" in str(error) and "wait()" in str(error))
    """)

    assert_clean(script)
    assert script.stdout.split() == ["True", "True"]


@pytest.mark.parametrize("callback", [5, "text"])
def test_callback_that_cannot_be_called_rejected(bench: Bench, callback: object) -> None:
    for call in (
        lambda: bench.engine.imm_counter(1).on_count(1, callback),
        lambda: bench.engine.alloc_watcher(callback),
        lambda: bench.engine.on_event(callback),
        lambda: bench.engine.submit_recvs(1, 16, callback),
    ):
        with pytest.raises((xr.UsageError, TypeError)):
            call()


# Of each kind of option, what is of another.
NO_TEXTS = [5, b"x", [], object(), "\ud800"]
NO_NUMBERS = ["x", b"x", [], object(), True]
WRONG_OPTIONS = [
    *((name, value) for name in ("name", "transport", "polling", "private_path") for value in NO_TEXTS),
    *((name, None) for name in ("transport", "polling", "private_path")),
    *((name, value) for name in ("peer_timeout_s", "spin_us", "watcher_poll_us") for value in [*NO_NUMBERS, None]),
    *((name, value) for name in ("connect_timeout_s", "heartbeat_s", "watchdog_s") for value in NO_NUMBERS),
    *((name, None) for name in ("rails", "port", "submit_queue_depth", "imm_counters_max", "recorder_entries")),
    *((name, "x") for name in ("rails", "port", "submit_queue_depth", "message_bytes_max", "recorder_entries")),
    *(("rdma", value) for value in (0, "", [], "x")),
    *(("counts_traffic", value) for value in (None, 1, "x")),
    *(("dump_dir", value) for value in (5, [], "/nonexistent", "/proc/self/stat")),
    ("secret", "\ud800"),
    ("tls", "x"),
    ("worker_cpu", np.arange(4)),
]


@pytest.mark.parametrize(("option", "value"), WRONG_OPTIONS, ids=lambda value: type(value).__name__[:20])
def test_option_of_the_wrong_kind_is_named(option: str, value: object) -> None:
    """In one line, and not by the signature of a function that nobody has called."""
    with pytest.raises(xr.UsageError, match=rf"^{option}\b") as raised:
        xr.Engine(**{option: value})
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 200


Call = Callable[[Bench, object], object]


def group(bench: Bench) -> xr.PeerGroup:
    return bench.engine.add_peer_group([bench.dst.descriptor.owner])


def scattered(bench: Bench, **how: object) -> xr.Transfer:
    usual = {"lengths": 1, "src_offsets": 0, "dst_offsets": 0}
    return bench.engine.submit_scatter(bench.src, [bench.dst.descriptor], **(usual | how))


NO_FLAG: dict[str, Call] = {
    "verify": lambda bench, given: bench.write(verify=given),
    "verify ": lambda bench, given: bench.paged(verify=given),
    "force": lambda bench, given: bench.engine.release_imm(1, force=given),
    "populate": lambda bench, given: bench.engine.alloc(1, populate=given),
    "drain": lambda bench, given: bench.src.close(drain=given),
}
NO_NUMBER: dict[str, Call] = {
    "imm": lambda bench, given: bench.engine.imm_counter(given),
    "imm ": lambda bench, given: bench.engine.submit_barrier(group(bench), given),
    "imm  ": lambda bench, given: bench.engine.release_imm(given),
    "count": lambda bench, given: bench.engine.imm_counter(1).wait(given, 0),
    "count ": lambda bench, given: bench.engine.imm_counter(1).try_consume(given),
    "count  ": lambda bench, given: bench.engine.imm_counter(1).on_count(given, print),
    "count   ": lambda bench, given: bench.engine.submit_recvs(given, 16),
    "nbytes": lambda bench, given: bench.engine.submit_recvs(1, given),
    "nbytes ": lambda bench, given: bench.engine.alloc(given),
    "src_offset": lambda bench, given: bench.write(src_offset=given),
    "dst_offset": lambda bench, given: bench.read(dst_offset=given),
    "page_bytes": lambda bench, given: bench.paged(page_bytes=given),
    "lengths": lambda bench, given: scattered(bench, lengths=given),
    "offset": lambda bench, given: bench.src.poison(given),
    "rails": lambda bench, given: xr.Engine(rails=given),
}
NO_OBJECT: dict[str, Call] = {
    "peer": lambda bench, given: bench.engine.connect(given),
    "peer ": lambda bench, given: bench.engine.peer_state(given),
    "peer  ": lambda bench, given: bench.engine.explain(given),
    "peer   ": lambda bench, given: bench.engine.forget_peer(given),
    "peers": lambda bench, given: bench.engine.add_peer_group(given),
    "peer    ": lambda bench, given: bench.engine.add_peer_group([given]),
    "group": lambda bench, given: bench.engine.remove_peer_group(given),
    "group ": lambda bench, given: bench.engine.submit_barrier(given, 1),
    "dsts": lambda bench, given: bench.engine.submit_scatter(bench.src, given, lengths=1, src_offsets=0, dst_offsets=0),
    "descriptor": lambda bench, given: bench.engine.map(given),
    "fn": lambda bench, given: bench.engine.submit_write(bench.src, bench.dst.descriptor).add_done_callback(given),
    "data": lambda bench, given: xr.Address.from_bytes(given),
    "data ": lambda bench, given: xr.RegionDescriptor.from_bytes(given),
    "text": lambda bench, given: xr.Address.from_text(given),
    "access": lambda bench, given: bench.engine.register(bytearray(1), access=given or 0),
    "reason": lambda bench, given: bench.engine.dump(reason=given),
    "path": lambda bench, given: bench.engine.dump(given or 0),
    "dtype": lambda bench, given: bench.src.array(given or 0),
}
WRONG_ARGUMENTS = [
    *((name, call, given) for name, call in NO_FLAG.items() for given in (None, 1, "x", [])),
    *((name, call, given) for name, call in NO_NUMBER.items() for given in (None, True, 1.5, object())),
    *((name, call, given) for name, call in NO_OBJECT.items() for given in (None, 5, True, object())),
    ("group", lambda bench, given: scattered(bench, group=given), 5),
    ("peers", lambda bench, given: bench.engine.add_peer_group(given), "text"),
    ("peers", lambda bench, given: bench.engine.add_peer_group(given), np.array(3)),
    ("dsts", NO_OBJECT["dsts"], np.array(3)),
    ("lengths", NO_NUMBER["lengths"], np.array(None)),
    ("offset", NO_NUMBER["offset"], np.arange(2)),
    ("stride", lambda bench, given: bench.src.poison_pages(np.arange(1), 1, stride=given), "x"),
    ("page_bytes", lambda bench, given: bench.src.poison_pages(np.arange(1), given), None),
    ("timeout_s", lambda bench, given: bench.engine.connect(bench.dst.descriptor.owner, given), True),
]


@pytest.mark.parametrize(
    ("argument", "call", "given"), WRONG_ARGUMENTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_argument_of_the_wrong_kind_is_named(
    engine: xr.Engine, other: xr.Engine, argument: str, call: Call, given: object
) -> None:
    """In one line, and not by the signature of a function that nobody has called."""
    bench = Bench(engine, engine.alloc(NBYTES), other.alloc(NBYTES))

    with pytest.raises(xr.UsageError, match=rf"^{argument.strip()}\b") as raised:
        call(bench, given)

    assert "\n" not in str(raised.value)
    assert not bench.src.closed


def test_numbers_of_options_are_told_with_their_bounds() -> None:
    for rails in (-1, 0, 17, 2**70):
        refused(lambda rails=rails: xr.Engine(rails=rails), "rails", rails, "1..16")


def test_no_timeout_is_one_that_never_ends(engine: xr.Engine) -> None:
    region = engine.alloc(NBYTES)

    region.revoke(None)
    region.close(None)
    engine.close(None)

    assert region.closed and engine.closed


def test_memory_that_is_not_mapped_is_refused(engine: xr.Engine) -> None:
    """Whoever copied it would end with SIGSEGV. With a hole in the middle, none at all, or beyond all addresses."""
    page = mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + 3 * [ctypes.c_int] + [ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, 3 * page, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    engine.register((address + 1, 3 * page - 1)).close()

    assert libc.munmap(address + page, page) == 0
    refused(lambda: engine.register((address, 3 * page)), f"{3 * page} bytes at address {address}", "not mapped")
    engine.register((address + 2 * page, page)).close()
    for piece in (address, address + 2 * page):
        assert libc.munmap(piece, page) == 0

    for nothing, nbytes in ((page, page), (2**64 - page, page), (2**47 - 1, 2)):
        refused(lambda at=nothing, size=nbytes: engine.register((at, size)), "not mapped in this process")


def test_address_and_length_may_be_numpys_numbers(engine: xr.Engine) -> None:
    memory = np.arange(10)

    region = engine.register((np.int64(memory.ctypes.data), np.prod((10, 8))))

    assert region.nbytes == 80
    refused(lambda: engine.register((memory.ctypes.data, 80.0)), "two ints")
