"""Whole rounds of ranks that share memory: every row where it belongs, every sum exact."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from crossrail.moe import AllToAll, CapacityExceeded, Dispatched, Round
from tests.documentation.blocks import blocks
from tests.moe.batches import Batch, draw, expected_rows, expected_sums, expert_of_row, outputs, split_at_random
from tests.moe.ranks import Ranks, errors_of
from tests.support.seeds import Seed

BLOCK = 16
COPIES = blocks()["docs/moe.md"][1]


def check_dispatched(got: Dispatched, batches: list[Batch], first: int, padding: int, room: int | None = None) -> None:
    """Every row of every expert is the token it should be. room: of each expert, in the masked layout."""
    rows = expected_rows(batches, first, len(got.counts))
    assert got.counts.tolist() == [len(of_expert) for of_expert in rows]
    begin = 0
    for local, of_expert in enumerate(rows):
        assert got.offsets[local] == begin
        for row, (source, token, _) in enumerate(of_expert, begin):
            assert np.array_equal(got.x[row], batches[source].x[token])
            assert np.array_equal(got.scales[row], batches[source].scales[token])
        begin += -(-len(of_expert) // padding) * padding if room is None else room
    assert got.offsets[-1] == got.rows == len(got.x) == begin


def first_expert(part: AllToAll) -> int:
    return sum(part.config.experts_per_rank[: part.rank])


def answer(part: AllToAll, got: Dispatched, in_place: bool) -> None:
    made = outputs(got.x, expert_of_row(got.counts, got.offsets, first_expert(part), got.rows))
    if in_place:
        part.expert_output(got)[:] = made
        part.combine_send(part.expert_output(got), got)
    else:
        part.combine_send(made, got)


def whole_round(part: AllToAll, rank: int, batches: list[Batch], in_place: bool = False) -> None:
    mine = batches[rank]
    got = part.dispatch(mine.x, mine.scales, mine.indices)
    room = part.config.rows_per_expert if part.config.layout == "masked" else None
    check_dispatched(got, batches, first_expert(part), part.config.padding, room)
    answer(part, got, in_place)
    assert np.array_equal(part.combine_recv(got, mine.weights), expected_sums(mine))


CASES = {
    "one rank": (1, {"experts": 4}, 0.0),
    "two ranks": (2, {"experts": 8}, 0.0),
    "masked routes": (3, {"experts": 6}, 0.3),
    "uneven experts": (4, {"experts": 9}, 0.1),
    "ranks without experts": (4, {"experts": 4, "top_k": 4}, 0.0),
    "experts as they are given": (4, {"experts": 9, "experts_per_rank": (0, 5, 1, 3), "padding": 4}, 0.1),
    "all experts on one rank": (4, {"experts": 5, "experts_per_rank": [0, 0, 5, 0], "layout": "masked"}, 0.1),
    "padded": (2, {"experts": 8, "padding": 8}, 0.2),
    "rows of odd length": (2, {"experts": 6, "hidden": 37}, 0.0),
    "masked layout": (2, {"experts": 6, "layout": "masked"}, 0.2),
}


# How ranks reach each other: engine options, and how many share memory; None: found out.
WIRES: dict[str, tuple[dict[str, Any], int | None]] = {
    "near": ({}, None),
    "far by tcp": ({"transport": "tcp", "rails": ["127.0.0.1"]}, None),
    "far by two rails": ({"transport": "tcp", "rails": ["127.0.0.1", "127.0.0.1"]}, None),
    "far by shm": ({}, 1),
    "half of them": ({}, 2),
}


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("case", CASES)
def test_rows_and_sums_are_exact_round_after_round(case: str, wire: str, seed: Seed) -> None:
    size, options, masked = CASES[case]
    engine, node_size = WIRES[wire]
    if node_size is not None and size % node_size:
        node_size = 1
    config = {"hidden": 40, "top_k": 3, "max_tokens": 12, "scale_block": BLOCK, "out_dtype": "float32"} | options
    random = seed.rng()
    with Ranks(size, engine, **config, node_size=node_size, private_tokens=[None, 0, 2][seed.number(1) % 3]) as ranks:
        assert all(part.node_size == (node_size or (1 if engine else size)) for part in ranks.parts)
        for number in range(4):
            counts = random.integers(0, 13, size) if number else np.zeros(size, int)  # the first round has no tokens
            sizes = config["hidden"], options["experts"], config["top_k"]
            batches = [draw(random, int(n), *sizes, BLOCK, masked) for n in counts]
            ranks.each(lambda part, rank, now=batches, i=number: whole_round(part, rank, now, in_place=i % 2 == 0))


@pytest.mark.parametrize("number", range(8))
def test_experts_are_where_any_split_says(number: int, seed: Seed) -> None:
    random = seed.rng()
    size, dp_size, node_size = [(2, 1, 1), (3, 1, 3), (4, 1, 2), (4, 2, 1), (4, 2, 2), (6, 2, 3), (4, 1, 2), (1, 1, 1)][
        number
    ]
    experts = int(random.integers(1, 13))
    top_k = int(random.integers(1, min(experts, 4) + 1))
    split = split_at_random(random, experts, size)
    options: dict[str, Any] = {
        "hidden": 32, "max_tokens": 8, "scale_block": BLOCK, "out_dtype": "float32", "dp_size": dp_size,
        "padding": int(random.integers(1, 6)), "layout": ["grouped", "masked"][int(random.integers(0, 2))],
        "private_tokens": [None, 0, 3][int(random.integers(0, 3))], "node_sums": number == 6,
    }  # fmt: skip
    with Ranks(size, experts=experts, experts_per_rank=split, top_k=top_k, node_size=node_size, **options) as ranks:
        for rank, part in enumerate(ranks.parts):
            assert f"{split[rank]} of {experts} experts" in part.explain()
        for _ in range(3):
            batches = [
                draw(random, int(random.integers(0, 9)), 32, experts, top_k, BLOCK, 0.1) for _ in range(size // dp_size)
            ]

            def run(part: AllToAll, rank: int, batches: list[Batch] = batches) -> None:
                mine = batches[rank // dp_size]
                got = part.dispatch(mine.x, mine.scales, mine.indices, mine.weights)
                room = part.config.rows_per_expert if part.config.layout == "masked" else None
                check_dispatched(got, batches, sum(split[:rank]), part.config.padding, room)
                assert len(got.counts) == split[rank]
                answer(part, got, in_place=True)
                assert np.array_equal(part.combine_recv(got), expected_sums(mine))

            ranks.each(run)


@pytest.mark.parametrize("node_size", [1, 3])
def test_all_tokens_to_one_expert(node_size: int, seed: Seed) -> None:
    random = seed.rng()
    with Ranks(
        3, node_size=node_size, experts=6, hidden=32, top_k=1, max_tokens=20, scale_block=BLOCK, out_dtype="float32"
    ) as ranks:
        batches = [draw(random, 20, 32, 6, 1, BLOCK) for _ in range(3)]
        for batch in batches:
            batch.indices[:] = 3
        ranks.each(lambda part, rank: whole_round(part, rank, batches))


@pytest.mark.parametrize("node_size", [1, 2])
def test_two_rounds_are_open_at_once(node_size: int, seed: Seed) -> None:
    random = seed.rng()
    with Ranks(
        2, node_size=node_size, experts=4, hidden=32, top_k=2, max_tokens=8, scale_block=BLOCK, out_dtype="float32"
    ) as ranks:
        rounds = [[draw(random, 8, 32, 4, 2, BLOCK) for _ in range(2)] for _ in range(2)]

        def both(part: AllToAll, rank: int) -> None:
            mine = [batches[rank] for batches in rounds]
            opened = [part.dispatch_send(b.x, b.scales, b.indices, b.weights) for b in mine]
            got = [part.dispatch_recv(one) for one in opened]
            for one, batches in zip(got, rounds, strict=True):
                check_dispatched(one, batches, first_expert(part), 1)
            for one in reversed(got):  # in any order
                answer(part, one, in_place=True)
            for one, batch in zip(got, mine, strict=True):
                assert np.array_equal(part.combine_recv(one), expected_sums(batch))

        for _ in range(3):
            ranks.each(both)


def test_only_the_tokens_in_use_are_sent_and_sums_are_added_to_what_is_there(seed: Seed) -> None:
    random = seed.rng()
    with Ranks(2, experts=4, hidden=32, top_k=2, max_tokens=8, scale_block=BLOCK, out_dtype="float32") as ranks:
        full = [draw(random, 8, 32, 4, 2, BLOCK) for _ in range(2)]
        used = [Batch(b.x[:5], b.scales[:5], b.indices[:5], b.weights[:5]) for b in full]

        def run(part: AllToAll, rank: int) -> None:
            mine = full[rank]
            got = part.dispatch(mine.x, mine.scales, mine.indices, num_tokens=np.array(5))
            check_dispatched(got, used, first_expert(part), 1)
            answer(part, got, in_place=False)
            out = np.full((5, 32), 7, np.float32)
            assert part.combine_recv(got, mine.weights, out=out, accumulate=True) is out
            assert np.array_equal(out, expected_sums(used[rank]) + 7)

        ranks.each(run)


@pytest.mark.parametrize("node_size", [1, 2])
def test_without_scales_and_with_16_bits(node_size: int, seed: Seed) -> None:
    random = seed.rng()
    options = {"dtype": "bfloat16", "scale_block": None, "out_dtype": "float16"}
    with Ranks(2, node_size=node_size, experts=4, hidden=24, top_k=2, max_tokens=8, **options) as ranks:
        x = random.integers(0, 1 << 16, (2, 8, 24), np.uint16)
        indices = np.tile(np.array([0, 3], np.int64), (8, 1))

        def run(part: AllToAll, rank: int) -> None:
            got = part.dispatch(x[rank], None, indices)
            assert got.scales is None
            assert np.array_equal(got.x, x.reshape(16, 24))  # of expert 0 on rank 0, of 3 on rank 1
            part.combine_send(np.full((16, 24), rank + 1, np.float16), got)
            out = part.combine_recv(got, np.ones((8, 2), np.float32))
            assert out.dtype == np.float16
            assert (out == 3).all()

        ranks.each(run)


@pytest.mark.parametrize("node_size", [1, 2])
def test_too_many_rows_are_refused_on_every_rank_and_the_next_rounds_are_good(node_size: int, seed: Seed) -> None:
    random = seed.rng()
    options = {"experts": 4, "hidden": 32, "top_k": 1, "max_tokens": 8, "scale_block": BLOCK, "out_dtype": "float32"}
    with Ranks(2, node_size=node_size, capacity_factor=1.25, **options) as ranks:
        assert ranks.parts[0].config.output_rows == (10, 10)
        skewed = [draw(random, 8, 32, 4, 1, BLOCK) for _ in range(2)]
        for batch in skewed:
            batch.indices[:] = 2
        fair = [draw(random, 8, 32, 4, 1, BLOCK) for _ in range(2)]
        for batch in fair:
            batch.indices[:, 0] = np.arange(8) % 4

        for _ in range(3):
            refused = errors_of(ranks, lambda p, r: p.dispatch(skewed[r].x, skewed[r].scales, skewed[r].indices),
                                CapacityExceeded)  # fmt: skip
            for error in refused:
                assert isinstance(error, CapacityExceeded)
                assert (error.rank, error.needed, error.there) == (1, 16, 10)
                assert "rank 1 has room for 10 rows" in str(error)
            ranks.each(lambda part, rank: whole_round(part, rank, fair))


@pytest.mark.parametrize("node_size", [1, 3])
@pytest.mark.parametrize("layout", ["grouped", "masked"])
def test_an_expert_named_twice_is_refused_where_a_rank_has_room_for_few(
    node_size: int, layout: str, nothing_leaks: None
) -> None:
    """Of which rank 1 has one, and room for a route of each token."""
    options = {"experts": 6, "hidden": 32, "top_k": 2, "max_tokens": 8, "scale_block": None, "out_dtype": "float32"}
    x, indices = np.zeros((8, 32), np.uint8), np.full((8, 2), 4)
    with Ranks(3, node_size=node_size, layout=layout, experts_per_rank=[4, 1, 1], **options) as ranks:
        for error in errors_of(ranks, lambda part, rank: part.dispatch(x, None, indices), CapacityExceeded):
            assert isinstance(error, CapacityExceeded)
            assert (error.rank, error.needed, error.there) == (1, 48, 24)


def test_a_capacity_is_that_of_each_ranks_own_experts(seed: Seed) -> None:
    """Of 16 routes, 12 are the mean of three experts, and 4 that of one."""
    options = {"experts": 4, "hidden": 32, "top_k": 1, "max_tokens": 8, "scale_block": BLOCK, "out_dtype": "float32"}
    with Ranks(2, experts_per_rank=[3, 1], capacity_factor=1.0, **options) as ranks:
        assert ranks.parts[0].config.output_rows == (12, 4)
        batches = [draw(seed.rng(), 8, 32, 4, 1, BLOCK) for _ in range(2)]
        for batch in batches:
            batch.indices[:, 0] = np.arange(8) % 4
        ranks.each(lambda part, rank: whole_round(part, rank, batches))
        batches[1].indices[0, 0] = 3
        errors = errors_of(ranks, lambda p, r: p.dispatch(batches[r].x, batches[r].scales, batches[r].indices),
                           CapacityExceeded)  # fmt: skip
        assert "rank 1 has room for 4 rows, 5 are for it" in str(errors[0]) == str(errors[1])


@pytest.mark.parametrize("split", [None, [3, 9, 0, 8]], ids=["even", "uneven"])
@pytest.mark.parametrize("wire", ["near", "half of them"])
def test_copies_of_experts_that_move_between_rounds_give_the_same_bits(
    wire: str, split: list[int] | None, seed: Seed
) -> None:
    """By the piece of docs/moe.md: AllToAll knows slots, and a table that changes says whose weights are in them."""
    experts, slots, hidden = 12, 20, 24
    plain: dict[str, Any] = {"dtype": "float32", "scale_block": None, "out_dtype": "float32"}
    scale = seed.rng().standard_normal((experts, hidden), np.float32)
    rounds = []
    for number in range(4):
        random = seed.rng(number)
        expert_in = random.permutation([*range(experts), *random.integers(0, experts, slots - experts)])
        copies = np.bincount(expert_in, minlength=experts)
        places = np.zeros((experts, copies.max()), np.int64)
        for expert, count in enumerate(copies):
            places[expert, :count] = np.flatnonzero(expert_in == expert)
        x = random.standard_normal((4, 9, hidden), np.float32)
        chosen = np.argsort(random.random((4, 9, experts)), axis=2)[:, :, :3]
        weights = random.random((4, 9, 3), np.float32)
        sums = np.zeros_like(x)
        for k in range(3):
            sums += weights[:, :, k : k + 1] * (x * scale[chosen[:, :, k]])
        rounds.append((expert_in, (places, copies), x, chosen, weights, sums))

    def run(part: AllToAll, rank: int) -> None:
        for expert_in, table, x, chosen, weights, sums in rounds:
            names = {"np": np, "all_to_all": part, "table": table, "x": x[rank], "chosen": chosen[rank]}
            exec(COPIES, names)
            got: Any = names["dispatched"]
            own = expert_in[part.config.split.of(rank).start :][: len(got.counts)]
            y = got.x * scale[np.repeat(own, got.counts)]
            assert np.array_equal(part.combine(y, got, weights[rank]), sums[rank])

    engine, node_size = WIRES[wire]
    sizes = {"experts": slots, "experts_per_rank": split, "hidden": hidden, "top_k": 3, "max_tokens": 9}
    with Ranks(4, engine, **sizes, **plain, node_size=node_size) as ranks:
        ranks.each(run)


def test_stats_and_explain_tell_what_was_done(seed: Seed) -> None:
    random = seed.rng()
    with Ranks(2, experts=4, hidden=32, top_k=2, max_tokens=8, scale_block=BLOCK, out_dtype="float32") as ranks:
        batches = [draw(random, 8, 32, 4, 2, BLOCK) for _ in range(2)]
        ranks.each(lambda part, rank: whole_round(part, rank, batches))
        stats = [part.stats() for part in ranks.parts]
        assert [one["rounds"] for one in stats] == [1, 1]
        assert [one["tokens_sent"] for one in stats] == [8, 8]
        assert sum(one["rows_received"] for one in stats) == 32
        assert sum(one["bytes_received"] for one in stats) == 32 * (32 + 8)
        assert [one["bytes_summed"] for one in stats] == [16 * 128, 16 * 128]
        assert "mapped memory: ranks [1]" in ranks.parts[0].explain()


@pytest.mark.parametrize("node_size", [1, 2])
def test_a_token_that_names_an_expert_twice_is_refused_where_there_is_no_room_for_it(node_size: int) -> None:
    with Ranks(2, node_size=node_size, experts=2, hidden=32, top_k=2, max_tokens=4, scale_block=BLOCK) as ranks:
        x, scales, twice = np.zeros((4, 32), np.uint8), np.zeros((4, 2), np.float32), np.ones((4, 2), np.int32)
        refused = errors_of(ranks, lambda part, _: part.dispatch(x, scales, twice), CapacityExceeded)
        assert all("rank 1" in str(error) for error in refused)


DP_CASES = [(4, 2, 4), (4, 2, 2), (4, 2, 1), (4, 4, 1), (6, 2, 2), (4, 2, [3, 1]), (6, 3, [1, 4, 1]), (6, 2, [5, 1])]


@pytest.mark.parametrize(("size", "dp_size", "node_size"), DP_CASES)
def test_ranks_that_hold_the_same_tokens_send_each_row_once_and_all_get_the_sums(
    size: int, dp_size: int, node_size: int | list[int], seed: Seed
) -> None:
    random = seed.rng()
    options = {"experts": 9, "hidden": 32, "top_k": 3, "max_tokens": 8, "scale_block": BLOCK, "out_dtype": "float32"}
    with Ranks(size, node_size=node_size, dp_size=dp_size, private_tokens=2, **options) as ranks:
        for _ in range(4):
            groups = [draw(random, int(random.integers(0, 9)), 32, 9, 3, BLOCK, 0.1) for _ in range(size // dp_size)]

            def run(part: AllToAll, rank: int, groups: list[Batch] = groups) -> None:
                mine = groups[rank // dp_size]
                got = part.dispatch(mine.x, mine.scales, mine.indices)
                check_dispatched(got, groups, first_expert(part), 1)
                answer(part, got, in_place=True)
                assert np.array_equal(part.combine_recv(got, mine.weights), expected_sums(mine))

            ranks.each(run)


def test_what_experts_made_is_read_until_the_round_after_the_next_is_received(seed: Seed) -> None:
    random = seed.rng()
    batches = [[draw(random, 8, 32, 4, 2, BLOCK) for _ in range(2)] for _ in range(3)]
    may_overwrite = threading.Event()

    def send(part: AllToAll, number: int) -> Round:
        mine = batches[number][part.rank]
        return part.dispatch_send(mine.x, mine.scales, mine.indices, mine.weights)

    def run(part: AllToAll, rank: int) -> None:
        opened, got = send(part, 0), []
        for number in (0, 1):
            got.append(part.dispatch_recv(opened))
            if number == 0:
                kept = part.expert_output(got[0])
            answer(part, got[number], in_place=True)
            if rank == 0:
                assert np.array_equal(part.combine_recv(got[number]), expected_sums(batches[number][rank]))
            opened = send(part, number + 1) if number == 0 or rank == 0 else opened
        if rank == 0:
            part.dispatch_recv(opened)
            may_overwrite.set()
            kept[:] = np.nan
        else:
            assert not may_overwrite.wait(0.2)
            assert np.array_equal(part.combine_recv(got[0]), expected_sums(batches[0][rank]))
            opened = send(part, 2)
            assert np.array_equal(part.combine_recv(got[1]), expected_sums(batches[1][rank]))
            part.dispatch_recv(opened)

    with Ranks(2, experts=4, hidden=32, top_k=2, max_tokens=8, scale_block=BLOCK, out_dtype="float32") as ranks:
        ranks.each(run)
