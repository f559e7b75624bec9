"""`with` and `async with`: what has a close() is closed at the end, also of a body that raises."""

import asyncio

import pytest

import crossrail as xr
from crossrail.control.mailbox import NoAnswer
from crossrail.control.wire import EngineWire
from crossrail.kv import KvLayout, KvReceiver, KvSender, PagePool, RankMemory, messages
from crossrail.kv.nodes.prefiller import Prefiller
from crossrail.kv.router.router import Router
from crossrail.kv.toy import ToyModel
from crossrail.weights import WeightMemory, WeightReceiver, WeightTrainer
from crossrail.weights import messages as weight_messages
from tests.conftest import EngineFactory
from tests.support.limits import WAIT_S

LAYOUT = KvLayout(layers=2, pages=4, page_tokens=4, kv_heads=1, head_dim=8, dtype="float16")


async def ask_in_vain(engine: xr.Engine) -> None:
    """Leaves with a KeyError, and a question under way."""
    with EngineWire(engine) as wire:
        async with messages.mailbox(wire, b"secret") as box:
            box.start()
            kept.append(
                asyncio.ensure_future(box.ask(box.address, messages.Probe("r", 1), messages.Progress, timeout_s=WAIT_S))
            )
            await asyncio.sleep(0)
            raise KeyError


kept: list[asyncio.Future[messages.Progress]] = []


async def test_a_mailbox_and_its_wire_are_closed_when_the_body_raises(open_engine: EngineFactory) -> None:
    with pytest.raises(KeyError):
        await ask_in_vain(open_engine())
    with pytest.raises(NoAnswer, match="this node is closing"):
        await kept.pop()


async def test_a_sender_and_a_receiver_of_kv(open_engine: EngineFactory) -> None:
    engine = open_engine()
    pool = PagePool(LAYOUT.pages, LAYOUT.page_tokens)
    memory = [RankMemory.alloc(engine, LAYOUT) for _ in range(2)]
    regions = engine.stats()["regions_open"]
    with KvReceiver(LAYOUT, memory[:1], pool, tail_bytes=64, tail_slots=1):
        assert engine.stats()["regions_open"] == regions + 1
        async with KvSender(LAYOUT, {0: memory[1]}) as sender:
            sender.begin_step([])
            assert len(sender._steps) == 1
        assert not sender._steps
    assert engine.stats()["regions_open"] == regions


async def test_a_node_and_a_router(open_engine: EngineFactory) -> None:
    engine = open_engine()
    memory = {0: RankMemory.alloc(engine, LAYOUT)}
    with EngineWire(engine) as wire:
        with pytest.raises(KeyError):
            async with Prefiller("p0", messages.mailbox(wire, b"secret"), ToyModel(LAYOUT), memory, []) as node:
                raise KeyError
    assert node._tails.closed

    with EngineWire(open_engine()) as wire:
        with pytest.raises(KeyError):
            async with Router("r0", messages.mailbox(wire, b"secret")) as router:
                raise KeyError
    assert router.is_closing


async def test_a_trainer_and_an_inference_rank(open_engine: EngineFactory) -> None:
    engine = open_engine()
    with EngineWire(engine) as wire, WeightMemory(engine, "trainer", 0) as memory:
        async with weight_messages.mailbox(wire, b"secret") as box:
            with pytest.raises(KeyError):
                async with WeightTrainer(box, memory) as trainer:
                    raise KeyError
            with pytest.raises(xr.UsageError, match="trainer 0 is closed"):
                await trainer.publish(1)

    engine = open_engine()
    with EngineWire(engine) as wire, WeightMemory(engine, "target", 0) as memory:
        async with weight_messages.mailbox(wire, b"secret") as box:
            with pytest.raises(KeyError):
                async with WeightReceiver(box, memory) as receiver:
                    raise KeyError
            with pytest.raises(xr.UsageError, match="inference rank 0 is closed"):
                await receiver.wait_version(1, WAIT_S)
