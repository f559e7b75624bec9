"""Words of the host that kernels of a true GPU add to, within CUDA graphs and without."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import pytest
import torch

from crossrail.errors import UsageError, WaitTimeout
from crossrail.kv import KvLayout, KvReceiver, KvSender, KvTarget, PagePool, RankMemory
from tests.conftest import EngineFactory
from tests.support.limits import WAIT_S

pytestmark = [pytest.mark.hw, pytest.mark.timeout(120)]


def wait_for(watcher: Any, value: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while watcher.value != value:
        assert time.monotonic() < deadline, f"the word is {watcher.value}, not {value}"


def test_launched_and_replayed_additions_add_up(open_engine: EngineFactory) -> None:
    engine, seen = open_engine(), []
    watcher = engine.alloc_watcher(lambda old, new: seen.append((old, new)))
    watcher.add_on()
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    for stream in streams:
        watcher.add_on(stream, 10)
        stream.synchronize()
    watcher.add_on(streams[0].cuda_stream, 100)
    wait_for(watcher, 121)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            watcher.add_on(delta=1000)
    assert watcher.value == 121  # captured, not run
    for _ in range(5):
        graph.replay()
    wait_for(watcher, 15_121)
    deadline = time.monotonic() + WAIT_S
    while not seen or seen[-1][1] != 15_121:
        assert time.monotonic() < deadline, seen
    assert seen[0][0] == 0
    assert all(one[1] == other[0] for one, other in itertools.pairwise(seen))


def test_the_first_addition_of_an_engine_is_captured(open_engine: EngineFactory) -> None:
    """What it pins and loads must not break the capture."""
    watcher = open_engine().alloc_watcher(lambda old, new: None)
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(100, device="cuda")
    with torch.cuda.graph(graph):
        x += 1
        watcher.add_on()
        x += 1
    graph.replay()
    torch.cuda.synchronize()
    wait_for(watcher, 1)
    assert float(x.sum()) == 200


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_layers_of_a_graph_leave_as_their_words_say(open_engine: EngineFactory, transport: str) -> None:
    """What a layer's kernel wrote before its addition is what arrives, and not what was there at the replay before."""
    options = {"transport": transport} | ({"rails": ["127.0.0.1"]} if transport == "tcp" else {})
    here, there = open_engine("here", **options), open_engine("there", **options)
    layers, nbytes = 8, 1 << 20
    kv = torch.zeros(layers, nbytes, dtype=torch.uint8, device="cuda")
    arrived = torch.zeros_like(kv)
    step = torch.zeros((), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    ours, theirs = here.register(kv), there.register(arrived)
    sent = []

    def leave(old: int, new: int) -> None:
        for layer in (number % layers for number in range(old, new)):
            at = layer * nbytes
            sent.append(here.submit_write(ours, theirs.descriptor, nbytes, src_offset=at, dst_offset=at, imm=1))

    watcher = here.alloc_watcher(leave)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step += 1
        for layer in range(layers):
            torch.cuda._sleep(100_000)
            kv[layer] = step * 8 + layer
            watcher.add_on()
    for number in range(1, 6):
        graph.replay()
        there.imm_counter(1).wait(layers, WAIT_S)
        wanted = torch.arange(layers, device="cuda", dtype=torch.uint8) + 8 * number
        assert torch.equal(arrived, wanted[:, None].expand_as(arrived))
    for transfer in sent:
        transfer.wait(WAIT_S)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_captured_model_sends_its_kv_layer_by_layer(open_engine: EngineFactory, transport: str) -> None:
    options = {"transport": transport} | ({"rails": ["127.0.0.1"]} if transport == "tcp" else {})
    layout = KvLayout(layers=6, pages=16, page_tokens=8, kv_heads=2, head_dim=64, dtype="bfloat16", tp=1)
    tokens = layout.pages * layout.page_tokens
    caches = [torch.zeros(layout.layers, layout.layer_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    engines = [open_engine(name, **options) for name in ("prefiller", "decoder")]
    here, there = (RankMemory.register(engine, layout, [cache]) for engine, cache in zip(engines, caches, strict=True))
    pools = [PagePool(layout.pages, layout.page_tokens) for _ in range(2)]
    sender, receiver = KvSender(layout, {0: here}), KvReceiver(layout, [there], pools[1])
    request = torch.zeros((), dtype=torch.uint8, device="cuda")
    model = torch.cuda.CUDAGraph()
    with torch.cuda.graph(model):
        request += 1
        for layer in range(layout.layers):
            torch.cuda._sleep(100_000)
            caches[0][layer] = request * 8 + layer
            sender.layer_done_on()
    for number in range(1, 5):
        reception = receiver.reserve(f"request-{number}", tokens)
        target = KvTarget.from_wire(reception.dispatch(layout).to_wire())
        lease = pools[0].reserve(layout.pages, target.request)
        job = sender.open(target, lease)
        sender.begin_step([(job, tokens)])
        model.replay()
        await asyncio.wait_for(asyncio.gather(job.finish(), reception.arrived(WAIT_S)), WAIT_S)
        wanted = torch.arange(layout.layers, device="cuda", dtype=torch.uint8) + 8 * number
        assert torch.equal(caches[1], wanted[:, None].expand_as(caches[1]))
        lease.release()
        reception.release()
    await sender.close()
    receiver.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_graph_waits_for_what_peers_write(open_engine: EngineFactory, transport: str) -> None:
    """What follows the wait reads what was counted, at each replay its own, and no CPU thread of ours is asked."""
    options = {"transport": transport} | ({"rails": ["127.0.0.1"]} if transport == "tcp" else {})
    here, there = open_engine("here", **options), open_engine("there", **options)
    nbytes = 1 << 20
    source = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    arrived, seen = torch.zeros_like(source), torch.zeros(8, dtype=torch.uint8, device="cuda")
    step = torch.zeros(1, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    ours, theirs = here.register(source), there.register(arrived)
    flag = there.imm_counter(1).raise_flag()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flag.wait_on(count=2, timeout_s=WAIT_S)
        seen.index_copy_(0, step, arrived[-1:])
        step += 1
    for number in range(1, 9):
        source.fill_(number)
        torch.cuda.synchronize()
        graph.replay()
        for part in range(2):
            at = part * nbytes // 2
            here.submit_write(ours, theirs.descriptor, nbytes // 2, src_offset=at, dst_offset=at, imm=1).wait(WAIT_S)
        torch.cuda.synchronize()
        flag.check()
        assert seen[number - 1] == number
    assert flag.taken == 16


def test_a_wait_of_a_kernel_has_a_deadline(open_engine: EngineFactory) -> None:
    flag = open_engine().imm_counter(1).raise_flag()
    flag.wait_on(timeout_s=0.05)
    flag.wait_on(count=5, timeout_s=1000)  # not waited for: the first was in vain
    torch.cuda.synchronize()
    with pytest.raises(WaitTimeout, match="waited for 1 counts"):
        flag.check()
    flag.wait_on(count=3, timeout_s=1000)
    flag.close()
    torch.cuda.synchronize()
    with pytest.raises(UsageError, match="waited for 3 counts"):
        flag.check()
