"""The loop of `crossrail weights rl`, without its display: update, compare, generate, learn, and again.

This process is the controller; the others play in rl_play.py. What is generated goes from inference ranks to trainers
through their pipes, weights go back by crossrail.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from crossrail.cli.weights.common import opened_mailbox
from crossrail.cli.weights.players import Players
from crossrail.cli.weights.rl_options import SERVED, RlOptions
from crossrail.errors import CrossrailError
from crossrail.weights.services.controller import Stage, WeightController
from crossrail.weights.services.reports import UpdateReport

_TIMEOUT_S = 240.0

# The current phase, and its progress: (done, total), or (0, 0) if unknown.
OnPhase = Callable[[str, int, int], None]


@dataclass(frozen=True)
class RlStep:
    """A version of the weights: how it came there, and what it is worth.

    rewards: mean of what each inference rank generated with it, by rank. tokens: of all completions, to compare runs.
    tensors: how many were compared, of all inference ranks: all of them, scales too.
    gap: between log probabilities of inference ranks and trainers, mean over the tokens that this version was learned
    from; None of the first version.
    """

    version: int
    report: UpdateReport
    rewards: tuple[float, ...]
    tokens: tuple[tuple[int, ...], ...]
    tensors: int
    gap: float | None


@dataclass(frozen=True)
class _Part:
    """One process; see rl_play.py."""

    role: str
    rank: int
    controller: str
    transport: str
    seed: int = 0
    count: int = 0
    meeting: str = ""
    tp: int = 1
    quantised: bool = False

    @property
    def name(self) -> str:
        return f"{self.role}-{self.rank}"

    def command(self) -> list[str]:
        return ["-m", "crossrail.cli.weights.rl_play", json.dumps(asdict(self))]


async def run_rl(options: RlOptions, on_phase: OnPhase, on_step: Callable[[RlStep], None]) -> None:
    """Raises CrossrailError when a process ends, or a weight at an inference rank is not what it should be."""
    with tempfile.TemporaryDirectory(prefix="crossrail-rl-") as folder:
        async with _fleet(options, Path(folder), on_phase) as fleet:
            rollouts: list[Any] = []
            for version in range(1, options.steps + 2):
                step, rollouts = await fleet.step(version, rollouts)
                on_step(step)


@asynccontextmanager
async def _fleet(options: RlOptions, folder: Path, on_phase: OnPhase) -> AsyncIterator[_Fleet]:
    secret = secrets.token_hex(16)
    async with (
        opened_mailbox("controller", secret.encode(), transport=options.transport) as (_, box),
        Players(secret) as players,
    ):
        fleet = _Fleet(options, folder, on_phase, players, WeightController(box))
        await fleet.start()
        yield fleet


class _Fleet:
    def __init__(
        self, options: RlOptions, folder: Path, on_phase: OnPhase, players: Players, controller: WeightController
    ) -> None:
        self._options, self._folder, self._on_phase = options, folder, on_phase
        self._players, self._controller = players, controller
        self._trainers = [f"trainer-{rank}" for rank in range(options.trainers)]

    async def start(self) -> None:
        options, address = self._options, self._controller.address.hex()
        meeting = str(self._folder / "meeting")
        parts = [
            _Part("trainer", rank, address, options.transport, options.seed, options.trainers, meeting)
            for rank in range(options.trainers)
        ]
        parts += [
            _Part("target", rank, address, options.transport, tp=serving.tp, quantised=serving.quantised)
            for rank, serving in enumerate(SERVED)
        ]
        self._on_phase("starting", 0, 0)
        await asyncio.gather(*(self._players.start(part) for part in parts))

    async def step(self, version: int, rollouts: list[Any]) -> tuple[RlStep, list[Any]]:
        """Learns from these, brings the outcome to the inference ranks as this version, and has them generate."""
        checkpoint = str(self._folder / "checkpoint")
        self._on_phase("training", 0, 0)
        for name in self._trainers:
            await self._players.tell(name, version=version, rollouts=rollouts, checkpoint=checkpoint)
        ready = await asyncio.gather(*(self._players.said(name, "ready", _TIMEOUT_S) for name in self._trainers))
        report = await self._controller.update(version, _TIMEOUT_S, self._on_update)
        self._on_phase("generating", 0, 0)
        made = await asyncio.gather(*(self._generate(rank, version, checkpoint) for rank in range(len(SERVED))))
        learned_next = [each for said in made for each in said["rollouts"]]
        step = RlStep(
            version,
            report,
            tuple(fmean(each["reward"] for each in said["rollouts"]) for said in made),
            tuple(tuple(each["completion"]) for each in learned_next),
            sum(said["tensors"] for said in made),
            ready[0].get("gap"),
        )
        return step, learned_next

    def _on_update(self, stage: Stage, done: int, whole: int) -> None:
        if stage == "write":
            self._on_phase("updating", done, whole)

    async def _generate(self, rank: int, version: int, checkpoint: str) -> dict[str, Any]:
        """The inference rank's answer; its weights are those of the checkpoint."""
        seed = self._options.seed << 32 | version << 8 | rank  # a separate stream for each
        name = f"target-{rank}"
        await self._players.tell(name, checkpoint=checkpoint, count=self._options.batch, seed=seed)
        said = await self._players.said(name, "version", _TIMEOUT_S)
        if said["version"] != version or said["wrong"]:
            raise CrossrailError(
                f"inference rank {rank} has version {said['version']}, and of {version} these are not what the "
                f"converted checkpoint has: {', '.join(said['wrong']) or 'none'}"
            )
        return said
