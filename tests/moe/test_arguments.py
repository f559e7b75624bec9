"""What is refused: arguments that make no sense, that differ between ranks, and arrays that do not match them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.moe import AllToAll, CapacityExceeded, EngineGroup
from crossrail.moe.config import Config
from tests.conftest import EngineFactory
from tests.moe.batches import draw, misaligned
from tests.moe.rank import BLOCK, CONFIG, EXPERTS, HIDDEN, TOKENS, TOP_K
from tests.moe.ranks import Ranks, run_ranks
from tests.support.limits import WAIT_S


@pytest.fixture
def alone(nothing_leaks: None) -> Iterator[AllToAll]:
    with Ranks(1, **CONFIG) as ranks:
        yield ranks.parts[0]


ARGUMENTS = [
    ("experts", 0, "experts is 0, must be a number, 1 or more"),
    (
        "experts_per_rank",
        [6, 0],
        r"experts_per_rank is \[6, 0\], must be a number of experts, 0 or more, for each of the 1",
    ),
    ("experts_per_rank", [5], r"experts_per_rank is \[5\], must be 6 in all, as experts says"),
    ("experts_per_rank", [-6], r"experts_per_rank is \[-6\], must be a number of experts, 0 or more"),
    ("experts_per_rank", [6.0], r"experts_per_rank is \[6\.0\], must be a number of experts, 0 or more"),
    ("experts_per_rank", [True], r"experts_per_rank is \[True\], must be a number of experts"),
    ("experts_per_rank", 6, "experts_per_rank is 6, must be a number of experts, 0 or more, for each"),
    ("experts_per_rank", "6", "experts_per_rank is '6', must be a number of experts, 0 or more, for each"),
    ("dtype", "int8", "dtype is 'int8', must be one of float8_e4m3fn"),
    ("out_dtype", "float8_e4m3fn", "out_dtype is 'float8_e4m3fn', must be one of bfloat16"),
    ("layout", "flat", "layout is 'flat'"),
    ("scale_block", 0, "scale_block is 0"),
    ("capacity_factor", 0.0, r"capacity_factor is 0\.0"),
    ("node_size", 2, "node_size is 2, must be a divisor of the number of ranks, 1"),
    ("dp_size", 2, "dp_size is 2, must be a divisor"),
    ("on_lost", "ignore", "on_lost is 'ignore', must be one of raise, mask"),
    ("capacity_factor", math.inf, "capacity_factor is inf"),
    ("capacity_factor", "2", "capacity_factor is '2'"),
    ("capacity_factor", True, "capacity_factor is True"),
    ("experts", np.arange(2), r"experts is array\(\[0, 1\]\), must be a number"),
    ("hidden", 1 << 31, "hidden is 2147483648, must be 2147483647 or less"),
    ("experts", 1 << 64, "experts is 18446744073709551616, must be 2147483647 or less"),
    ("private_tokens", 1 << 40, "private_tokens is 1099511627776, must be 2147483647 or less"),
    ("scale_block", 1.5, r"scale_block is 1\.5, must be a number, 1 or more, or None"),
    ("scale_block", "128", "scale_block is '128'"),
    ("node_size", 1.0, r"node_size is 1\.0, must be a divisor"),
    ("node_size", [2], r"node_size is \[2\], must be the number of ranks of each node, 1 or more, 1 in all"),
    ("node_size", [1, 0], r"node_size is \[1, 0\], must be the number of ranks of each node, 1 or more, 1 in all"),
    ("node_size", "1", r"node_size is '1', must be a divisor of the number of ranks, 1, or the size of each node"),
    ("private_tokens", 1.5, r"private_tokens is 1\.5"),
    ("max_tokens", True, "max_tokens is True"),
    ("dtype", [], r"dtype is \[\], must be one of"),
    ("timeout_s", None, "timeout_s must be a number, not None"),
    ("timeout_s", "3", "timeout_s must be a number, not str"),
    ("timeout_s", -1.0, r"timeout_s is -1\.0, must be seconds, 0 or more"),
    ("timeout_s", math.nan, "timeout_s is nan, must be seconds, 0 or more"),
    ("top_k", 7, "top_k is 7, must be 6 or less"),
    ("node_sums", 1, "node_sums is 1, must be True or False"),
    ("node_sums", "no", "node_sums is 'no', must be True or False"),
    ("proxy_cpu", "0", "proxy_cpu is '0', must be the number of a core"),
    ("padding", 1 << 30, r"padding 1073741824, .* more rows at one rank than 2147483647"),
    ("kernels", 3, "kernels is int, must be Kernels or None: it has no pack, pull, reduce"),
]


@pytest.mark.parametrize(("name", "value", "complaint"), ARGUMENTS)
def test_an_argument_out_of_its_bounds_is_named(engine: xr.Engine, name: str, value: object, complaint: str) -> None:
    with EngineGroup(engine, [engine.address]) as group, pytest.raises(xr.UsageError, match=complaint):
        AllToAll(engine, group, **(CONFIG | {name: value}))


def test_what_is_no_engine_or_no_group_is_named(engine: xr.Engine) -> None:
    wrong: Any = None
    with EngineGroup(engine, [engine.address]) as group:
        wrong = group
        with pytest.raises(xr.UsageError, match="engine is EngineGroup, must be an Engine"):
            AllToAll(wrong, group, **CONFIG)
    wrong = [engine.address]
    with pytest.raises(xr.UsageError, match="group is list, must be EngineGroup, TorchGroup or the like"):
        AllToAll(engine, wrong, **CONFIG)
    wrong = [None]
    with pytest.raises(xr.UsageError, match="addresses has NoneType, must have Address or bytes"):
        EngineGroup(engine, wrong)


def test_a_proxy_cpu_is_checked_also_where_no_rank_is_far(engine: xr.Engine) -> None:
    wrong: Any = "first"
    with (
        EngineGroup(engine, [engine.address]) as group,
        pytest.raises(xr.UsageError, match="proxy_cpu is 'first', must be the number of a core"),
    ):
        AllToAll(engine, group, proxy="thread", proxy_cpu=wrong, **CONFIG)


def test_numbers_of_any_kind_are_numbers(engine: xr.Engine) -> None:
    numbers = {"experts": np.int64(EXPERTS), "top_k": np.uint8(TOP_K), "capacity_factor": np.float32(1.5),
               "node_sums": np.False_}  # fmt: skip
    with EngineGroup(engine, [engine.address]) as group:
        with AllToAll(engine, group, **(CONFIG | {"capacity_factor": 1.5})) as part:
            plain = part.config.encode()
        with AllToAll(engine, group, **(CONFIG | numbers)) as part:
            assert part.config.encode() == plain


def test_the_even_split_may_be_said_or_not(open_engine: EngineFactory) -> None:
    engines = [open_engine(f"rank-{rank}") for rank in range(2)]
    groups = [EngineGroup(engine, [e.address for e in engines]) for engine in engines]
    said: list[Any] = [None, np.array([EXPERTS // 2, EXPERTS // 2], np.int16)]

    def make(rank: int) -> object:
        with AllToAll(engines[rank], groups[rank], **(CONFIG | {"experts_per_rank": said[rank]})) as part:
            return part.config.experts_per_rank

    assert run_ranks(2, make) == [(EXPERTS // 2, EXPERTS // 2)] * 2
    for group in groups:
        group.close()


def test_a_capacity_beyond_any_routing_is_room_for_any() -> None:
    for layout in ("grouped", "masked"):
        sizes = {"world": 4, "experts": 7, "hidden": 8, "top_k": 3, "max_tokens": 5, "dtype": "float32",
                 "scale_block": None, "out_dtype": "float32", "private_tokens": None, "padding": 4, "layout": layout,
                 "node_size": None, "dp_size": 1, "on_lost": "raise"}  # fmt: skip
        assert Config(**sizes, capacity_factor=1e308).output_rows == Config(**sizes, capacity_factor=None).output_rows


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("hidden", (32, 64)),
        ("dtype", ("float8_e4m3fn", "float16")),
        ("scale_block", (16, None)),
        ("experts_per_rank", ([2, 1, 3], [2, 3, 1])),
    ],
)
def test_arguments_that_differ_are_named_with_both_values_on_all_ranks(
    open_engine: EngineFactory, name: str, values: tuple[object, object]
) -> None:
    engines = [open_engine(f"rank-{rank}") for rank in range(3)]
    groups = [EngineGroup(engine, [e.address for e in engines]) for engine in engines]

    def make(rank: int) -> str:
        config: dict[str, Any] = CONFIG | {"timeout_s": WAIT_S, name: values[rank == 2]}
        with pytest.raises(xr.UsageError) as caught:
            AllToAll(engines[rank], groups[rank], **config)
        return str(caught.value)

    for text in run_ranks(3, make):
        assert text.startswith(f"{name} is {values[0]!r} on rank 0 and {values[1]!r} on rank 2")
    for group in groups:
        group.close()


def test_a_node_size_that_memory_does_not_allow_is_refused_on_all(open_engine: EngineFactory) -> None:
    engines = [open_engine(f"rank-{rank}", transport="tcp", rails=["127.0.0.1"]) for rank in range(2)]
    groups = [EngineGroup(engine, [e.address for e in engines]) for engine in engines]

    def make(rank: int) -> None:
        with pytest.raises(xr.UsageError, match=r"node_size is 2, and rank 0 cannot map the memory of rank 1\."):
            AllToAll(engines[rank], groups[rank], timeout_s=WAIT_S, node_size=2, **CONFIG)

    run_ranks(2, make)
    for group in groups:
        group.close()


BATCH = draw(np.random.default_rng(1), TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK)
ARRAYS: list[tuple[str, object, str]] = [
    ("x", BATCH.x[:, :16].copy(), r"x has shape \[8, 16\], must have \[any, 32\]"),
    ("x", BATCH.x.astype(np.float32), "x is of type float32, must be of uint8"),
    ("x", np.empty((TOKENS, 2 * HIDDEN), np.uint8)[:, ::2], r"x has strides \(64, 2\), must be C-contiguous"),
    ("x", BATCH.x.tolist(), "x is list, must be an array of numpy or a tensor of torch"),
    ("scales", None, "scales is NoneType"),
    ("scales", BATCH.scales[:, :1].copy(), r"scales has shape \[8, 1\], must have \[8, 2\]"),
    ("indices", BATCH.indices[:5], r"indices has shape \[5, 2\], must have \[8, 2\]"),
    ("indices", BATCH.indices.astype(np.int16), "indices is of type int16, must be of int32 or int64"),
    ("weights", BATCH.weights.astype(np.float64), "weights is of type float64, must be of float32"),
    ("num_tokens", 9, r"num_tokens is 9, must be in 0\.\.8"),
    ("num_tokens", np.arange(2), "num_tokens is .* must be one whole number"),
    ("num_tokens", 2.5, r"num_tokens is 2\.5, must be one whole number"),
    ("num_tokens", math.inf, "num_tokens is inf, must be one whole number"),
    ("num_tokens", "2", "num_tokens is '2', must be one whole number"),
]


@pytest.mark.parametrize(("name", "value", "complaint"), ARRAYS)
def test_an_array_that_does_not_match_is_named_and_opens_no_round(
    alone: AllToAll, name: str, value: object, complaint: str
) -> None:
    good: dict[str, Any] = {"x": BATCH.x, "scales": BATCH.scales, "indices": BATCH.indices, "weights": BATCH.weights}
    with pytest.raises(xr.UsageError, match=complaint):
        alone.dispatch_send(**(good | {name: value}))
    assert alone.dispatch(**good).rows == TOKENS * TOP_K


@pytest.mark.parametrize("value", [EXPERTS, -2, 2**31 - 1])
def test_an_expert_that_there_is_not_is_named_with_its_token(alone: AllToAll, value: int) -> None:
    indices = BATCH.indices.copy()
    indices[3, 1] = value
    with pytest.raises(xr.UsageError, match=rf"token 3.*{value}"):
        alone.dispatch_send(BATCH.x, BATCH.scales, indices)
    assert alone.dispatch(BATCH.x, BATCH.scales, BATCH.indices).rows == TOKENS * TOP_K


def test_more_tokens_than_announced_are_refused(alone: AllToAll) -> None:
    more = draw(np.random.default_rng(1), TOKENS + 1, HIDDEN, EXPERTS, TOP_K, BLOCK)
    with pytest.raises(xr.UsageError, match="x has 9 tokens, max_tokens is 8"):
        alone.dispatch_send(more.x, more.scales, more.indices)
    got = alone.dispatch(more.x, more.scales, more.indices, num_tokens=TOKENS)
    assert got.rows == TOKENS * TOP_K


@pytest.mark.parametrize("given", [5, np.int32(5), np.array(5), np.array([5]), np.array([[5]], np.int32)])
def test_a_number_of_tokens_comes_in_any_array_that_holds_one(alone: AllToAll, given: Any) -> None:
    batch = draw(np.random.default_rng(1), TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK)
    assert alone.dispatch_send(batch.x, batch.scales, batch.indices, num_tokens=given).tokens == 5


def test_a_timeout_that_is_set_later_is_checked_as_at_first(alone: AllToAll) -> None:
    with pytest.raises(xr.UsageError, match="timeout_s must be a number, not None"):
        alone.timeout_s = None  # type: ignore[assignment]
    alone.timeout_s = 0.5
    assert alone.timeout_s == 0.5


def test_calls_out_of_order_are_refused(alone: AllToAll) -> None:
    got = alone.dispatch(BATCH.x, BATCH.scales, BATCH.indices)
    y = np.zeros((got.rows, HIDDEN), np.float32)
    with pytest.raises(xr.UsageError, match=r"dispatch_recv of round 1, which has had dispatch_recv"):
        alone.dispatch_recv(got.round)
    with pytest.raises(xr.UsageError, match=r"combine_recv of round 1, which has had dispatch_recv"):
        alone.combine_recv(got, BATCH.weights)
    with pytest.raises(xr.UsageError, match=r"y has shape \[15, 32\], must have \[16, 32\]"):
        alone.combine_send(y[:15], got)
    with pytest.raises(xr.UsageError, match="y is NoneType, must be an array"):
        alone.combine_send(None, got)
    alone.combine_send(y, got)
    with pytest.raises(xr.UsageError, match="weights is None"):
        alone.combine_recv(got)
    with pytest.raises(xr.UsageError, match="accumulate is set and out is None"):
        alone.combine_recv(got, BATCH.weights, accumulate=True)
    wrong: Any = 2
    out = np.zeros((TOKENS, HIDDEN), np.float32)
    with pytest.raises(xr.UsageError, match="accumulate is 2, must be True or False"):
        alone.combine_recv(got, BATCH.weights, out=out, accumulate=wrong)
    with pytest.raises(xr.UsageError, match=r"weights has 7 rows, the round has 8 tokens"):
        alone.combine_recv(got, BATCH.weights[:7])
    numpys: Any = np.True_
    assert not alone.combine_recv(got, BATCH.weights, out=out, accumulate=numpys).any()
    with pytest.raises(xr.UsageError, match=r"combine_recv of round 1, which has had combine_recv"):
        alone.combine_recv(got, BATCH.weights)


def test_what_is_no_round_is_refused(alone: AllToAll) -> None:
    got = alone.dispatch(BATCH.x, BATCH.scales, BATCH.indices)
    y = np.zeros((got.rows, HIDDEN), np.float32)
    calls: list[tuple[str, str, Callable[[Any], object]]] = [
        ("combine", "Dispatched", lambda given: alone.combine(y, given, BATCH.weights)),
        ("check_combine", "Dispatched", alone.check_combine),
        ("expert_output", "Dispatched", alone.expert_output),
        ("combine_send", "Dispatched", lambda given: alone.combine_send(y, given)),
        ("combine_recv", "Dispatched or Round", lambda given: alone.combine_recv(given, BATCH.weights)),
        ("dispatch_recv", "Round", alone.dispatch_recv),
        ("advance", "Round", alone.advance),
    ]
    for name, wanted, call in calls:
        with pytest.raises(xr.UsageError, match=f"^{name} was given NoneType, must be {wanted}$"):
            call(None)
    with pytest.raises(xr.UsageError, match="combine_send was given Round, must be Dispatched"):
        alone.combine_send(y, got.round)
    assert not alone.combine(y, got, BATCH.weights).any()


def test_a_round_of_another_one_is_refused_and_both_go_on(nothing_leaks: None) -> None:
    with Ranks(1, **CONFIG) as one, Ranks(1, **CONFIG) as two:
        mine, theirs = (part.dispatch(BATCH.x, BATCH.scales, BATCH.indices) for part in (one.parts[0], two.parts[0]))
        y = np.ones((mine.rows, HIDDEN), np.float32)
        for call in (
            lambda: one.parts[0].combine(y, theirs, BATCH.weights),
            lambda: one.parts[0].combine_send(y, theirs),
            lambda: one.parts[0].combine_recv(theirs, BATCH.weights),
            lambda: one.parts[0].advance(theirs.round),
        ):
            with pytest.raises(xr.UsageError, match=r"was given round 1 \(after dispatch_recv\) of another AllToAll"):
                call()
        for ranks, got in ((one, mine), (two, theirs)):
            assert ranks.parts[0].combine(y, got, BATCH.weights).all()


def test_a_round_is_shown_without_its_arrays(alone: AllToAll) -> None:
    alone.dispatch(BATCH.x, BATCH.scales, BATCH.indices)
    assert repr(alone.open_rounds) == f"(<Round 1 of {TOKENS} tokens, after dispatch_recv>,)"


def test_a_combine_that_is_refused_has_sent_nothing(alone: AllToAll) -> None:
    got = alone.dispatch(BATCH.x, BATCH.scales, BATCH.indices)
    y = np.zeros((got.rows, HIDDEN), np.float32)
    with pytest.raises(xr.UsageError, match="weights is"):
        alone.combine(y, got, BATCH.weights.astype(np.float64))
    with pytest.raises(xr.UsageError, match="out has shape"):
        alone.combine(y, got, BATCH.weights, out=np.zeros((1, HIDDEN), np.float32))
    out = np.ones((TOKENS, HIDDEN), np.float32)
    with pytest.raises(xr.UsageError, match="out begins at 0x"):
        alone.combine(y, got, BATCH.weights, out=misaligned(out))
    with pytest.raises(xr.UsageError, match="weights begins at 0x"):
        alone.combine(y, got, misaligned(BATCH.weights))
    with pytest.raises(xr.UsageError, match="y begins at 0x"):
        alone.combine(misaligned(y), got, BATCH.weights)
    out.flags.writeable = False
    with pytest.raises(xr.UsageError, match="out is read-only"):
        alone.combine(y, got, BATCH.weights, out=out)
    assert not alone.combine(y, got, BATCH.weights).any()
    with pytest.raises(xr.UsageError, match=r"combine_send of round 1, which has had combine_recv"):
        alone.combine(y, got, BATCH.weights)


@pytest.mark.parametrize("of_round_before", [False, True])
def test_sums_that_would_overwrite_what_ranks_still_read_are_refused(alone: AllToAll, of_round_before: bool) -> None:
    rounds = [alone.dispatch(BATCH.x, BATCH.scales, BATCH.indices) for _ in range(2)]
    before, got = rounds
    y = alone.expert_output(got)
    y[:] = 1
    there = alone.expert_output(before if of_round_before else got)

    with pytest.raises(xr.UsageError, match=r"^out lies in what expert_output\(\) gave"):
        alone.combine(y, got, BATCH.weights, out=there[-TOKENS:])

    expected = np.where(BATCH.indices < 0, 0, BATCH.weights).sum(1)
    given = alone.combine(y, got, BATCH.weights, out=np.empty((TOKENS, HIDDEN), np.float32))
    np.testing.assert_allclose(given, np.broadcast_to(expected[:, None], given.shape))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # that it has threads when it forks
def test_a_forked_child_is_told_that_it_is_one(alone: AllToAll) -> None:
    child = os.fork()
    if child == 0:
        try:
            alone.dispatch_send(BATCH.x, BATCH.scales, BATCH.indices)
        except Exception as error:
            os._exit(7 if "forked child" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_closed_part_is_refused_and_closing_again_does_nothing(alone: AllToAll) -> None:
    got = alone.dispatch(BATCH.x, BATCH.scales, BATCH.indices)
    before = got.x.copy()
    alone.close()
    alone.close()
    assert np.array_equal(got.x, before)
    with pytest.raises(xr.UsageError, match="this AllToAll is closed"):
        alone.dispatch_send(BATCH.x, BATCH.scales, BATCH.indices)


@pytest.mark.parametrize("layout", ["grouped", "masked"])
def test_room_for_the_worst_case_may_be_more_than_there_is_memory(engine: xr.Engine, layout: str) -> None:
    tokens = 4 << 20
    plain: dict[str, Any] = {"dtype": "float32", "scale_block": None, "out_dtype": "float32", "layout": layout}
    with (
        EngineGroup(engine, [engine.address]) as group,
        AllToAll(engine, group, experts=16, hidden=4096, top_k=8, max_tokens=tokens, **plain) as all_to_all,
    ):
        assert max(all_to_all.config.output_rows) * 4096 * 4 > 256 << 30
        got = all_to_all.dispatch(np.ones((1, 4096), np.float32), None, np.arange(8)[None])
        assert got.rows >= 8 and got.x[got.offsets[7]].all()


def test_experts_named_twice_are_told_from_too_little_capacity(engine: xr.Engine) -> None:
    twice = np.zeros((TOKENS, TOP_K), np.int64)
    x = draw(np.random.default_rng(1), TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK)
    fits_once: dict[str, Any] = {"experts": TOP_K, "layout": "masked"}
    for options, remedy in ((fits_once, "names one twice"), ({"capacity_factor": 0.1}, "larger capacity_factor")):
        with (
            EngineGroup(engine, [engine.address]) as group,
            AllToAll(engine, group, **(CONFIG | options)) as all_to_all,
            pytest.raises(CapacityExceeded, match=remedy),
        ):
            all_to_all.dispatch(x.x, x.scales, twice)
