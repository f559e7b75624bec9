"""A controller, trainers and inference ranks of the small model, each on an engine of its own, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import crossrail as xr
from crossrail.control.deadlines import loop_time_s
from crossrail.control.mailbox import Mailbox
from crossrail.control.wire import EngineWire
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.planning.planner import PlanOptions
from crossrail.weights.services.controller import WeightController
from crossrail.weights.services.messages import mailbox
from crossrail.weights.services.receiver import WeightReceiver
from crossrail.weights.services.reports import ControllerOptions, UpdateReport
from crossrail.weights.services.trainer import WeightTrainer
from crossrail.weights.step.preparer import Preparer
from tests.support.limits import NEVER_S
from tests.weights import small_model as small

SECRET = b"of these tests"
TMP_BYTES = 1 << 20
PATIENCE_S = 40.0  # for what should happen, on however busy a machine
OPTIONS = ControllerOptions(abort_s=8.0, progress_s=0.02)

OpenEngine = Callable[[str], xr.Engine]
MakeMemory = Callable[[xr.Engine, Any, int], tuple[WeightMemory, Callable[[int], small.Array]]]


@dataclass
class Fleet:
    """Everything is closed by close(). open_engine: of transport, or of a simulated host, by name."""

    open_engine: OpenEngine
    trainer_count: int = 4
    dtype: str = "bfloat16"
    spare: bool = True
    mapped: bool = True  # memory of the engines' own
    options: ControllerOptions = OPTIONS
    plan_options: PlanOptions = field(default_factory=lambda: PlanOptions(write_bytes_min=2000))
    secret_of: Callable[[str], bytes] = lambda _: SECRET
    trainer_options: dict[str, Any] = field(default_factory=dict)
    mesh_of: Callable[[str], str] = lambda _: "fsdp"  # of a parameter at the trainers
    # Of trainers and of inference ranks, instead of `mapped`: from engine, role and rank.
    source_memory: MakeMemory | None = None
    target_memory: MakeMemory | None = None
    make_preparer: Callable[[], Preparer | None] = lambda: None
    engines: dict[str, xr.Engine] = field(default_factory=dict)
    mailboxes: dict[str, Mailbox] = field(default_factory=dict)
    wires: list[EngineWire] = field(default_factory=list)
    trainers: dict[int, WeightTrainer] = field(default_factory=dict)
    sources: dict[int, small.Trainer] = field(default_factory=dict)
    receivers: dict[int, WeightReceiver] = field(default_factory=dict)
    sinks: dict[int, small.Target] = field(default_factory=dict)

    @contextmanager
    def loading_nan(self, trainer: int) -> Iterator[None]:
        """Meanwhile what this trainer loads has a NaN in "up"."""
        source = self.sources[trainer]
        load = source.load

        def load_and_break(weights: Any) -> None:
            load(weights)
            source.shards["up"][1][3, 5] = 0x7FC0

        source.load = load_and_break
        try:
            yield
        finally:
            source.load = load

    def mailbox(self, name: str) -> Mailbox:
        engine = self.engines[name] = self.open_engine(name)
        wire = EngineWire(engine)
        self.wires.append(wire)
        box = self.mailboxes[name] = mailbox(wire, self.secret_of(name), resend_s=0.2)
        box.start()
        return box

    def memory(self, name: str, role: Any, rank: int) -> tuple[WeightMemory, Callable[[int], small.Array]]:
        engine = self.engines[name]
        make = self.source_memory if role == "trainer" else self.target_memory
        if make is not None:
            return make(engine, role, rank)
        if not self.mapped:
            return WeightMemory(engine, role, rank), small.plain
        region = engine.alloc(2 << 20)
        return WeightMemory(engine, role, rank, [region]), small.Arena(region).allocate

    async def start(self, targets: Sequence[int] = range(small.TARGETS)) -> WeightController:
        self.controller = WeightController(self.mailbox("controller"), self.plan_options, self.options)
        await asyncio.gather(
            *(self.add_trainer(rank) for rank in range(self.trainer_count)),
            *(self.add_target(rank) for rank in targets),
        )
        return self.controller

    async def add_trainer(self, rank: int, name: str = "") -> WeightTrainer:
        name = name or f"trainer-{rank}"
        box = self.mailbox(name)
        memory, allocate = self.memory(name, "trainer", rank)
        self.sources[rank] = small.Trainer(memory, self.trainer_count, allocate, self.dtype, self.mesh_of)
        options = {"tmp_bytes_max": TMP_BYTES, "preparer": self.make_preparer(), **self.trainer_options}
        trainer = self.trainers[rank] = WeightTrainer(box, memory, **options)
        await trainer.join(self.controller.address, PATIENCE_S)
        return trainer

    async def add_target(self, rank: int, name: str = "") -> WeightReceiver:
        name = name or f"target-{rank}"
        box = self.mailbox(name)
        memory, allocate = self.memory(name, "target", rank)
        self.sinks[rank] = small.Target(memory, allocate)
        receiver = self.receivers[rank] = WeightReceiver(box, memory, spare=self.spare)
        await receiver.join(self.controller.address, PATIENCE_S)
        return receiver

    async def publish(self, version: int, ranks: Sequence[int] | None = None, timeout_s: float = PATIENCE_S) -> None:
        """All of these trainers offer a version; raises what one of them did."""
        for rank in self.trainers if ranks is None else ranks:
            self.sources[rank].load(small.weights_of(version))
        chosen = [self.trainers[rank] for rank in (self.trainers if ranks is None else ranks)]
        await asyncio.gather(*(trainer.publish(version, timeout_s) for trainer in chosen))

    async def update(self, version: int, **options: Any) -> UpdateReport:
        """An update that should succeed."""
        published = asyncio.ensure_future(self.publish(version))
        report = await self.controller.update(version, PATIENCE_S, **options)
        await published
        return report

    async def failing_update(self, version: int, timeout_s: float = PATIENCE_S) -> str:
        """An update that should fail: why, as the controller says. Trainers that are there learn of it too."""
        offered = [asyncio.ensure_future(self.publish(version, [rank], 2 * PATIENCE_S)) for rank in self.trainers]
        try:
            await self.controller.update(version, timeout_s)
        except xr.CrossrailError as error:
            why = str(error)
        else:
            raise AssertionError(f"version {version} came through")
        outcomes = await asyncio.gather(*offered, return_exceptions=True)
        assert all(isinstance(outcome, xr.CrossrailError) for outcome in outcomes), outcomes
        return why

    def has_begun(self) -> bool:
        """Whether all trainers have been told to write."""
        return all(trainer._going is not None for trainer in self.trainers.values())

    async def begun_update(self, version: int, timeout_s: float = PATIENCE_S) -> asyncio.Future[UpdateReport]:
        """An update, once it has_begun()."""
        update = asyncio.ensure_future(self.controller.update(version, timeout_s))
        await until(self.has_begun, update)
        return update

    def run_out_of_time(self, when: Callable[[], object]) -> None:
        """The next update has the time that it was given until this is so, and NEVER_S from then on."""
        controller, in_time = self.controller, self.controller._in_time

        async def in_time_from_then(work: Awaitable[None], deadline_at_s: float) -> bool:
            controller._in_time = in_time  # type: ignore[method-assign]
            loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
            while not when() and not task.done() and loop.time() < deadline_at_s:
                await asyncio.sleep(0.005)
            return await in_time(task, loop.time() + NEVER_S)

        controller._in_time = in_time_from_then  # type: ignore[method-assign]

    async def assert_holds(self, version: int, ranks: Sequence[int] | None = None) -> None:
        """These inference ranks read exactly this version."""
        weights = small.weights_of(version)
        for rank in self.receivers if ranks is None else ranks:
            async with self.receivers[rank].reading(PATIENCE_S) as reading:
                assert reading.version == version
                for key, wanted in self.sinks[rank].expected(weights).items():
                    got = reading.like(self.sinks[rank].arrays[key])
                    assert np.array_equal(got, wanted), f"{key} of rank {rank}, version {version}"

    async def drop_trainer(self, rank: int) -> None:
        """Without a word, as if it had died: its engine is closed."""
        del self.sources[rank]
        trainer = self.trainers.pop(rank)
        name = next(name for name, engine in self.engines.items() if engine is trainer.memory.engine)
        await self.mailboxes.pop(name).close()
        self.engines.pop(name).close()
        await trainer.close()

    async def close(self) -> None:
        for trainer in self.trainers.values():
            await trainer.close()
        for receiver in self.receivers.values():
            await receiver.close()
        for box in self.mailboxes.values():
            await box.close()
        for each in [*self.sources.values(), *self.sinks.values()]:
            each.memory.close()
        for wire in self.wires:
            wire.close()
        for engine in self.engines.values():
            engine.close()


async def until(is_so: Callable[[], object], update: asyncio.Future[Any] | None = None) -> None:
    """Returns once it is, or this update has ended; AssertionError after PATIENCE_S."""
    deadline_at_s = loop_time_s() + PATIENCE_S
    while not is_so() and (update is None or not update.done()):
        assert loop_time_s() < deadline_at_s, "it has not come to that"
        await asyncio.sleep(0.002)


async def unanswered(_sender: bytes, _question: object) -> object:
    return await asyncio.get_running_loop().create_future()
