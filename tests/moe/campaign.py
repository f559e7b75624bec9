"""Rounds of simulated ranks for the campaign (./dev sim): of every kind of group, while everything fails that may.

    crossrail sim --scenario tests.moe.campaign:rounds --runs 200

Checked: every row and every sum is the oracle's. A fault that the engine hides is hidden here too; after another one a
rank that does not end all of its rounds has an error of the stated type, which names the rank that is lost, and has it
in time; with on_lost="mask" the others go on, and say the same of who is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

import crossrail as xr
from crossrail.moe import AllToAll, Dispatched, Round, meeting, peers
from crossrail.moe.nodes import Nodes, nodes_of
from crossrail.moe.rounds import Stage
from crossrail.sim.scenarios import Run
from tests.moe.batches import (
    Batch,
    draw,
    expected_rows,
    expected_sums,
    expert_of_row,
    outputs,
    ranks_of,
    split_at_random,
)
from tests.moe.baton import BatonGroup, meet

HIDDEN, TOP_K, TOKENS, BLOCK = 32, 3, 6, 16
ROUNDS = 6
PEER_TIMEOUT_S = 0.3
HEARTBEAT_S = 0.02
PATIENCE_S = 60.0  # virtual, for any half
NOTICED_S = 2.0  # virtual, after a rank died
_STEP_MIN_S, _STEP_MAX_S = 2e-6, 2e-3
_CALLS = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")

# Hidden by the engine; not always hidden where no NIC can tell which writes arrived; the end of a rank.
FAULTS = ("none", "hidden", "hidden", "broken", "kill", "kill")


@dataclass(frozen=True)
class Plan:
    """What a run is about. nodes: of each rank. nic: with reordering on EFA. is_overlapped: two rounds at once."""

    size: int
    nodes: Nodes
    dp_size: int
    nic: str
    fault: str
    is_overlapped: bool
    config: dict[str, Any]

    @classmethod
    def drawn(cls, rng: random.Random) -> Plan:
        fault = rng.choice(FAULTS)
        size, node_size = rng.choice([(2, 1), (3, 1), (4, 1), (4, 2), (4, 2), (4, 4), (4, 4), (6, 2), (6, 3)])
        on_lost = "mask" if fault == "kill" and size > 2 and rng.random() < 0.5 else "raise"
        is_plain = on_lost == "mask" and node_size < size
        dp_size = 2 if not is_plain and size % 2 == 0 and rng.random() < 0.4 else 1
        config: dict[str, Any] = {
            "experts": 2 * size + 1, "hidden": HIDDEN, "top_k": TOP_K, "max_tokens": TOKENS, "scale_block": BLOCK,
            "out_dtype": "float32", "timeout_s": PATIENCE_S, "on_lost": on_lost, "node_size": node_size,
            "dp_size": dp_size, "padding": rng.choice([1, 1, 4]), "layout": rng.choice(["grouped", "masked"]),
            "private_tokens": None if is_plain else rng.choice([0, 2, 2, None]),
            "node_sums": on_lost == "raise" and dp_size == 1 and node_size < size and rng.random() < 0.4,
        }  # fmt: skip
        # Where a rail breaks on EFA nobody can tell whether a write was counted.
        nic = {"hidden": "2xcx7", "broken": "2xefa200"}.get(fault) or rng.choice(["cx7", "2xcx7", "2xefa200"])
        is_overlapped = rng.random() < 0.5
        if (of_split := copy.copy(rng)).random() < 0.5:  # a copy: it takes nothing from what follows
            chosen = np.random.default_rng(of_split.getrandbits(32))
            config["experts_per_rank"] = split_at_random(chosen, config["experts"], size)
        nodes = nodes_of(size, node_size)
        (of_nodes := copy.copy(rng)).random()
        if 2 < size > node_size and of_nodes.random() < 0.4:
            nodes, config["node_size"] = _uneven(of_nodes, size)
        return cls(size, nodes, dp_size, nic, fault, is_overlapped, config)


def _uneven(rng: random.Random, size: int) -> tuple[Nodes, list[int] | None]:
    """Nodes of unequal size, and AllToAll's node_size for them: None where ranks are in any order."""
    of_first = rng.choice([count for count in range(1, size) if 2 * count != size])
    sizes = [of_first, size - of_first]
    nodes = nodes_of(size, sizes)
    if rng.random() < 0.5:
        return nodes, sizes
    return tuple(rng.sample(nodes, size)), None


@dataclass
class Life:
    """What became of a rank. told: by round, whose tokens and whose experts were missing in it."""

    ended: str = ""
    ended_s: float = 0.0
    words: str = ""
    told: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)


@contextlib.contextmanager
def _shared_boards(nodes: Nodes) -> Iterator[None]:
    """Ranks of a node are in this process, so they have each other's boards without a way to map them."""
    boards: dict[bytes, xr.Region] = {}
    real = peers.meet

    def meet_with(engine: xr.Engine, group: Any, config: Any, board: xr.Region, timeout_s: float) -> Any:
        boards[board.descriptor.to_bytes()] = board
        return real(engine, group, config, board, timeout_s)

    def mapped(engine: xr.Engine, rank: int, there: list[xr.RegionDescriptor], timeout_s: float) -> Any:
        mates = [one for one, node in enumerate(nodes) if node == nodes[rank] and one != rank]
        for one in mates:
            engine.connect(there[one].owner, timeout_s)  # heartbeats tell who is lost
        return {one: boards[there[one].to_bytes()].view() for one in mates}

    with mock.patch.object(peers, "meet", meet_with), mock.patch.object(meeting, "_map_boards", mapped):
        yield


class Town:
    """The ranks of a run: those of a node on one host."""

    def __init__(self, run: Run, plan: Plan) -> None:
        self.run, self.plan = run, plan
        self.hosts = [run.host(f"host-{node}", plan.nic) for node in range(max(plan.nodes) + 1)]
        self.engines = [
            self.hosts[node].engine(f"rank-{rank}", peer_timeout_s=PEER_TIMEOUT_S, heartbeat_s=HEARTBEAT_S)
            for rank, node in enumerate(plan.nodes)
        ]
        self.lives = [Life() for _ in range(plan.size)]
        self.doomed: int | None = None
        self.dies_in: tuple[int, str] | None = None  # a round, and the call after which it dies
        self.died_s: float | None = None

        def make(group: BatonGroup) -> AllToAll:
            return AllToAll(self.engines[group.rank], group, **plan.config)

        with _shared_boards(plan.nodes):
            self.parts = meet(plan.size, make)

    def batch(self, group: int, number: int, tokens: int | None = None) -> Batch:
        draws = np.random.default_rng([self.run.world.seed % (1 << 31), group, number])
        count = int(draws.choice([0, TOKENS, draws.integers(1, TOKENS)])) if tokens is None else tokens
        return draw(draws, count, HIDDEN, self.plan.config["experts"], TOP_K, BLOCK, 0.1)

    # ---- what a rank does

    async def live(self, rank: int) -> None:
        life = self.lives[rank]
        chunk = 2 if self.plan.is_overlapped else 1
        try:
            for first in range(1, ROUNDS + 1, chunk):
                await self._rounds(rank, range(first, first + chunk))
            life.ended = "done"
        except xr.CrossrailError as error:
            life.ended, life.words = type(error).__name__, str(error)
        life.ended_s = self.run.world.now_s
        # Others see for themselves who was killed; of a write that failed they learn only by this.
        is_alone_to_know = self.plan.fault == "broken" or self.run.rng.random() < 0.5
        if life.ended != "done" and rank != self.doomed and is_alone_to_know:
            self.parts[rank].close()

    async def _rounds(self, rank: int, numbers: range) -> None:
        part = self.parts[rank]
        opened = {}
        for number in numbers:
            batch = self.batch(rank // self.plan.dp_size, number)
            opened[number] = part.dispatch_send(batch.x, batch.scales, batch.indices, batch.weights)
            await self._called(rank, number, "dispatch_send")
        for number, one in opened.items():
            await self._until_ready(rank, one)
            got = part.dispatch_recv(one)
            await self._called(rank, number, "dispatch_recv")
            self._check_rows(rank, number, got)
            part.combine_send(outputs(got.x, self._experts(part, got)), got)
            await self._called(rank, number, "combine_send")
        for number, one in opened.items():
            await self._until_ready(rank, one)
            sums = part.combine_recv(one)
            self.lives[rank].told[number] = one.silent, one.absent
            self._check_sums(rank, number, one, sums)
            await self._called(rank, number, "combine_recv")

    async def _called(self, rank: int, number: int, call: str) -> None:
        if rank == self.doomed and self.dies_in == (number, call):
            self.died_s = self.run.world.now_s + self.run.rng.uniform(0, 5e-5)
            self.run.world.kill(self.engines[rank], at_s=self.died_s)
        await asyncio.sleep(self.run.rng.choice([0.0, self.run.rng.uniform(0, 3e-5)]))

    async def _until_ready(self, rank: int, opened: Round) -> None:
        step_s, begin_s = _STEP_MIN_S, self.run.world.now_s
        while not (part := self.parts[rank]).advance(opened):
            if self.plan.fault == "broken" and self.run.world.now_s >= begin_s + NOTICED_S:
                part.timeout_s = 0.0  # where a farewell is lost, too, nothing but time tells
                try:
                    (part.dispatch_recv if opened.stage is Stage.SENT else part.combine_recv)(opened)
                finally:
                    part.timeout_s = PATIENCE_S
            assert self.run.world.now_s < begin_s + PATIENCE_S, f"rank {rank} hangs in {opened}"
            await asyncio.sleep(step_s)
            step_s = min(2 * step_s, _STEP_MAX_S)

    # ---- what it should have got

    def _first_expert(self, part: AllToAll) -> int:
        return sum(part.config.experts_per_rank[: part.rank])

    def _experts(self, part: AllToAll, got: Dispatched) -> Any:
        return expert_of_row(got.counts, got.offsets, self._first_expert(part), got.rows)

    def _check_rows(self, rank: int, number: int, got: Dispatched) -> None:
        check, dp_size, silent = self.run.check, self.plan.dp_size, got.round.silent
        batches = []
        for group in range(self.plan.size // dp_size):
            members = set(range(group * dp_size, (group + 1) * dp_size))
            batches.append(self.batch(group, number, 0 if members <= set(silent) else None))
        wanted = expected_rows(batches, self._first_expert(self.parts[rank]), len(got.counts))
        what = f"round {number} at rank {rank}"
        check.equal(f"counts of {what}", list(map(int, got.counts)), [len(rows) for rows in wanted])
        for local, rows in enumerate(wanted):
            at = int(got.offsets[local])
            for name, there in (("x", got.x), ("scales", got.scales)):
                values = [getattr(batches[source], name)[token] for source, token, _ in rows]
                one = np.array(values, there.dtype).reshape(len(rows), there.shape[1])
                check.same_bytes(f"{name} of {what}", there[at : at + len(rows)].ravel(), one.ravel())

    def _check_sums(self, rank: int, number: int, opened: Round, sums: Any) -> None:
        batch = self.batch(rank // self.plan.dp_size, number)
        is_kept = ~np.isin(ranks_of(self.parts[rank].config.experts_per_rank, batch.indices), opened.absent)
        kept = Batch(batch.x, batch.scales, np.where(is_kept, batch.indices, -1), batch.weights)
        what = f"sums of round {number} at rank {rank}"
        self.run.check.same_bytes(what, sums.ravel(), expected_sums(kept).ravel())

    # ---- faults

    async def trouble(self) -> None:
        """Rails that go and come, are slow or full, or fail what they were given; hosts that stand still."""
        world, rng = self.run.world, self.run.rng
        while not all(life.ended for life in self.lives):
            await asyncio.sleep(rng.uniform(0, 1e-4))
            host, rail = rng.choice(self.hosts), rng.randrange(2)
            match rng.randrange(5):
                case 0:
                    world.rail_down(host, rail, for_s=rng.choice([1e-4, 0.05]))
                case 1:
                    world.freeze(host, for_s=rng.uniform(0, 0.03))
                case 2:
                    world.slow(host, rail, 200, for_s=0.01)
                case 3:
                    world.fill_queue(host, rail, for_s=1e-4)
                case _:
                    world.withhold_completions(host, rail=rail, for_s=1e-4)
            await asyncio.sleep(0.02)

    def doom(self) -> None:
        # Not in the last rounds: whoever has all sums of those already ends as if nothing had happened.
        last = ROUNDS - (2 if self.plan.is_overlapped else 1)
        self.doomed = self.run.rng.randrange(self.plan.size)
        self.dies_in = self.run.rng.randint(1, last), self.run.rng.choice(_CALLS)

    # ---- the end

    def check_end(self) -> None:
        check, plan, fault = self.run.check, self.plan, self.plan.fault
        for rank, life in enumerate(self.lives):
            who = f"{plan}: rank {rank}"
            if rank == self.doomed:
                check.equal(f"{who}, which was killed", life.ended, "EngineClosed")
            elif fault == "broken":
                allowed = ("done", "TransferError", "PeerLost", "PeerFailed", "WaitTimeout")
                check.that(life.ended in allowed, f"{who} was told {life.ended}: {life.words}")
                is_told = life.ended != "PeerFailed" or "has closed its AllToAll" in life.words
                check.that(is_told, f"{who}: {life.words}")
            elif fault == "kill" and plan.config["on_lost"] == "raise":
                check.that(life.ended in ("done", "PeerLost"), f"{who} was told {life.ended}: {life.words}")
                if life.ended == "PeerLost":
                    check.that(f"rank {self.doomed} " in life.words, f"{who} does not say who died: {life.words}")
                    assert self.died_s is not None
                    took_s = life.ended_s - self.died_s
                    check.that(took_s < NOTICED_S, f"{who} was told after {took_s} s")
            else:
                check.equal(f"end of {who} ({life.words})", life.ended, "done")
        for number in range(1, ROUNDS + 1):
            told = {rank: life.told[number] for rank, life in enumerate(self.lives) if number in life.told}
            check.that(len(set(told.values())) <= 1, f"{plan}: round {number} is not the same to all: {told}")


async def rounds(run: Run) -> None:
    """Rounds of dispatch and combine in groups of every kind, under the campaign's faults."""
    plan = Plan.drawn(run.rng)
    run.world.lose_datagrams(run.rng.choice([0.0, 0.1]), doubling=run.rng.choice([0.0, 0.1]))
    town = Town(run, plan)
    if plan.fault == "kill":
        town.doom()
    living = [asyncio.create_task(town.live(rank), name=f"rank {rank}") for rank in range(plan.size)]
    trouble = asyncio.create_task(town.trouble()) if plan.fault in ("hidden", "broken") else None
    await asyncio.gather(*living)
    if trouble is not None:
        await trouble
    run.world.lose_datagrams(0.0)
    town.check_end()
    for rank, part in enumerate(town.parts):
        if rank != town.doomed:
            part.close()
