"""SGLang's pools in memory of GPUs, by the double of the driver, and kernels that run when the test says so."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.integrations.sglang import decode
from tests.sglang.conftest import Open
from tests.sglang.side import BOOTSTRAPPING, FAILED, SUCCESS, TRANSFERRING, WAITING, Side, failure, send, until
from tests.support.fake_gpu import FakeGpu
from tests.support.gpu_stream import Event, Stream
from tests.support.limits import eventually, never

MINE, THEIRS = [3, 7, 1, 12, 5], [0, 9, 4, 2, 11]


@pytest.fixture(autouse=True)
def stream(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Stream:
    """What decoders have launched, instead of torch's."""
    stream = Stream(gpu)
    monkeypatch.setattr(decode, "wait_for_kernels", lambda device: stream.record().synchronize())
    return stream


OpenPair = Callable[..., tuple[Side, Side]]


@pytest.fixture
def open_pair(stream: Stream, open_side: Open) -> OpenPair:
    def open_both(from_gpu: bool = True, to_gpu: bool = True, **options: Any) -> tuple[Side, Side]:
        gpus = (stream.gpu if from_gpu else None, stream.gpu if to_gpu else None)
        return open_side("prefill", gpu=gpus[0], **options), open_side("decode", gpu=gpus[1], **options)

    return open_both


@pytest.mark.parametrize("on_gpu", [True, False])
def test_each_rank_takes_the_rails_near_its_gpu(
    open_side: Open, stream: Stream, monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(xr.engine, "default_rails", lambda transport, rails, device: seen.append(device) or rails)

    open_side("prefill", gpu=stream.gpu if on_gpu else None)

    assert seen == ["cuda:0" if on_gpu else None]


def begin(p: Side, d: Side) -> tuple[Any, Any]:
    sender, receiver = p.sender(1), d.receiver(1)
    receiver.send_metadata(np.array(THEIRS, np.int32), 3)
    return sender, receiver


def run_until(poll: int, stream: Stream, *pollers: Any) -> None:
    """The same, while the stream runs what comes."""

    def reached() -> bool:
        stream.run()
        return all(poller.poll() == poll for poller in pollers)

    eventually(reached, f"polls of {pollers} are {poll}")


@pytest.mark.parametrize("mla", [False, True], ids=["MHA", "MLA"])
@pytest.mark.parametrize(("from_gpu", "to_gpu"), [(True, True), (True, False), (False, True)])
def test_a_prompt_arrives_byte_for_byte(
    open_pair: OpenPair, stream: Stream, from_gpu: bool, to_gpu: bool, mla: bool
) -> None:
    p, d = open_pair(from_gpu, to_gpu, mla=mla)
    sender, receiver = begin(p, d)
    run_until(WAITING, stream, sender)
    send(p, sender, "hello", MINE, 6)
    run_until(SUCCESS, stream, receiver, sender)

    d.assert_holds("hello", THEIRS, 3)
    d.assert_untouched(THEIRS, [3])


def test_pages_are_written_when_earlier_kernels_have_ended_with_them(open_pair: OpenPair, stream: Stream) -> None:
    p, d = open_pair()

    def of_the_last_owner() -> None:
        for plane in d.planes:
            plane[THEIRS] = 0x55

    stream.launch(of_the_last_owner)
    sender, receiver = begin(p, d)
    until(TRANSFERRING, receiver)
    never(lambda: sender.poll() != BOOTSTRAPPING, "the prefiller was asked")

    run_until(WAITING, stream, sender)
    send(p, sender, "hello", MINE, 6)
    run_until(SUCCESS, stream, receiver, sender)

    d.assert_holds("hello", THEIRS, 3)


def test_what_is_sent_before_its_kernels_have_ended_comes_with_an_event(open_pair: OpenPair, stream: Stream) -> None:
    """A prefix that an earlier batch may still compute; the rest, and what SGLang waited for, follows it in order."""
    p, d = open_pair()
    sender, receiver = begin(p, d)
    run_until(WAITING, stream, sender)
    sender.init(len(MINE), 6)
    computed = sender._early_send_wait_event = Event()
    sender.send(np.array(MINE[:2], np.int32), None)
    sender.send(np.array(MINE[2:], np.int32), None)
    never(lambda: sender._room.posted, "it was sent before its event")
    p.compute("hello", MINE, 6)
    computed.done()
    run_until(SUCCESS, stream, receiver, sender)

    for plane, memory in enumerate(d.planes):
        np.testing.assert_array_equal(memory[THEIRS], p.planes[plane][MINE])


def test_a_gpu_that_fails_fails_its_rooms(open_pair: OpenPair, stream: Stream) -> None:
    p, d = open_pair()
    sender, receiver = begin(p, d)
    run_until(WAITING, stream, sender)
    sender.init(len(MINE), 6)
    sender._early_send_wait_event = failed = Event()
    sender.send(np.array(MINE, np.int32), None)
    failed.done("an illegal memory access was encountered")
    until(FAILED, sender, receiver)
    assert "the GPU failed: an illegal memory access" in failure(sender).failure_reason

    stream.fail("unspecified launch failure")
    again = d.receiver(2)
    again.send_metadata(np.array(THEIRS, np.int32), 3)
    until(FAILED, again)
    assert "the GPU failed: unspecified launch failure" in failure(again).failure_reason


def test_overlapped_prefill_is_for_gpus(stream: Stream, open_side: Open) -> None:
    overlaps = {"server_args": {"disable_overlap_schedule": False}}
    assert open_side("prefill", gpu=stream.gpu, **overlaps).manager.core.node.device == "cuda:0"
    with pytest.raises(xr.UsageError, match="--disable-overlap-schedule is missing"):
        open_side("prefill", **overlaps)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_checksums_are_for_gpus(stream: Stream, open_side: Open, mode: str) -> None:
    checks = {"server_args": {"disable_overlap_schedule": True, "disaggregation_enable_kv_checksum": True}}
    assert open_side(mode, gpu=stream.gpu, **checks).manager.core.node.device == "cuda:0"
    with pytest.raises(xr.UsageError, match="SGLang computes checksums of KV by CUDA"):
        open_side(mode, **checks)


def test_what_is_no_cache_of_one_kind_is_refused(stream: Stream, open_side: Open) -> None:
    memory = stream.gpu.allocate(1 << 16)
    host = np.zeros(1 << 16, np.uint8)
    pointers = [memory.address, memory.address + 4096, host.ctypes.data, memory.address + 8192]
    with pytest.raises(xr.UsageError, match=r"kv_data_ptrs\[2\]=0x[0-9a-f]+ and kv_data_ptrs\[0\] are not both"):
        open_side("decode", kv_data_ptrs=pointers)
    with pytest.raises(xr.UsageError, match="aux_data_ptrs are memory of a GPU"):
        open_side("decode", gpu=stream.gpu, aux_data_ptrs=[memory.address, memory.address + 4096])
