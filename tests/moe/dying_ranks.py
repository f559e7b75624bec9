"""Simulated ranks that die, freeze and thaw, or lose sight of each other, while rounds go on (on_lost="mask").

    crossrail sim --scenario tests.moe.dying_ranks:ranks_die --runs 200

Checked: whoever ends a round says the same of who is missing in it; every row and every sum is the oracle's for that;
who was let alone goes on to the end, where enough are left; who is masked learns of it by its type; nobody hangs; and
what a masked rank writes late does not land.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import crossrail as xr
from crossrail.moe import AllToAll, MaskedOut, NoMajority, Round
from crossrail.moe.masking.views import COMBINE, DISPATCH
from crossrail.sim.scenarios import Run
from tests.moe.batches import Batch, draw, expected_rows, expected_sums, expert_of_row, outputs, ranks_of
from tests.moe.baton import BatonGroup, meet

EXPERTS, HIDDEN, TOP_K, TOKENS, BLOCK = 10, 32, 3, 6, 16
PEER_TIMEOUT_S = 0.1
PATIENCE_S = 2.0  # virtual, for any half
ROUNDS = 8
CONFIG: dict[str, Any] = {"experts": EXPERTS, "hidden": HIDDEN, "top_k": TOP_K, "max_tokens": TOKENS,
                          "scale_block": BLOCK, "out_dtype": "float32", "timeout_s": PATIENCE_S,
                          "on_lost": "mask"}  # fmt: skip
_STEP_MIN_S, _STEP_MAX_S = 2e-6, 2e-3


@dataclass
class Life:
    """What became of a rank. ended: "", an exception's name, or "done". told: by round, who was missing in it."""

    frozen: list[tuple[float, float]] = field(default_factory=list)  # from, until
    killed: bool = False
    dies_in: tuple[int, int] | None = None  # a round and a half: soon after it has begun to send that
    ended: str = ""
    told: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)


class Town:
    """Ranks on a simulated host each."""

    def __init__(self, run: Run, size: int, nic: str, heartbeat_s: float | None) -> None:
        self.run, self.size = run, size
        self.hosts = [run.host(f"host-{rank}", nic) for rank in range(size)]
        self.engines = [
            host.engine(f"rank-{rank}", peer_timeout_s=PEER_TIMEOUT_S, heartbeat_s=heartbeat_s)
            for rank, host in enumerate(self.hosts)
        ]
        self.lives = [Life() for _ in range(size)]

        def make(group: BatonGroup) -> AllToAll:
            return AllToAll(self.engines[group.rank], group, **CONFIG)

        self.parts = meet(size, make)
        self.doors = [
            {rank: [door.descriptor for door in both] for rank, both in part._peers.far._doors.items()}
            for part in self.parts
        ]

    def batch(self, rank: int, number: int, tokens: int | None = None) -> Batch:
        random = np.random.default_rng([self.run.world.seed % (1 << 31), rank, number])
        count = int(random.choice([0, TOKENS, random.integers(1, TOKENS)])) if tokens is None else tokens
        return draw(random, count, HIDDEN, EXPERTS, TOP_K, BLOCK, 0.1)

    async def awake(self, rank: int) -> None:
        """A process that stands still runs none of this."""
        for begin, end in self.lives[rank].frozen:
            if begin <= self.run.world.now_s < end:
                await asyncio.sleep(end - self.run.world.now_s)

    async def until_ready(self, rank: int, opened: Round) -> None:
        step_s, begin = _STEP_MIN_S, self.run.world.now_s
        await self.awake(rank)
        while not self.parts[rank].advance(opened):
            assert self.run.world.now_s < begin + 3 * PATIENCE_S, f"rank {rank} hangs in {opened}"
            await asyncio.sleep(step_s)
            await self.awake(rank)
            step_s = min(2 * step_s, _STEP_MAX_S)

    async def live(self, rank: int) -> None:
        """A rank, from its first round to its end."""
        life = self.lives[rank]
        try:
            for number in range(1, ROUNDS + 1):
                await self.awake(rank)
                await self.whole_round(rank, number)
            life.ended = "done"
        except (MaskedOut, NoMajority) as error:
            life.ended = type(error).__name__
        except xr.EngineClosed:
            self.run.check.that(life.killed, f"the engine of rank {rank} closed, and nobody killed it")
            life.ended = "killed"
        except xr.CrossrailError as error:
            life.ended = type(error).__name__
            self.run.check.that(life.killed, f"rank {rank} was told {type(error).__name__}: {error}")

    async def whole_round(self, rank: int, number: int) -> None:
        part, check = self.parts[rank], self.run.check
        batch = self.batch(rank, number)
        opened = part.dispatch_send(batch.x, batch.scales, batch.indices, batch.weights)
        self.die_soon(rank, number, DISPATCH)
        await self.until_ready(rank, opened)
        got = part.dispatch_recv(opened)
        wanted = [self.batch(one, number, 0 if one in opened.silent else None) for one in range(self.size)]
        check_rows(self.run, f"round {number} at rank {rank}", part, got, wanted)
        y = outputs(got.x, expert_of_row(got.counts, got.offsets, sum(part.config.experts_per_rank[:rank]), got.rows))
        await asyncio.sleep(self.run.rng.uniform(0, 2e-4))
        await self.awake(rank)
        part.combine_send(y, got)
        self.die_soon(rank, number, COMBINE)
        await self.until_ready(rank, opened)
        sums = part.combine_recv(opened)
        self.lives[rank].told[number] = (opened.silent, opened.absent)
        is_kept = ~np.isin(ranks_of(part.config.experts_per_rank, batch.indices), opened.absent)
        kept = Batch(batch.x, batch.scales, np.where(is_kept, batch.indices, -1), batch.weights)
        check.same_bytes(f"sums of round {number} at rank {rank}", sums.ravel(), expected_sums(kept).ravel())

    # ---- faults

    def kill(self, rank: int) -> None:
        self.lives[rank].killed = True
        self.run.world.kill(self.engines[rank])

    def die_soon(self, rank: int, number: int, half: int) -> None:
        """In the middle of what it sends, so that it has come to some and not to others."""
        life, world = self.lives[rank], self.run.world
        if life.dies_in == (number, half):
            life.killed = True
            world.kill(self.engines[rank], at_s=world.now_s + self.run.rng.uniform(0, 2e-4))

    def plan_death(self, rank: int) -> None:
        """In some half of some round; its rails are slow, so that its writes leave one after the other."""
        self.lives[rank].dies_in = (self.run.rng.randint(1, ROUNDS - 2), self.run.rng.choice((DISPATCH, COMBINE)))
        for rail in range(len(self.hosts[rank].rails)):
            self.run.world.slow(self.hosts[rank], rail, 300)

    async def kill_later(self, rank: int) -> None:
        await asyncio.sleep(self.run.rng.uniform(0, 3e-3))
        self.kill(rank)

    async def kill_while_they_agree(self, rank: int) -> None:
        """In the middle of an agreement, of which it may be the leader."""
        agreement = self.parts[rank]._peers.agreement
        assert agreement is not None
        end_s = self.run.world.now_s + 3 * PEER_TIMEOUT_S
        while not agreement._paxos.is_frozen and self.run.world.now_s < end_s:
            await asyncio.sleep(1e-4)
        await asyncio.sleep(self.run.rng.uniform(0, 3e-4))
        self.kill(rank)

    async def freeze(self, rank: int, for_s: float) -> None:
        await asyncio.sleep(self.run.rng.uniform(0, 3e-3))
        now_s = self.run.world.now_s
        self.lives[rank].frozen.append((now_s, now_s + for_s))
        self.run.world.freeze(self.engines[rank], for_s=for_s)

    # ---- the end

    async def write_late(self, rank: int) -> None:
        """As a masked rank does that does not know it yet: over all that it was ever let write to."""
        far = self.parts[rank]._far
        source = self.engines[rank].alloc(max(far.routes.nbytes, far.rows.nbytes))
        source.array()[:] = 0xEE
        for other in range(self.size):
            if self.lives[other].ended != "done" or rank not in self.parts[other].masked:
                continue
            far = self.parts[other]._far
            self.engines[rank].forget_peer(self.engines[other].address)
            for region, door in zip((far.routes, far.rows), self.doors[other][rank], strict=True):
                before = region.array().copy()
                try:
                    await self.engines[rank].submit_write(source, door, before.nbytes)
                except xr.TransferError:
                    pass
                self.run.check.same_bytes(f"memory of {other} closed to {rank}", region.array(), before)


def check_rows(run: Run, what: str, part: AllToAll, got: Any, batches: list[Batch]) -> None:
    """Every row of every expert is the one that it should be."""
    first = sum(part.config.experts_per_rank[: part.rank])
    wanted = expected_rows(batches, first, len(got.counts))
    run.check.equal(f"counts of {what}", list(map(int, got.counts)), [len(rows) for rows in wanted])
    for local, rows in enumerate(wanted):
        at = int(got.offsets[local])
        x = np.array([batches[source].x[token] for source, token, _ in rows], np.uint8).reshape(len(rows), HIDDEN)
        run.check.same_bytes(f"rows of {what}", got.x[at : at + len(rows)].ravel(), x.ravel())


def check_agreed(run: Run, town: Town) -> None:
    """Whoever ended a round says the same of it, and who is missing stays so."""
    for number in range(1, ROUNDS + 1):
        told = {rank: life.told[number] for rank, life in enumerate(town.lives) if number in life.told}
        run.check.that(len(set(told.values())) <= 1, f"round {number} is not the same to all: {told}")
    for rank, life in enumerate(town.lives):
        missing = [set(absent) for _, (_, absent) in sorted(life.told.items())]
        grows = all(one <= other for one, other in itertools.pairwise(missing))
        run.check.that(grows, f"a rank came back, as rank {rank} tells: {missing}")


FAULTS = ("in-send", "in-send-two", "kill", "two", "leader", "freeze", "freeze-short", "half", "cut")


async def ranks_die(run: Run) -> None:
    """Ranks die, alone or together or while the others agree, freeze and thaw, or are cut off: the others go on."""
    size = run.rng.choice([3, 4, 5])
    fault = run.rng.choice(FAULTS)
    # A NIC answers for a process that stands still: only heartbeats tell.
    is_freeze = fault.startswith("freeze")
    town = Town(run, size, "cx7" if is_freeze else run.rng.choice(["cx7", "2xefa200"]), 0.05 if is_freeze else None)
    doomed = run.rng.sample(range(size), 2)
    if fault.startswith("in-send"):
        for rank in doomed[: 2 if fault == "in-send-two" and size > 3 else 1]:
            town.plan_death(rank)
    living = [asyncio.create_task(town.live(rank), name=f"rank {rank}") for rank in range(size)]
    if fault in ("kill", "two", "leader"):
        await town.kill_later(doomed[0])
    if fault == "two" and size > 3:
        await asyncio.sleep(run.rng.choice([0.0, run.rng.uniform(0, 2 * PEER_TIMEOUT_S)]))
        town.kill(doomed[1])
    elif fault == "leader" and size > 3:
        await town.kill_while_they_agree(min(set(range(size)) - {doomed[0]}))
    elif fault in ("freeze", "freeze-short"):
        for_s = run.rng.uniform(1.5, 3) if fault == "freeze" else run.rng.uniform(0, 1.2 * PEER_TIMEOUT_S)
        await town.freeze(doomed[0], for_s)
    elif fault in ("half", "cut"):
        await asyncio.sleep(run.rng.uniform(0, 3e-3))
        cut = doomed if fault == "half" else doomed[:1]
        rest = [host for rank, host in enumerate(town.hosts) if rank not in cut]
        run.world.partition([town.hosts[rank] for rank in cut], rest, for_s=run.rng.choice([None, 1.0]))
    await asyncio.gather(*living)
    check_end(run, town, fault)
    for rank, life in enumerate(town.lives):
        if life.frozen and life.ended in ("MaskedOut", "NoMajority"):
            await town.write_late(rank)
    for part, life in zip(town.parts, town.lives, strict=True):
        if not life.killed:
            part.close()


def check_end(run: Run, town: Town, fault: str) -> None:
    check_agreed(run, town)
    ends = {rank: life.ended for rank, life in enumerate(town.lives)}
    run.figure("masked", sum(end in ("MaskedOut", "NoMajority") for end in ends.values()), "")
    spared = [rank for rank, life in enumerate(town.lives) if not life.killed and not life.frozen]
    if fault not in ("half", "cut") and 2 * len(spared) > town.size and len(spared) >= town.size - 2:
        told = [end for rank, end in ends.items() if rank in spared]
        run.check.that(set(told) == {"done"}, f"after {fault} ranks {spared} did not go on: {ends}")
    if fault in ("half", "cut"):
        finished = [rank for rank, end in ends.items() if end == "done"]
        run.check.that(set(ends.values()) <= {"done", "MaskedOut", "NoMajority"}, f"after {fault}: {ends}")
        run.check.that(bool(finished), f"after {fault} nobody goes on: {ends}")
