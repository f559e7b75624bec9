"""What layer_done() counts and refuses: odd numbers, a word that wraps, steps that end while a thread counts."""

import asyncio
import ctypes
import random
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.kv import KvLayout, Step, TransferStopped
from tests.conftest import EngineFactory
from tests.kv.instances import Decoder, Prefiller, closing
from tests.support.limits import WAIT_S
from tests.support.seeds import Seed

LAYOUT = KvLayout(layers=3, pages=32, page_tokens=8, kv_heads=4, head_dim=16, dtype="bfloat16", tp=2)
WORD = 1 << 64


@pytest.fixture
def prefiller(open_engine: EngineFactory) -> Prefiller:
    """With an engine a rank: the second one's word follows the first's."""
    return Prefiller(LAYOUT, [open_engine(f"prefill-{rank}") for rank in range(2)])


@pytest.fixture
def decoder(open_engine: EngineFactory) -> Decoder:
    return Decoder(LAYOUT, [open_engine("decoder")])


def begin(prefiller: Prefiller, decoder: Decoder, *names: str) -> list[tuple[Any, Any, Step]]:
    """For each name a reception, a job, and a step that computes all of it; its pages are poisoned."""
    begun = []
    for name in names:
        reception = decoder.reserve(name, 9)
        job = prefiller.open(reception.dispatch(LAYOUT, "prefiller"))
        prefiller.poison(job)
        begun.append((reception, job, prefiller.sender.begin_step([(job, 9)])))
    return begun


def compute(prefiller: Prefiller, job: Any) -> None:
    for layer in range(LAYOUT.layers):
        prefiller.compute(job, layer)


def word_starts_at(prefiller: Prefiller, value: int) -> None:
    """As after that many layers."""
    sender = prefiller.sender
    for watcher in (sender._watcher, *sender._followers):
        watcher.store(value)
    sender._next_base = sender._countable = value


@pytest.mark.parametrize("before", range(LAYOUT.layers * 3 + 1))
async def test_the_word_wraps(prefiller: Prefiller, decoder: Decoder, before: int) -> None:
    """Within, before and after steps, of which one is abandoned."""
    word_starts_at(prefiller, (WORD - before) % WORD)
    async with closing(prefiller):
        first, dropped, last = begin(prefiller, decoder, "first", "dropped", "last")
        dropped[2].abandon("not worth it")
        with pytest.raises(xr.UsageError, match="layers=7 must be 0 to 6"):
            prefiller.sender.layer_done(7)
        compute(prefiller, first[1])
        prefiller.sender.layer_done(2)
        first[2].layer_done()
        assert not last[1].posted
        compute(prefiller, last[1])
        last[2].layer_done()
        prefiller.sender.layer_done(2)
        with pytest.raises(xr.UsageError, match="layers=1 must be 0 to 0"):
            prefiller.sender.layer_done()
        for reception, job, _ in (first, last):
            await asyncio.wait_for(job.finish(), WAIT_S)
            await reception.arrived(WAIT_S)
            decoder.assert_holds(reception, prefiller.kv_of(job.request, 9))


@pytest.mark.parametrize("layers", [-1, 4, WORD // 2, WORD - 1, WORD, -WORD, np.int64(-1), np.uint64(WORD - 1)])
async def test_layers_that_there_are_not_are_refused(prefiller: Prefiller, decoder: Decoder, layers: Any) -> None:
    async with closing(prefiller):
        begin(prefiller, decoder, "request")

        with pytest.raises(xr.UsageError, match=f"layers={layers} must be 0 to 3"):
            prefiller.sender.layer_done(layers)

        assert prefiller.sender._watcher.value == 0


@pytest.mark.parametrize("layers", [True, 1.0, np.float32(1), None, "1", np.array([1, 1])], ids=repr)
async def test_layers_that_are_no_whole_number_are_refused(prefiller: Prefiller, decoder: Decoder, layers: Any) -> None:
    async with closing(prefiller):
        begin(prefiller, decoder, "request")

        with pytest.raises(xr.UsageError, match="layers must be a whole number, not"):
            prefiller.sender.layer_done(layers)

        assert prefiller.sender._watcher.value == 0


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.uint64])
async def test_numpy_integers_count(prefiller: Prefiller, decoder: Decoder, kind: Any) -> None:
    async with closing(prefiller):
        ((_, job, step),) = begin(prefiller, decoder, "request")
        prefiller.sender.layer_done(kind(0))
        prefiller.sender.layer_done(kind(2))
        assert step.layers_left == 1
        prefiller.sender.layer_done(kind(1))
        await asyncio.wait_for(job.finish(), WAIT_S)


async def test_a_kernel_that_counted_too_much_leaves_no_room(prefiller: Prefiller, decoder: Decoder) -> None:
    async with closing(prefiller):
        ((_, job, step),) = begin(prefiller, decoder, "request")
        ctypes.c_uint64.from_address(prefiller.sender.word_address).value = LAYOUT.layers + 2

        zero: Any = np.int64(0)
        prefiller.sender.layer_done(0)
        prefiller.sender.layer_done(zero)
        with pytest.raises(xr.UsageError, match="layers=1 must be 0 to 0"):
            prefiller.sender.layer_done()
        with pytest.raises(xr.UsageError, match="a step that is over"):
            step.layer_done()
        assert step.layers_left == 0
        await asyncio.wait_for(job.finish(), WAIT_S)


async def test_nothing_counts_for_a_sender_that_is_closed(prefiller: Prefiller, decoder: Decoder) -> None:
    async with closing(prefiller):
        ((_, _, step),) = begin(prefiller, decoder, "request")
        step.layer_done()

    with pytest.raises(xr.UsageError, match="layers=1 must be 0 to 0"):
        prefiller.sender.layer_done()
    with pytest.raises(xr.UsageError, match="a step that is over"):
        step.layer_done()


@pytest.mark.parametrize("by_step", [False, True], ids=["sender", "step"])
async def test_steps_are_abandoned_while_a_thread_counts(
    prefiller: Prefiller, decoder: Decoder, by_step: bool, seed: Seed
) -> None:
    """Each counted layer is one of a step that goes on, or is refused: no step afterwards is ahead of its layers."""

    def count(steps: list[Step]) -> None:
        for step in steps:
            for _ in range(LAYOUT.layers):
                try:
                    step.layer_done() if by_step else prefiller.sender.layer_done()
                except xr.UsageError:
                    break

    draw = random.Random(seed.number())
    async with closing(prefiller):
        for turn in range(20):
            begun = begin(prefiller, decoder, *(f"{turn}.{n}" for n in range(3)))
            for _, job, _ in begun:
                compute(prefiller, job)
            counting = asyncio.gather(asyncio.to_thread(count, [step for _, _, step in begun]))
            for _ in range(draw.randrange(3)):
                await asyncio.sleep(0)
            dropped = draw.choice(begun)
            dropped[2].abandon("gave up")
            await asyncio.wait_for(counting, WAIT_S)

            assert not any(step.layers_left for _, _, step in begun)
            assert prefiller.sender._watcher.value == prefiller.sender._next_base == prefiller.sender._countable
            for reception, job, _ in begun:
                try:
                    await asyncio.wait_for(job.finish(), WAIT_S)
                except TransferStopped:
                    assert job is dropped[1]
                    await reception.withdraw(job.cancel, WAIT_S)
                else:
                    await reception.arrived(WAIT_S)
                    decoder.assert_holds(reception, prefiller.kv_of(job.request, 9))
                job.lease.release()
                reception.release()
