"""Whole rounds over simulated NICs that deliver in any order, while rails fail, hosts freeze and one dies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail import sim
from crossrail.moe import AllToAll, Dispatched, EngineGroup, Round
from tests.moe.batches import Batch, draw, expected_sums, expert_of_row, outputs
from tests.moe.ranks import run_ranks
from tests.moe.test_rounds import check_dispatched, first_expert
from tests.support.limits import WAIT_S
from tests.support.seeds import Seed

EXPERTS, HIDDEN, TOP_K, TOKENS, BLOCK = 10, 64, 3, 16, 32
CONFIG: dict[str, Any] = {"experts": EXPERTS, "hidden": HIDDEN, "top_k": TOP_K, "max_tokens": TOKENS,
                          "scale_block": BLOCK, "out_dtype": "float32", "timeout_s": 60.0}  # fmt: skip
LIMIT_S = 30.0  # virtual, for any round


class Town:
    """Ranks on a simulated host each. Made on threads, since that waits; rounds are driven by one thread."""

    def __init__(
        self, world: sim.World, size: int, nic: str, engine: dict[str, Any] | None = None, **config: object
    ) -> None:
        self.world = world
        options = {"peer_timeout_s": 1.0} | (engine or {})
        self.hosts = [world.host(f"host-{rank}", nic) for rank in range(size)]
        self.engines = [host.engine(f"rank-{rank}", **options) for rank, host in enumerate(self.hosts)]
        addresses = [engine.address for engine in self.engines]
        self._groups = [EngineGroup(engine, addresses) for engine in self.engines]
        self.parts = run_ranks(size, lambda r: AllToAll(self.engines[r], self._groups[r], **(CONFIG | config)))
        for group in self._groups:
            group.close()

    def until_ready(self, rounds: list[Round]) -> None:
        begin, step_s = self.world.now_s, 1e-6
        # All of them each time: who is ready himself may have something for the others.
        while not all(ready := [part.advance(one) for part, one in zip(self.parts, rounds, strict=True)]):
            assert self.world.now_s < begin + LIMIT_S, f"a round does not get on: {ready}"
            self.world.run(step_s)
            step_s = min(2 * step_s, 0.01)

    def send(self, batches: list[Batch]) -> list[Round]:
        return [
            part.dispatch_send(batch.x, batch.scales, batch.indices, batch.weights)
            for part, batch in zip(self.parts, batches, strict=True)
        ]

    def receive(self, rounds: list[Round], batches: list[Batch]) -> list[Dispatched]:
        self.until_ready(rounds)
        got = [part.dispatch_recv(one) for part, one in zip(self.parts, rounds, strict=True)]
        for part, one in zip(self.parts, got, strict=True):
            check_dispatched(one, batches, first_expert(part), part.config.padding)
        return got

    def answer(self, got: list[Dispatched], ranks: Iterable[int] | None = None) -> None:
        for rank in range(len(got)) if ranks is None else ranks:
            part, one = self.parts[rank], got[rank]
            experts = expert_of_row(one.counts, one.offsets, first_expert(part), one.rows)
            part.combine_send(outputs(one.x, experts), one)

    def finish(self, rounds: list[Round], batches: list[Batch]) -> None:
        self.until_ready(rounds)
        for part, one, batch in zip(self.parts, rounds, batches, strict=True):
            assert np.array_equal(part.combine_recv(one), expected_sums(batch))

    def whole_round(self, batches: list[Batch]) -> None:
        rounds = self.send(batches)
        got = self.receive(rounds, batches)
        self.answer(got)
        self.finish(rounds, batches)

    def close(self) -> None:
        for part in self.parts:
            part.close()


@pytest.fixture
def make(seed: Seed) -> Iterator[Callable[..., Town]]:
    towns: list[Town] = []
    with sim.World(seed.number()) as world:

        def build(size: int, nic: str, **config: object) -> Town:
            towns.append(Town(world, size, nic, **config))
            return towns[-1]

        yield build
        for town in towns:
            town.close()


def draws(random: np.random.Generator, size: int) -> list[Batch]:
    """Some ranks have no tokens, some as many as they may, and some routes are masked."""
    tokens = [int(random.choice([0, TOKENS, random.integers(1, TOKENS)])) for _ in range(size)]
    return [draw(random, n, HIDDEN, EXPERTS, TOP_K, BLOCK, 0.1) for n in tokens]


@pytest.mark.parametrize("private", [0, 3, None])
@pytest.mark.parametrize("nic", ["2xefa200", "cx7"])
def test_rounds_are_exact_in_whatever_order_writes_land(
    make: Callable[..., Town], nic: str, private: int | None, seed: Seed
) -> None:
    town = make(4, nic, private_tokens=private)
    random = seed.rng()
    for _ in range(6):
        town.whole_round(draws(random, 4))


def test_two_rounds_under_way_do_not_meet(make: Callable[..., Town], seed: Seed) -> None:
    town = make(3, "2xefa200", private_tokens=2)
    random = seed.rng()
    earlier: tuple[list[Round], list[Batch]] | None = None
    for _ in range(8):
        batches = draws(random, 3)
        rounds = town.send(batches)
        town.answer(town.receive(rounds, batches))
        if earlier is not None:
            town.finish(*earlier)
        earlier = rounds, batches


@pytest.mark.parametrize("nic", ["2xcx7", "2xefa200"])
def test_rounds_are_exact_while_rails_go_and_come_and_hosts_freeze(
    make: Callable[..., Town], nic: str, seed: Seed
) -> None:
    town = make(4, nic, private_tokens=3)
    random, world = seed.rng(), town.world
    for _ in range(10):
        host = town.hosts[int(random.integers(4))]
        soon = world.now_s + float(random.random()) * 50e-6
        # Where a rail breaks on EFA nobody can tell whether a write was counted: it fails, and the round with it.
        match int(random.integers(nic != "2xcx7", 4)):
            case 0:
                world.rail_down(host, int(random.integers(2)), at_s=soon, for_s=0.3)
            case 1:
                world.freeze(host, at_s=soon, for_s=0.2)
            case 2:
                world.slow(host, int(random.integers(2)), 200, at_s=soon, for_s=0.01)
            case _:
                world.fill_queue(host, 0, at_s=soon, for_s=1e-4)
        town.whole_round(draws(random, 4))


@pytest.mark.parametrize("node_sums", [False, True])
@pytest.mark.parametrize("step", range(4))
def test_a_host_that_dies_is_named_on_all_others(
    make: Callable[..., Town], step: int, node_sums: bool, seed: Seed
) -> None:
    town = make(3, "2xefa200", private_tokens=3, node_sums=node_sums)
    random = seed.rng()
    town.whole_round(draws(random, 3))
    batches = draws(random, 3)
    rounds = town.send(batches)
    if step >= 1:
        got = town.receive(rounds, batches)
    if step >= 2:
        town.answer(got)
    if step >= 3:
        town.finish(rounds, batches)
    town.world.kill(town.hosts[1])
    town.world.run(5.0)
    for rank in (0, 2):
        part = town.parts[rank]
        with pytest.raises(xr.PeerLost, match="rank 1 "):
            _go_on(part, rounds[rank], batches[rank])


# A step, what the rank that dies writes in it, and whether nodes add up.
STEPS = [
    ("dispatch_send", "routes", False),
    ("dispatch_recv", "rows", False),
    ("combine_send", "results", False),
    ("combine_recv", None, False),
    ("combine_recv", "results", True),
]


@pytest.mark.parametrize(("step", "written", "node_sums"), STEPS)
def test_a_host_that_dies_in_the_middle_of_a_step_is_named_on_all_others(
    make: Callable[..., Town], step: str, written: str | None, node_sums: bool, seed: Seed
) -> None:
    """When what it writes in that step has come to one of the others, and not to both; or while it waits."""
    town = make(3, "cx7", private_tokens=0, node_sums=node_sums)
    random = seed.rng()
    town.whole_round([draw(random, TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK) for _ in range(3)])
    batches = [draw(random, TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK) for _ in range(3)]
    others, doomed = (0, 2), town.hosts[1]

    def slow_down() -> None:
        town.world.slow(doomed, 0, 1e5)  # its writes leave one after the other from now on

    if step == "dispatch_send":
        slow_down()
    rounds = town.send(batches)
    if step == "dispatch_recv":
        town.world.run(LIMIT_S)
        slow_down()
        assert not any(part.advance(one) for part, one in zip(town.parts, rounds, strict=True)), "all wait for its rest"
    elif step != "dispatch_send":
        got = town.receive(rounds, batches)
        if step == "combine_send":
            slow_down()
        town.answer(got, [1] if written is None else range(3))
    if step == "combine_recv":
        slow_down()
        assert not town.parts[1].advance(rounds[1]), "it waits for the others' results"

    def has_come() -> int:
        return sum(town.parts[rank]._far.has_come(written, rounds[rank].number, 1) for rank in others)

    while written is not None and has_come() == 0:
        town.world.run(1e-6)
    assert written is None or has_come() == 1
    town.world.kill(doomed)
    town.world.run(5.0)
    for rank in others:
        with pytest.raises(xr.PeerLost, match="rank 1 "):
            _go_on(town.parts[rank], rounds[rank], batches[rank])


def _go_on(part: AllToAll, opened: Round, batch: Batch) -> None:
    """Until it is noticed: the rest of this round, and the next."""
    part.timeout_s = WAIT_S
    if part.advance(opened):
        if opened.stage.value == "dispatch_send":
            part.dispatch_recv(opened)
        else:
            part.combine_recv(opened)
    part.dispatch(batch.x, batch.scales, batch.indices, batch.weights)


def test_a_write_whose_end_nobody_can_tell_fails_its_round_and_names_the_rank(
    make: Callable[..., Town], seed: Seed
) -> None:
    town = make(2, "2xefa200")
    random = seed.rng()
    town.world.fail_works(town.hosts[0], chance=0.2)

    def rounds() -> None:
        for _ in range(50):  # each is exact until one fails
            town.whole_round([draw(random, TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK) for _ in range(2)])

    # A rail of rank 0 breaks, and with it what rank 1 had under way on it: whoever is asked first says so.
    with pytest.raises(xr.TransferError, match=r"a write to rank [01] .* failed before its .* of round "):
        rounds()
    town.world.fail_works(town.hosts[0])


def _whose_writes_hang(world: sim.World, **config: object) -> Town:
    """Rank 0 has begun a round, of which nothing reaches rank 2, and is told of no loss."""
    town = Town(world, 3, "cx7", engine={"peer_timeout_s": 1e3}, timeout_s=10.0, **config)
    world.partition(town.hosts[:1], town.hosts[2:])
    batch = draw(np.random.default_rng(1), TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK)
    town.parts[0].dispatch_send(batch.x, batch.scales, batch.indices, batch.weights)
    world.run(1e-3)
    return town


@pytest.mark.parametrize("on_lost", ["raise", "mask"])
def test_closing_waits_for_what_does_not_end_for_its_timeout_and_no_longer(on_lost: str, seed: Seed) -> None:
    with sim.World(seed.number()) as world:
        town = _whose_writes_hang(world, on_lost=on_lost)
        begin_s = world.now_s
        with pytest.raises(xr.WaitTimeout, match="is still in use"):
            town.parts[0].close()
        assert world.now_s - begin_s < 10.1
        world.heal(town.hosts[:1], town.hosts[2:])
        world.run(1.0)
        town.close()


def test_an_error_that_leaves_a_with_block_is_the_one_to_see(seed: Seed) -> None:
    with sim.World(seed.number()) as world:
        town = _whose_writes_hang(world)
        with pytest.raises(KeyError, match="of the experts"), town.parts[0]:
            raise KeyError("of the experts")
        with pytest.raises(xr.WaitTimeout, match="is still in use"):
            town.parts[0].close()
        world.heal(town.hosts[:1], town.hosts[2:])
        world.run(1.0)
        town.close()


@pytest.mark.parametrize("rails", [1, 2])
@pytest.mark.parametrize(("private", "writes_of_rows"), [(0, 2), (2, 2), (TOKENS * TOP_K, 1)])
def test_writes_to_each_far_rank_are_two_at_most_for_a_dispatch_and_one_for_a_combine(
    make: Callable[..., Town], rails: int, private: int, writes_of_rows: int, seed: Seed
) -> None:
    """Besides the one that tells the routes. On each rail, if rows are long; these are short, and go by one."""
    size = 4
    town = make(size, f"{rails}xcx7", private_tokens=private)
    random = seed.rng()
    batches = [draw(random, TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK) for _ in range(size)]
    for batch in batches:
        batch.indices[:] = -1
        batch.indices[:, 0] = np.arange(TOKENS) % size * (-(-EXPERTS // size))  # four rows from each rank to each

    def posted() -> list[int]:
        town.world.run(1e-3)
        return [int(engine.stats()["work_requests_posted"]) for engine in town.engines]

    def posted_since(before: list[int]) -> set[int]:
        return {now - then for now, then in zip(posted(), before, strict=True)}

    town.whole_round(batches)
    before = posted()
    rounds = town.send(batches)
    assert posted_since(before) == {2 * (size - 1)}, "the routes, and what the slots have room for"
    got = town.receive(rounds, batches)
    assert posted_since(before) == {(1 + writes_of_rows) * (size - 1)}
    before = posted()
    town.answer(got)
    town.finish(rounds, batches)
    assert posted_since(before) == {size - 1}
