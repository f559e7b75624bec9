"""KV caches in memory of GPUs, on either side or both: by the double of the driver, whose memory no CPU can touch."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.kv import KvLayout, KvReceiver, KvSender, RankMemory
from tests.conftest import EngineFactory
from tests.kv.instances import TAIL_BYTES, Decoder, Prefiller, assert_all_free, closing
from tests.support.fake_gpu import FakeGpu
from tests.support.limits import WAIT_S

LAYOUT = KvLayout(layers=3, pages=32, page_tokens=8, kv_heads=4, head_dim=16, dtype="bfloat16", tp=2)
SIDES = pytest.mark.parametrize(("from_gpu", "to_gpu"), [(True, True), (True, False), (False, True)])
ENDS = [13, 24, 25, 61]


@pytest.fixture
def engines(gpu: FakeGpu, open_engine: EngineFactory, transport: str) -> tuple[xr.Engine, xr.Engine]:
    return open_engine("prefiller", transport=transport), open_engine("decoder", transport=transport)


@pytest.fixture
def transport() -> str:
    return "shm"


@SIDES
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({}, {}),
        ({"tp": 1, "order": "NHD"}, {"tp": 4, "page_tokens": 6}),
        ({"kind": "JOINT", "order": "NHD"}, {"kind": "JOINT", "tp": 1}),
        ({"kind": "MLA", "kv_heads": 1, "tp": 1}, {"kind": "MLA", "kv_heads": 1, "tp": 2}),
    ],
    ids=str,
)
async def test_kv_and_tail_arrive(
    gpu: FakeGpu,
    engines: tuple[xr.Engine, xr.Engine],
    from_gpu: bool,
    to_gpu: bool,
    source: dict[str, Any],
    target: dict[str, Any],
) -> None:
    prefiller = Prefiller(replace(LAYOUT, **source), [engines[0]], gpu=gpu if from_gpu else None)
    decoder = Decoder(replace(LAYOUT, **target), [engines[1]], tail=True, gpu=gpu if to_gpu else None)
    reception = decoder.reserve("request", ENDS[-1])
    async with closing(prefiller):
        job = prefiller.open(reception.dispatch(prefiller.layout, writer="prefiller/1"))
        await asyncio.gather(prefiller.prefill(job, ENDS), reception.arrived(WAIT_S))

    decoder.assert_holds(reception, prefiller.kv_of("request", ENDS[-1]))
    assert bytes(reception.tail()) == bytes(prefiller.tail.view())
    reception.release()
    decoder.receiver.close()
    assert_all_free(prefiller.pool, decoder.pool)


async def test_a_tail_may_lie_on_the_gpu(gpu: FakeGpu, engines: tuple[xr.Engine, xr.Engine]) -> None:
    prefiller, decoder = Prefiller(LAYOUT, [engines[0]], gpu=gpu), Decoder(LAYOUT, [engines[1]], tail=True, gpu=gpu)
    tail = gpu.array(np.arange(TAIL_BYTES, dtype=np.uint8) + 7)
    reception = decoder.reserve("request", 10)
    async with closing(prefiller):
        job = prefiller.open(reception.dispatch(LAYOUT))
        await prefiller.step([(job, 10)])
        job.send_tail(engines[0].register(tail))
        await asyncio.wait_for(asyncio.gather(job.finish(), reception.arrived(WAIT_S)), WAIT_S)

    assert bytes(reception.tail()) == bytes(tail.bytes)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_writer_that_was_fenced_off_changes_nothing(gpu: FakeGpu, engines: tuple[xr.Engine, xr.Engine]) -> None:
    """Each writer has registrations of the GPU's memory of its own: closing them shuts it out, and nobody else."""
    prefiller, decoder = Prefiller(LAYOUT, [engines[0]], gpu=gpu), Decoder(LAYOUT, [engines[1]], gpu=gpu)
    shut, other = (decoder.reserve(name, 20) for name in ("shut", "other"))
    async with closing(prefiller):
        job = prefiller.open(shut.dispatch(LAYOUT, writer="first"))
        await decoder.receiver.fence("first", WAIT_S)
        await prefiller.step([(job, 20)])
        with pytest.raises(xr.TransferError):
            await asyncio.wait_for(job.finish(), WAIT_S)
        decoder.assert_untouched(shut.lease.pages)

        again = prefiller.open(other.dispatch(LAYOUT, writer="second"))
        await asyncio.gather(prefiller.prefill(again, [20]), other.arrived(WAIT_S))

    decoder.assert_holds(other, prefiller.kv_of("other", 20))
    decoder.assert_untouched(shut.lease.pages)
    decoder.receiver.close()


async def test_one_buffer_a_layer(gpu: FakeGpu, engines: tuple[xr.Engine, xr.Engine]) -> None:
    """By address, as inference engines give it."""
    layout = replace(LAYOUT, tp=1)
    buffers = [[gpu.allocate(layout.layer_bytes, 1) for _ in range(layout.layers)] for _ in engines]
    source, target = (
        RankMemory.register(engine, layout, [(layer.address, layer.nbytes) for layer in layers])
        for engine, layers in zip(engines, buffers, strict=True)
    )
    for i, layer in enumerate(buffers[0]):
        layer.bytes[:] = i + 1
    decoder = Decoder(layout, [engines[1]])
    receiver, sender = KvReceiver(layout, [target], decoder.pool), KvSender(layout, {0: source})
    prefiller = Prefiller(layout, [engines[0]])
    prefiller.sender, before = sender, prefiller.sender
    await before.close()
    reception = receiver.reserve("request", 8)
    async with closing(prefiller):
        job = prefiller.open(reception.dispatch(layout))
        sender.begin_step([(job, 8)])
        sender.layer_done(3)
        await asyncio.wait_for(asyncio.gather(job.finish(), reception.arrived(WAIT_S)), WAIT_S)

    (page,) = reception.lease.pages
    for i, layer in enumerate(buffers[1]):
        for part in layout.layer_view(layer.bytes):
            assert (part[page].view(np.uint8) == i + 1).all()
    receiver.close()


async def test_a_layer_of_a_gpu_is_no_array(gpu: FakeGpu, engines: tuple[xr.Engine, xr.Engine]) -> None:
    memory = RankMemory.register(engines[0], replace(LAYOUT, tp=1), [gpu.allocate(replace(LAYOUT, tp=1).rank_bytes)])
    with pytest.raises(xr.UsageError, match="layer 1 is on cuda:0"):
        memory.layer(1)
