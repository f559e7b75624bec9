"""Where rows go, by playing rounds with labels instead of rows: each must arrive where it belongs, and nowhere else."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrail import _core
from crossrail.errors import UsageError
from crossrail.moe.bounds import Bounds
from crossrail.moe.config import Config
from crossrail.moe.kernels import CpuKernels
from crossrail.moe.meeting import make_layout
from crossrail.moe.nodes import nodes_of
from tests.support.seeds import Seed

Layout, Placement, sort_routes = _core.moe.Layout, _core.moe.Placement, _core.moe.sort_routes

Ints = npt.NDArray[np.int32]
Label = tuple[int, int, int]  # of a route: group, token, k


@dataclass
class Round:
    """A shape and a routing: indices of each group."""

    options: dict[str, Any]
    indices: list[Ints]

    @property
    def world(self) -> int:
        return int(self.options["world"])

    @property
    def dp(self) -> int:
        return int(self.options["dp_size"])

    def experts_of(self, rank: int) -> range:
        """As given, else so many on each rank that the last may have fewer."""
        if split := self.options["experts_per_rank"]:
            return range(sum(split[:rank]), sum(split[: rank + 1]))
        experts = int(self.options["experts"])
        per_rank = -(-experts // self.world)
        return range(min(rank * per_rank, experts), min((rank + 1) * per_rank, experts))

    def node(self, rank: int) -> int:
        return int(self.options["node_of_rank"][rank])

    def server(self, group: int, rank: int) -> int:
        """The rank that sends the group's rows to rank."""
        return group * self.dp + rank % self.dp

    def labels(self, group: int, expert: int) -> list[Label]:
        """The group's routes to expert, in order."""
        tokens, ks = np.nonzero(self.indices[group] == expert)
        return [(group, t, k) for t, k in zip(tokens.tolist(), ks.tolist(), strict=True)]


def splits(experts: int, world: int) -> st.SearchStrategy[list[int]]:
    """Experts of each rank, perhaps none."""
    cuts = st.lists(st.integers(0, experts), min_size=world - 1, max_size=world - 1).map(sorted)
    return cuts.map(lambda ends: [b - a for a, b in itertools.pairwise([0, *ends, experts])])


@st.composite
def rounds(draw: st.DrawFn) -> Round:
    dp = draw(st.sampled_from([1, 1, 2, 3]))
    groups, experts = draw(st.integers(1, 4)), draw(st.integers(1, 11))
    world = groups * dp
    top_k, max_tokens = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    masked = draw(st.booleans())
    per_node = draw(st.integers(1, world))
    any_nodes = st.lists(st.integers(0, 3), min_size=world, max_size=world)
    options = {
        "world": world,
        "experts": experts,
        "experts_per_rank": draw(st.one_of(st.just([]), splits(experts, world))),
        "top_k": top_k,
        "max_tokens": max_tokens,
        "dp_size": dp,
        "private_rows": draw(st.integers(0, 5)),
        "padding": draw(st.integers(1, 5)),
        "rows_per_expert": groups * max_tokens * top_k if masked else 0,
        "node_of_rank": draw(st.one_of(st.just([rank // per_node for rank in range(world)]), any_nodes)),
    }
    expert = st.integers(-1, experts - 1) if draw(st.booleans()) else st.sampled_from([-1, 0, experts - 1])
    tokens = [draw(st.integers(0, max_tokens)) for _ in range(groups)]
    routes = [draw(st.lists(expert, min_size=t * top_k, max_size=t * top_k)) for t in tokens]
    return Round(options, [np.array(r, np.int32).reshape(-1, top_k) for r in routes])


@dataclass
class Played:
    """What each rank computes of a round before rows move."""

    layout: Any
    placement: Any
    slots: list[Ints]
    orders: list[Ints]


def play(round_: Round) -> Played:
    experts = round_.options["experts"]
    counts = np.zeros((len(round_.indices), experts), np.int32)
    slots = [np.zeros_like(indices) for indices in round_.indices]
    for group, indices in enumerate(round_.indices):
        CpuKernels().count(indices, experts, counts[group], slots[group])
    orders = [sort_routes(i, s, c) for i, s, c in zip(round_.indices, slots, counts, strict=True)]
    layout = Layout(**round_.options)
    return Played(layout, Placement(layout, counts), slots, orders)


@given(rounds())
def test_dispatch_brings_each_route_to_its_place(round_: Round) -> None:
    """Rows are labelled by group and token; far ones go through receive buffers first."""
    played = play(round_)
    placement, private = played.placement, round_.options["private_rows"]
    received = far_rows_received(round_, played)
    for rank in range(round_.world):
        output: dict[int, tuple[int, int]] = {}
        for group in range(len(round_.indices)):
            near = round_.node(round_.server(group, rank)) == round_.node(rank)
            assert played.layout.near(group, rank) == near
            if near:
                moves = placement.pull_near(group, rank, played.orders[group])
                assert np.all(np.diff(moves[:, 0]) >= 0)  # each row is read once
                output |= {to: (group, token) for token, to in moves.tolist()}
        output |= {to: received[rank][row] for row, to in placement.pull_far(rank).tolist()}
        assert output == wanted_output(round_, rank)
        counts, offsets = placement.expert_rows(rank), placement.expert_offsets(rank)
        assert placement.routes_to(rank) == sum(counts)
        assert placement.rows_needed(rank) == offsets[-1] and placement.fullest_expert(rank) == max(counts, default=0)
        assert all(row < placement.far_rows_needed(rank) for row in received[rank])
        assert placement.far_rows_needed(rank) >= played.layout.far_groups(rank) * private


def far_rows_received(round_: Round, played: Played) -> list[dict[int, tuple[int, int]]]:
    """Of each rank, what lies in which row of its receive buffer, as senders put it there."""
    placement, private = played.placement, round_.options["private_rows"]
    received: list[dict[int, tuple[int, int]]] = [{} for _ in range(round_.world)]
    for sender in range(round_.world):
        group = sender // round_.dp
        routes, starts = placement.send_far(sender, played.orders[group])
        assert len(starts) == round_.world + 1 and starts[-1] == len(routes)
        tokens = routes // round_.options["top_k"]
        for rank in range(round_.world):
            mine = tokens[starts[rank] : starts[rank + 1]].tolist()
            far = round_.server(group, rank) == sender and round_.node(sender) != round_.node(rank)
            assert len(mine) == (placement.routes(group, rank) if far else 0)
            for i, token in enumerate(mine):
                in_slot = i < private
                start = (placement.private_start if in_slot else placement.remainder_start)(group, rank)
                row = start + (i if in_slot else i - private)
                assert row not in received[rank]
                received[rank][row] = (group, token)
    return received


def wanted_output(round_: Round, rank: int) -> dict[int, tuple[int, int]]:
    """By definition: expert by expert, padded, in each of them by group, token and k."""
    output: dict[int, tuple[int, int]] = {}
    row = 0
    for local, expert in enumerate(round_.experts_of(rank)):
        if round_.options["rows_per_expert"]:
            row = local * round_.options["rows_per_expert"]
        row += -row % round_.options["padding"] if not round_.options["rows_per_expert"] else 0
        for group in range(len(round_.indices)):
            for _, token, _ in round_.labels(group, expert):
                output[row] = (group, token)
                row += 1
    return output


def rows_of_routes(round_: Round, rank: int) -> dict[int, Label]:
    """The routes that the rows of an output are the results of."""
    labels: dict[int, Label] = {}
    rows = iter(sorted(wanted_output(round_, rank)))
    for expert in round_.experts_of(rank):
        for group in range(len(round_.indices)):
            for label in round_.labels(group, expert):
                labels[next(rows)] = label
    return labels


@given(rounds())
def test_combine_finds_the_result_of_each_route(round_: Round) -> None:
    played = play(round_)
    placement = played.placement
    outputs = [rows_of_routes(round_, rank) for rank in range(round_.world)]
    received: list[dict[int, Label]] = [{} for _ in range(round_.world)]
    for rank in range(round_.world):
        rows, starts = placement.return_far(rank)
        for origin in range(round_.world):
            group = origin // round_.dp
            sent = rows[starts[group] : starts[group + 1]].tolist()
            if round_.node(origin) == round_.node(rank):
                continue
            first = placement.route_starts(group)[played.layout.first_expert(rank)]
            for i, row in enumerate(sent):
                assert first + i not in received[origin]
                received[origin][first + i] = outputs[rank][row]
    for origin in range(round_.world):
        group = origin // round_.dp
        near = [rank for rank in range(round_.world) if round_.node(rank) == round_.node(origin)]
        assert played.layout.near_ranks(origin) == near
        for indices in (round_.indices[group], round_.indices[group].astype(np.int64)):
            places = placement.places(origin, indices, played.slots[group])
            assert places.shape == (*indices.shape, 2) and places.dtype == np.int32
            for token, k in np.ndindex(*indices.shape):
                source, row = places[token, k].tolist()
                if indices[token, k] < 0:
                    assert row == -1
                    continue
                found = received[origin][row] if source == len(near) else outputs[near[source]][row]
                assert found == (group, token, k)


@pytest.mark.parametrize("names", [[0, 0, 0, 1, 1, 1, 2, 2, 2], [7, 7, 7, 2**31, 2**31, 2**31, 9, 9, 9]])
def test_ranks_that_begin_together_write_to_different_ones(names: list[int]) -> None:
    world = len(names)
    layout = Layout(world=world, experts=world, top_k=1, max_tokens=1, node_of_rank=names)
    turns = [layout.far_ranks_in_turn(rank) for rank in range(world)]
    for rank, turn in enumerate(turns):
        assert sorted(turn) == [other for other in range(world) if names[other] != names[rank]]
    assert all(len(set(step)) == world for step in zip(*turns, strict=True))


@given(rounds())
def test_experts_are_shared_out_in_order_and_counts_are_sums(round_: Round) -> None:
    played = play(round_)
    assert played.layout.groups == len(round_.indices)
    for rank in range(round_.world):
        experts = round_.experts_of(rank)
        assert played.layout.expert_count(rank) == len(experts)
        assert played.layout.first_expert(rank) == experts.start
        assert all(played.layout.rank_of_expert(expert) == rank for expert in experts)
        wanted = [sum(len(round_.labels(g, e)) for g in range(len(round_.indices))) for e in experts]
        assert played.placement.expert_rows(rank).tolist() == wanted


# --- more than 512 of anything ---


@pytest.mark.parametrize(("world", "experts", "node"), [(600, 1201, 8), (1024, 513, 1), (520, 2048, 520)])
def test_more_than_512_ranks_and_experts_have_their_places(world: int, experts: int, node: int, seed: Seed) -> None:
    """Of some ranks, as all would take long: experts in order, slots and remainders that do not meet, no bound passed,
    and each route of a group where its result is."""
    random, top_k, tokens = seed.rng(), 4, 3
    config = Config(
        world=world, experts=experts, hidden=16, top_k=top_k, max_tokens=tokens, dtype="bfloat16", scale_block=None,
        out_dtype="float32", private_tokens=1, padding=2, layout="grouped", node_size=node, dp_size=1,
        capacity_factor=None, on_lost="raise",
    )  # fmt: skip
    layout = make_layout(config, nodes_of(world, node))
    popular = random.permutation(experts)[:40]
    indices = np.stack([random.permutation(popular)[:top_k] for _ in range(world * tokens)]).astype(np.int32)
    indices = indices.reshape(world, tokens, top_k)
    counts, slots = np.zeros((world, experts), np.int32), np.zeros_like(indices)
    for rank in range(world):
        CpuKernels().count(indices[rank], experts, counts[rank], slots[rank])
    placement = Placement(layout, counts)
    assert sum(layout.expert_count(rank) for rank in range(world)) == experts
    far_groups = world - node
    bounds = Bounds.of(config, far_groups)
    local = -(-experts // world)
    for rank in {0, world - 1, *(popular[:6] // local).tolist()}:
        mine = slice(layout.first_expert(rank), layout.first_expert(rank) + layout.expert_count(rank))
        routes = counts[:, mine].sum(axis=1)
        assert placement.expert_rows(rank).tolist() == counts[:, mine].sum(axis=0).tolist()
        assert placement.rows_needed(rank) <= bounds.output_rows and placement.far_rows_needed(rank) <= bounds.far_rows
        taken: list[int] = []
        for group in np.flatnonzero(routes).tolist():
            if layout.near(group, rank):
                continue
            count, private = int(routes[group]), layout.far_index(group, rank)
            taken += [placement.private_start(group, rank)]
            taken += [placement.remainder_start(group, rank) + i for i in range(count - 1)]
            assert placement.private_start(group, rank) == private
        assert len(set(taken)) == len(taken) and all(row < bounds.far_rows for row in taken)
        table, starts = placement.return_far(rank)
        assert len(starts) == world + 1 and starts[-1] == len(table) <= bounds.returned_rows
    for origin in (0, world // 2, world - 1):
        places = placement.places(origin, indices[origin], slots[origin])
        near = layout.near_ranks(origin)
        for expert, (source, row) in zip(indices[origin].ravel(), places.reshape(-1, 2), strict=True):
            owner = int(expert) // local
            assert source == (near.index(owner) if owner in near else len(near))
            assert 0 <= row < (bounds.output_rows if owner in near else tokens * top_k)


# --- what is no shape, no count and no route ---

SHAPE: dict[str, Any] = {"world": 2, "experts": 4, "top_k": 2, "max_tokens": 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world": 0}, "world is 0, must be 1 or more"),
        ({"experts": 0}, "experts is 0, must be 1 or more"),
        ({"top_k": 0}, "top_k is 0, must be 1 or more"),
        ({"padding": 0}, "padding is 0, must be 1 or more"),
        ({"dp_size": 3}, "dp_size is 3, must be a divisor of world, 2"),
        ({"dp_size": 0}, "dp_size is 0, must be a divisor of world, 2"),
        ({"experts_per_rank": [4]}, r"len\(experts_per_rank\) is 1, must be world, 2"),
        ({"experts_per_rank": [4, 1]}, "sum of experts_per_rank is 5, must be experts, 4"),
        ({"experts_per_rank": [2**32 - 1, 5]}, "sum of experts_per_rank is 4294967300, must be experts, 4"),
        ({"node_of_rank": [0]}, r"len\(node_of_rank\) is 1, must be world, 2"),
        ({"max_tokens": 2**31}, "max_tokens 2147483648, .* more rows at one rank than 2147483647"),
        ({"padding": 2**31}, "more rows at one rank than"),
        ({"private_rows": 2**31}, "more rows at one rank than"),
        ({"rows_per_expert": 2**31}, "more rows at one rank than"),
        ({"max_tokens": 2**32}, "max_tokens"),
    ],
)
def test_shape_that_makes_no_sense_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Layout(**SHAPE | change)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (np.zeros((2, 3), np.int32), r"counts.shape\[1\] is 3, must be 4, experts"),
        (np.zeros((1, 4), np.int32), r"counts.shape\[0\] is 1, must be 2, groups"),
        (np.zeros((2, 4), np.int64), "counts is of int64, must be int32"),
        (np.array([[0, 0, 0, 0], [0, 7, -1, 0]], np.int32), "group 1 has -1 routes to expert 2, must be 0 or more"),
        (
            np.array([[0, 0, 0, 0], [4, 1, 1, 1]], np.int32),
            "group 1 has 7 routes, must be at most max_tokens x top_k, 6",
        ),
        (np.full((2, 4), 2**31 - 1, np.int32), "group 0 has 8589934588 routes, must be at most"),
    ],
)
def test_counts_that_no_group_can_have_refused(counts: Ints, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Placement(Layout(**SHAPE), counts)


def test_routes_that_the_counts_do_not_have_refused() -> None:
    indices, slots = np.array([[0, 1], [1, -1]], np.int32), np.array([[0, 0], [1, -1]], np.int32)
    counts = np.array([[1, 2, 0, 0], [0, 0, 0, 0]], np.int32)
    placement = Placement(Layout(**SHAPE), counts)
    order = sort_routes(indices, slots, counts[0])
    assert order.tolist() == [0, 1, 2]
    changed = np.array([[0, 1], [1, 4]], np.int32)
    for refused, message in (
        (lambda: sort_routes(changed, slots, counts[0]), r"route 3 goes to expert 4, must be in \[0, 4\)"),
        (lambda: sort_routes(indices, slots + 1, counts[0]), r"route 0 to expert 0 has slot 1, must be in \[0, 1\)"),
        (lambda: sort_routes(indices, slots, counts[0] * 2**29), "sum of counts is 1610612736, must be at most .* 4"),
        (lambda: sort_routes(indices, slots, counts[0] - 1), r"counts\[2\] is -1, must be 0 or more"),
        (lambda: placement.places(0, changed, slots), r"route 3 goes to expert 4"),
        (lambda: placement.places(0, indices, slots + 1), r"route 0 to expert 0 has slot 1"),
        (lambda: placement.places(1, indices, slots), "slot"),
        (lambda: placement.places(2, indices, slots), "rank"),
        (lambda: placement.pull_near(0, 0, order[:2]), "order has 2 entries, must have at least 3"),
        (lambda: placement.pull_near(0, 0, np.full(3, 6, np.int32)), r"tells of route 6, must be in \[0, 6\)"),
        (lambda: placement.pull_near(0, 0, np.full(3, -1, np.int32)), "tells of route -1"),
        (lambda: placement.pull_near(2, 0, order), "group"),
        (lambda: placement.expert_rows(2), "rank"),
    ):
        with pytest.raises(UsageError, match=message):
            refused()


def test_a_placement_keeps_its_layout_and_its_counts() -> None:
    counts = np.array([[1, 2, 0, 0], [0, 0, 3, 0]], np.int32)
    placement = Placement(Layout(**SHAPE), counts)  # nobody else holds the layout
    counts[:] = -1
    assert placement.expert_rows(0).tolist() == [1, 2] and placement.expert_rows(1).tolist() == [3, 0]
