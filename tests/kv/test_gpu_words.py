"""KV that leaves layer by layer when kernels add to the sender's word: by the double of the driver."""

from __future__ import annotations

import asyncio
import threading

import pytest

import crossrail as xr
from crossrail.kv import KvLayout
from tests.conftest import EngineFactory
from tests.kv.instances import Decoder, Prefiller, closing
from tests.support.fake_gpu import FakeGpu
from tests.support.gpu_stream import Stream
from tests.support.limits import WAIT_S, eventually, never

LAYOUT = KvLayout(layers=3, pages=32, page_tokens=8, kv_heads=4, head_dim=16, dtype="bfloat16", tp=2)


@pytest.fixture
def engines(gpu: FakeGpu, open_engine: EngineFactory, transport: str) -> tuple[xr.Engine, xr.Engine]:
    return open_engine("prefiller", transport=transport), open_engine("decoder", transport=transport)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("graphed", [True, False], ids=["graph", "launches"])
async def test_a_layer_leaves_after_its_kernel(
    gpu: FakeGpu, engines: tuple[xr.Engine, xr.Engine], graphed: bool
) -> None:
    """One that left earlier would bring the canary."""
    prefiller, decoder = Prefiller(LAYOUT, [engines[0]], gpu=gpu), Decoder(LAYOUT, [engines[1]], gpu=gpu)
    stream = Stream(gpu)
    async with closing(prefiller):
        for name in ("first", "second"):
            reception = decoder.reserve(name, 20)
            job = prefiller.open(reception.dispatch(LAYOUT))
            prefiller.poison(job)
            if graphed:
                stream.begin_capture()
            for layer in range(LAYOUT.layers):
                stream.launch(prefiller.compute, job, layer)
                prefiller.sender.layer_done_on(stream)
            if graphed:
                graph = stream.end_capture()
            prefiller.sender.begin_step([(job, 20)])
            if graphed:
                graph.replay(stream)
            never(lambda job=job: job.posted, "a layer posted before any kernel has run")
            for layer in range(LAYOUT.layers):
                stream.run(1)  # its KV is there, and nobody has said so
                assert len(job.posted) == layer
                stream.run(1)
                eventually(lambda job=job, n=layer: len(job.posted) == n + 1, f"layer {layer} posted")
            await asyncio.wait_for(asyncio.gather(job.finish(), reception.arrived(WAIT_S)), WAIT_S)
            decoder.assert_holds(reception, prefiller.kv_of(name, 20))
            job.lease.release()
    decoder.receiver.close()


@pytest.mark.parametrize("transport", ["shm"])
async def test_several_layers_at_once(gpu: FakeGpu, engines: tuple[xr.Engine, xr.Engine]) -> None:
    prefiller, decoder = Prefiller(LAYOUT, [engines[0]], gpu=gpu), Decoder(LAYOUT, [engines[1]], gpu=gpu)
    stream, reception = Stream(gpu, 1), decoder.reserve("request", 20)
    async with closing(prefiller):
        job = prefiller.open(reception.dispatch(LAYOUT))
        prefiller.sender.begin_step([(job, 20)])
        for layer in range(LAYOUT.layers):
            stream.launch(prefiller.compute, job, layer)
        prefiller.sender.layer_done_on(stream, LAYOUT.layers)
        thread = threading.Thread(target=stream.run)  # the GPU is nobody's thread
        thread.start()
        await asyncio.wait_for(asyncio.gather(job.finish(), reception.arrived(WAIT_S)), WAIT_S)
        thread.join(WAIT_S)
        decoder.assert_holds(reception, prefiller.kv_of("request", 20))
    decoder.receiver.close()
