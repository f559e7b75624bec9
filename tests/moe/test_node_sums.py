"""Partial sums of a node: what combine gives, the bits of it, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from crossrail import _core, sim
from crossrail.errors import UsageError
from crossrail.moe import AllToAll, CapacityExceeded
from crossrail.moe.bounds import Bounds
from crossrail.moe.config import Config
from tests.moe.batches import Batch, draw, expected_sums, ranks_of, split_at_random
from tests.moe.ranks import Ranks, errors_of
from tests.moe.test_bounds import Shape
from tests.moe.test_rounds import answer, check_dispatched, first_expert
from tests.moe.test_sim import Town, draws
from tests.support.seeds import Seed

BLOCK = 16
OPTIONS: dict[str, Any] = {"experts": 9, "hidden": 40, "top_k": 4, "max_tokens": 12, "scale_block": BLOCK,
                           "out_dtype": "float32", "node_sums": True}  # fmt: skip


def play(part: AllToAll, batches: list[Batch]) -> Any:
    """A round of one rank, checked as far as rows go; what combine gives."""
    mine = batches[part.rank]
    got = part.dispatch(mine.x, mine.scales, mine.indices, mine.weights)
    check_dispatched(got, batches, first_expert(part), part.config.padding)
    answer(part, got, in_place=True)
    return part.combine_recv(got)


@pytest.mark.parametrize("wire", [{}, {"transport": "shm"}], ids=["any rail", "shm"])
@pytest.mark.parametrize(
    ("size", "node_size"), [(4, 2), (6, 2), (6, 3), (3, 1), (2, 2), (3, [2, 1]), (5, [1, 4]), (6, [1, 3, 2])], ids=str
)
def test_sums_of_whole_numbers_are_those_without(
    size: int, node_size: int | list[int], wire: dict[str, Any], seed: Seed
) -> None:
    random = seed.rng()
    private = [None, 0, 2][seed.number(1) % 3]
    with Ranks(size, wire, node_size=node_size, private_tokens=private, **OPTIONS) as ranks:
        for number in range(4):
            counts = random.integers(0, 13, size) if number else np.zeros(size, int)
            batches = [draw(random, int(n), 40, 9, 4, BLOCK, 0.2) for n in counts]
            sums = ranks.each(lambda part, _, now=batches: play(part, now))
            assert all(np.array_equal(got, expected_sums(batch)) for got, batch in zip(sums, batches, strict=True))


@pytest.mark.parametrize("node_size", [2, [1, 3]], ids=str)
@pytest.mark.parametrize("proxy", ["caller", "thread"])
def test_two_rounds_are_open_at_once(proxy: str, node_size: int | list[int], seed: Seed) -> None:
    random = seed.rng()
    with Ranks(4, node_size=node_size, proxy=proxy, **OPTIONS) as ranks:
        rounds = [[draw(random, 8, 40, 9, 4, BLOCK) for _ in range(4)] for _ in range(2)]

        def both(part: AllToAll, rank: int) -> None:
            mine = [batches[rank] for batches in rounds]
            opened = [part.dispatch_send(b.x, b.scales, b.indices, b.weights) for b in mine]
            got = [part.dispatch_recv(one) for one in opened]
            for one in got:
                answer(part, one, in_place=False)
            for one, batch in zip(got, mine, strict=True):
                assert np.array_equal(part.combine_recv(one), expected_sums(batch))

        for _ in range(3):
            ranks.each(both)


def test_bits_are_the_same_in_every_run_and_close_to_those_without(seed: Seed) -> None:
    """bfloat16: each sum of a node is rounded once more, by at most 2**-9 of it."""
    options = OPTIONS | {"dtype": "bfloat16", "scale_block": None, "out_dtype": "bfloat16"}
    random = seed.rng()
    x = [to_bits(random.standard_normal((12, 40)).astype(np.float32)) for _ in range(4)]
    indices = [np.stack([random.permutation(9)[:4] for _ in range(12)]) for _ in range(4)]
    weights = [random.random((12, 4), np.float32) for _ in range(4)]

    def sums(node_sums: bool) -> list[Any]:
        def run(part: AllToAll, rank: int) -> Any:
            got = part.dispatch(x[rank], None, indices[rank], weights[rank])
            return part.combine(got.x, got)  # experts give back what they get

        with Ranks(4, node_size=2, **options | {"node_sums": node_sums}) as ranks:
            first, second = ranks.each(run), ranks.each(run)
        assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
        return first

    with_sums, again, without = sums(True), sums(True), sums(False)

    assert all(np.array_equal(a, b) for a, b in zip(with_sums, again, strict=True))
    for rank in range(4):
        # The node's sum and what it is added to are each at most this, and each is rounded.
        bound = (weights[rank].sum(axis=1, keepdims=True) * np.abs(to_floats(x[rank]))) * 2**-7
        assert (np.abs(to_floats(with_sums[rank]) - to_floats(without[rank])) <= bound).all()


def to_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """bfloat16, as numpy has it; not rounded but cut."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def to_floats(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("nic", ["2xefa200", "cx7"])
def test_rounds_are_exact_in_whatever_order_writes_land(nic: str, seed: Seed) -> None:
    random = seed.rng()
    with sim.World(seed.number()) as world:
        town = Town(world, 4, nic, private_tokens=3, node_sums=True)
        for _ in range(6):
            town.whole_round(draws(random, 4))
        town.close()


@pytest.mark.parametrize("node_size", [2, [1, 3]], ids=str)
def test_a_round_that_is_refused_leaves_the_next_ones_good(node_size: int | list[int], seed: Seed) -> None:
    random = seed.rng()
    options = OPTIONS | {"experts": 4, "top_k": 1, "max_tokens": 8, "capacity_factor": 1.25}
    with Ranks(4, node_size=node_size, **options) as ranks:
        skewed = [draw(random, 8, 40, 4, 1, BLOCK) for _ in range(4)]
        fair = [draw(random, 8, 40, 4, 1, BLOCK) for _ in range(4)]
        for batch in skewed:
            batch.indices[:] = 2
        for batch in fair:
            batch.indices[:, 0] = np.arange(8) % 4

        for _ in range(3):
            errors_of(ranks, lambda p, r: p.dispatch(skewed[r].x, skewed[r].scales, skewed[r].indices,
                                                     skewed[r].weights), CapacityExceeded)  # fmt: skip
            sums = ranks.each(lambda part, _: play(part, fair))
            assert all(np.array_equal(got, expected_sums(batch)) for got, batch in zip(sums, fair, strict=True))


def test_weights_are_dispatchs(seed: Seed) -> None:
    batch = draw(seed.rng(), 4, 40, 9, 4, BLOCK)
    with Ranks(1, **OPTIONS) as ranks:
        (part,) = ranks.parts
        with pytest.raises(UsageError, match="weights is None: with node_sums dispatch takes them"):
            part.dispatch(batch.x, batch.scales, batch.indices)

        got = part.dispatch(batch.x, batch.scales, batch.indices, batch.weights)
        answer(part, got, in_place=True)
        with pytest.raises(UsageError, match="weights are given to combine"):
            part.combine_recv(got, batch.weights)

        assert np.array_equal(part.combine_recv(got), expected_sums(batch))


def test_groups_that_hold_the_same_tokens_are_refused() -> None:
    common = {"world": 4, "dtype": "bfloat16", "private_tokens": None, "padding": 1, "layout": "grouped",
              "node_size": 2, "capacity_factor": None, "on_lost": "raise"}  # fmt: skip
    with pytest.raises(UsageError, match="node_sums is True, must be False where dp_size is 2"):
        Config(**common, dp_size=2, **OPTIONS)


# --- where sums go ---


def test_terms_that_are_sent_are_those_that_are_taken(seed: Seed) -> None:
    """Played with labels: row by row, what a partner adds up is what the origin lacks of that node."""
    random = seed.rng()
    for _ in range(20):
        world, top_k, tokens, experts = (int(random.integers(*ends)) for ends in ((1, 9), (1, 4), (1, 9), (4, 15)))
        nodes = np.unique(random.integers(0, 4, world), return_inverse=True)[1]  # of any sizes, in any order
        split = split_at_random(random, experts, world)
        owners = ranks_of(split, np.arange(experts))
        layout = _core.moe.Layout(world=world, experts=experts, experts_per_rank=split, top_k=top_k, max_tokens=tokens,
                                  node_of_rank=nodes.tolist())  # fmt: skip
        batches = [draw(random, int(random.integers(0, tokens + 1)), 8, experts, top_k, 8, 0.2) for _ in range(world)]
        counts, slots, orders = _routes(batches, experts)
        placement = _core.moe.Placement(layout, counts)
        tags = [_tags(placement, layout, rank, batches, orders) for rank in range(world)]
        for origin, batch in enumerate(batches):
            where, weights = _core.moe.terms_to_take(placement, origin, batch.indices, slots[origin], batch.weights)
            node_tokens = _core.moe.node_tokens(layout, batch.indices)
            size = len(layout.near_ranks(origin))
            partners = _core.moe.partners(layout, origin)
            assert sorted(nodes[partners]) == [node for node in range(max(nodes) + 1) if node != nodes[origin]]
            for partner in partners:
                assert origin in _core.moe.origins(layout, partner)
                near = layout.near_ranks(partner)
                sent, factors = _core.moe.terms_to_send(placement, partner, origin, [tags[rank] for rank in near])
                assert len(sent) == node_tokens[nodes[partner]]
                begin = _core.moe.far_node(layout, origin, partner) * tokens
                for token in range(len(batch.x)):
                    mine = [k for k in range(top_k) if batch.indices[token, k] >= 0
                            and owners[batch.indices[token, k]] in near]  # fmt: skip
                    rows = [int(where[token, k, 1]) for k in mine if where[token, k, 0] == size]
                    assert len(rows) == min(len(mine), 1)  # one term for the node, however many routes
                    if not mine:
                        continue
                    assert where[token, mine[0]].tolist() == [size, rows[0]] and weights[token, mine[0]] == 1
                    terms, factor = sent[rows[0] - begin], factors[rows[0] - begin]
                    for k in range(top_k):
                        assert (terms[k, 1] >= 0) == (k in mine)
                        if k in mine:
                            rank = near[terms[k, 0]]
                            assert rank == owners[batch.indices[token, k]]
                            assert (origin, token, k) == _labels(placement, layout, rank, batches, orders)[terms[k, 1]]
                            assert factor[k] == batch.weights[token, k]
            assert sum(len(_core.moe.origins(layout, rank)) for rank in range(world)) == world * max(nodes)
            own = (where[..., 0] < size) & (where[..., 1] >= 0)
            is_near = (batch.indices >= 0) & np.isin(ranks_of(split, batch.indices), layout.near_ranks(origin))
            assert np.array_equal(own, is_near) and np.array_equal(weights[own], batch.weights[own])


def _routes(batches: list[Batch], experts: int) -> tuple[Any, list[Any], list[Any]]:
    counts = np.zeros((len(batches), experts), np.int32)
    slots = [np.full(batch.indices.shape, -1, np.int32) for batch in batches]
    for rank, batch in enumerate(batches):
        for token, k in np.argwhere(batch.indices >= 0):
            slots[rank][token, k] = counts[rank, batch.indices[token, k]]
            counts[rank, batch.indices[token, k]] += 1
    orders = [_core.moe.sort_routes(b.indices, s, c) for b, s, c in zip(batches, slots, counts, strict=True)]
    return counts, slots, orders


def _labels(placement: Any, layout: Any, rank: int, batches: list[Batch], orders: list[Any]) -> dict[int, Any]:
    """By output row of a rank: source, token, k."""
    top_k = batches[0].indices.shape[1]
    labels: dict[int, Any] = {}
    row = 0
    for expert in range(layout.first_expert(rank), layout.first_expert(rank) + layout.expert_count(rank)):
        for source, batch in enumerate(batches):
            for route in (r for r in orders[source] if batch.indices.reshape(-1)[r] == expert):
                labels[row] = (source, int(route) // top_k, int(route) % top_k)
                row += 1
    return labels


def _tags(placement: Any, layout: Any, rank: int, batches: list[Batch], orders: list[Any]) -> Any:
    """As they would have come with the rank's far rows."""
    labels = _labels(placement, layout, rank, batches, orders)
    rows, _ = placement.return_far(rank)
    tags = np.empty((len(rows), 2), np.int32)
    for i, row in enumerate(rows.tolist()):
        source, token, k = labels[row]
        tags[i] = (
            token * batches[source].indices.shape[1] + k,
            batches[source].weights[token, k : k + 1].view(np.int32)[0],
        )
    return tags


def test_tags_of_no_route_are_refused() -> None:
    layout = _core.moe.Layout(world=2, experts=2, top_k=1, max_tokens=3, node_of_rank=[0, 1])
    placement = _core.moe.Placement(layout, np.array([[0, 2], [0, 0]], np.int32))
    good = np.zeros((2, 2), np.int32)

    assert len(_core.moe.terms_to_send(placement, 1, 0, [good])[0]) == 1
    for tags, message in (
        ([good + 3], r"rank 1 tells of route 3 of rank 0, must be in \[0, 3\)"),
        ([good - 1], "route -1"),
        ([good[:1]], r"tags\[0\] has 1 tags, must have at least 2, by the counts"),
        ([], "tags has 0 lists, must have 1, one for each rank of the node"),
    ):
        with pytest.raises(UsageError, match=message):
            _core.moe.terms_to_send(placement, 1, 0, tags)


def test_room_for_results_is_a_row_of_each_token_from_each_other_node() -> None:
    shape = Shape(64, 256, 8, 128, 16)
    bounds, without = Bounds.of(shape, 56, summed_nodes=7), Bounds.of(shape, 56)

    assert bounds.result_rows == bounds.returned_rows == 7 * 128
    assert without.far_bytes - bounds.far_bytes == (56 * 128 * 4 + 128 * 8 - 2 * 7 * 128) * shape.y_bytes
