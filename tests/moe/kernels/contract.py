"""What every implementation of Kernels does: one set of cases, run by the test module of each on its own arrays.

Oracles are loops over definitions in numpy. Data is random but for where integers make sums exact whatever the order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from crossrail.errors import UsageError
from crossrail.moe.kernels import Kernels
from tests.moe.kernels import numbers
from tests.moe.kernels.numbers import TYPES, Array, Floats, decoded, encoded
from tests.support.seeds import Seed

Ints = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Subject:
    """An implementation, and how its arrays are made of numpy's (bfloat16 as uint16) and looked at. `exhaustive`: it is
    fast enough for all numbers there are."""

    kernels: Kernels
    array: Callable[[Array], Any]
    numpy: Callable[[Any], Array]
    exhaustive: bool = True


def counted(subject: Subject, indices: Array, experts: int) -> tuple[Array, Array]:
    counts = subject.array(np.full(experts, -7, np.int32))
    slots = subject.array(np.full(indices.shape, -7, np.int32))
    subject.kernels.count(subject.array(indices), experts, counts, slots)
    return subject.numpy(counts), subject.numpy(slots)


def summed(
    subject: Subject,
    out: Array,
    sources: list[Array],
    where: Ints,
    weights: Floats | None,
    accumulate: bool = False,
) -> Array:
    result = subject.array(out)
    factors = None if weights is None else subject.array(weights)
    subject.kernels.reduce(result, [subject.array(s) for s in sources], subject.array(where), factors, accumulate)
    return subject.numpy(result)


def sum_by_definition(
    out: Array, sources: list[Array], where: Ints, weights: Floats | None, accumulate: bool, dtype: str, out_dtype: str
) -> Array:
    total = decoded(out, out_dtype) if accumulate else np.zeros(out.shape, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for t, k in np.ndindex(where.shape[:2]):
            source, row = where[t, k]
            if row != -1:
                weight = np.float32(1) if weights is None else weights[t, k]
                total[t] = total[t] + weight * decoded(sources[source][row], dtype)
    return encoded(total, out_dtype)


def places(rng: np.random.Generator, tokens: int, top_k: int, sources: int, rows: int) -> Ints:
    """Random terms, some of them missing."""
    where = np.stack([rng.integers(0, sources, (tokens, top_k)), rng.integers(-1, rows, (tokens, top_k))], axis=-1)
    return where.astype(np.int32)


class Counting:
    @pytest.mark.parametrize("dtype", [np.int32, np.int64])
    @pytest.mark.parametrize(("tokens", "top_k", "experts"), [(13, 4, 6), (1, 1, 1), (0, 8, 16), (40, 3, 2)])
    def test_slots_count_earlier_routes_of_the_expert(
        self, subject: Subject, seed: Seed, tokens: int, top_k: int, experts: int, dtype: type
    ) -> None:
        indices = seed.rng().integers(-1, experts, (tokens, top_k)).astype(dtype)
        counts, slots = counted(subject, indices, experts)
        routes = indices.ravel().tolist()
        wanted = [-1 if expert < 0 else routes[:i].count(expert) for i, expert in enumerate(routes)]
        assert slots.ravel().tolist() == wanted
        assert counts.tolist() == [routes.count(expert) for expert in range(experts)]

    def test_all_tokens_to_one_expert(self, subject: Subject) -> None:
        counts, slots = counted(subject, np.full((9, 4), 2, np.int32), 5)
        assert counts.tolist() == [0, 0, 36, 0, 0] and slots.ravel().tolist() == list(range(36))

    @pytest.mark.parametrize("value", [-2, 6, 2**31 - 1, -(2**31)])
    def test_index_that_is_no_expert_refused_with_its_token(self, subject: Subject, value: int) -> None:
        indices = np.zeros((5, 3), np.int32)
        indices[3, 1] = value
        counts, slots = subject.array(np.full(6, 9, np.int32)), subject.array(np.full((5, 3), 9, np.int32))
        with pytest.raises(UsageError, match=f"token 3, k 1 goes to expert {value}, must be in \\[0, 6\\)"):
            subject.kernels.count(subject.array(indices), 6, counts, slots)
        assert np.all(subject.numpy(counts) == 9) and np.all(subject.numpy(slots) == 9)

    def test_arrays_that_do_not_belong_together_refused(self, subject: Subject) -> None:
        indices, counts, slots = np.zeros((5, 3), np.int32), np.zeros(6, np.int32), np.zeros((5, 3), np.int32)
        for bad in (
            (indices.astype(np.float32), 6, counts, slots),
            (indices, 7, counts, slots),
            (indices, 6, counts, slots[:4]),
            (indices, 6, counts, slots.astype(np.int64)),
            (indices.ravel(), 6, counts, slots),
        ):
            with pytest.raises(UsageError):
                subject.kernels.count(*(subject.array(a) if isinstance(a, np.ndarray) else a for a in bad))


class Moving:
    # x bytes, scale bytes, stride
    SIZES = [(32, 8, 48), (32, 0, 32), (7, 4, 16), (512, 16, 528), (1, 0, 16)]

    @pytest.mark.parametrize(("width", "extra", "stride"), SIZES)
    def test_packed_rows_are_x_scales_and_zeros(
        self, subject: Subject, seed: Seed, width: int, extra: int, stride: int
    ) -> None:
        rng = seed.rng()
        x = rng.integers(0, 256, (6, width)).astype(np.uint8)
        scales = rng.standard_normal((6, extra // 4)).astype(np.float32) if extra else None
        for table in (rng.integers(0, 6, 11).astype(np.int32), np.zeros(0, np.int32), None):
            target = subject.array(np.full((12, stride), 0xEE, np.uint8))
            subject.kernels.pack(
                target,
                subject.array(x),
                None if scales is None else subject.array(scales),
                None if table is None else subject.array(table),
            )
            rows = range(6) if table is None else table.tolist()
            wanted = np.full((12, stride), 0xEE, np.uint8)
            for i, row in enumerate(rows):
                content = x[row].tobytes() + (b"" if scales is None else scales[row].tobytes())
                wanted[i] = np.frombuffer(content.ljust(stride, b"\0"), np.uint8)
            assert np.array_equal(subject.numpy(target), wanted)

    @pytest.mark.parametrize(("width", "extra", "stride"), SIZES)
    def test_pulled_rows_are_taken_apart_and_others_left(
        self, subject: Subject, seed: Seed, width: int, extra: int, stride: int
    ) -> None:
        rng = seed.rng()
        source = rng.integers(0, 256, (7, stride)).astype(np.uint8)
        table = np.stack([rng.integers(0, 7, 9), rng.permutation(12)[:9]], axis=-1).astype(np.int32)
        x = subject.array(np.full((12, width), 0xEE, np.uint8))
        scales = subject.array(np.full((12, extra), 0xEE, np.uint8)) if extra else None
        subject.kernels.pull(x, scales, subject.array(source), subject.array(table))
        wanted = np.full((12, width + extra), 0xEE, np.uint8)
        for row, output in table:
            wanted[output] = source[row, : width + extra]
        assert np.array_equal(subject.numpy(x), wanted[:, :width])
        assert scales is None or np.array_equal(subject.numpy(scales), wanted[:, width:])

    def test_what_was_packed_is_pulled_as_it_was_whatever_its_type(self, subject: Subject, seed: Seed) -> None:
        x = seed.rng().standard_normal((5, 24)).astype(np.float32)
        scales = seed.rng(1).standard_normal((5, 3)).astype(np.float32)
        target = subject.array(np.zeros((5, 112), np.uint8))
        subject.kernels.pack(target, subject.array(x), subject.array(scales), None)
        back, back_scales = subject.array(np.zeros_like(x)), subject.array(np.zeros_like(scales))
        order = seed.rng(2).permutation(5)
        table = np.stack([order, order], axis=-1).astype(np.int32)
        subject.kernels.pull(back, back_scales, target, subject.array(table))
        assert np.array_equal(subject.numpy(back), x) and np.array_equal(subject.numpy(back_scales), scales)

    @pytest.mark.parametrize("row", [-1, 6, 2**31 - 1, -(2**31)])
    def test_table_of_a_row_that_is_not_there_refused_before_anything_moved(self, subject: Subject, row: int) -> None:
        x, target = subject.array(np.ones((6, 16), np.uint8)), subject.array(np.full((6, 16), 0xEE, np.uint8))
        with pytest.raises(UsageError, match=rf"table\[2\] is row {row}, must be in \[0, 6\)"):
            subject.kernels.pack(target, x, None, subject.array(np.array([0, 1, row], np.int32)))
        for column, side in ((0, "from"), (1, "to")):
            table = np.array([[0, 0], [1, 1], [2, 2]], np.int32)
            table[2, column] = row
            with pytest.raises(UsageError, match=rf"table \({side}\)\[2\] is row {row}, must be in \[0, 6\)"):
                subject.kernels.pull(target, None, x, subject.array(table))
        assert np.all(subject.numpy(target) == 0xEE)

    def test_arrays_that_do_not_belong_together_refused(self, subject: Subject) -> None:
        array, kernels = subject.array, subject.kernels
        x, scales = array(np.zeros((4, 16), np.uint8)), array(np.zeros((4, 2), np.float32))
        rows, table = array(np.zeros((4, 32), np.uint8)), array(np.zeros((1, 2), np.int32))
        short, few = array(np.zeros((4, 16), np.uint8)), array(np.zeros((3, 2), np.float32))
        for refused in (
            lambda: kernels.pack(short, x, scales, None),
            lambda: kernels.pack(rows, x, few, None),
            lambda: kernels.pack(array(np.zeros((3, 32), np.uint8)), x, scales, None),
            lambda: kernels.pack(rows, x, scales, array(np.zeros(3, np.int64))),
            lambda: kernels.pull(x, scales, short, table),
            lambda: kernels.pull(x, few, rows, table),
            lambda: kernels.pull(x, scales, rows, array(np.zeros((1, 3), np.int32))),
            lambda: kernels.pull(x, scales, rows, array(np.zeros((1, 2), np.int64))),
        ):
            with pytest.raises(UsageError):
                refused()


class Reducing:
    @pytest.mark.parametrize("accumulate", [False, True])
    @pytest.mark.parametrize("out_dtype", TYPES)
    @pytest.mark.parametrize("dtype", TYPES)
    def test_integers_are_summed_exactly(
        self, subject: Subject, seed: Seed, dtype: str, out_dtype: str, accumulate: bool
    ) -> None:
        rng = seed.rng()
        sources = [encoded(rng.integers(-8, 9, (rows, 40)).astype(np.float32), dtype) for rows in (6, 3)]
        weights = rng.integers(-2, 3, (5, 4)).astype(np.float32)
        out = encoded(rng.integers(-8, 9, (5, 40)).astype(np.float32), out_dtype)
        where = places(rng, 5, 4, 2, 3)
        exact = decoded(out, out_dtype).astype(np.int64) if accumulate else np.zeros(out.shape, np.int64)
        for t, k in np.ndindex(5, 4):
            source, row = where[t, k]
            if row >= 0:
                exact[t] += int(weights[t, k]) * decoded(sources[source][row], dtype).astype(np.int64)
        found = summed(subject, out, sources, where, weights, accumulate)
        assert np.array_equal(decoded(found, out_dtype), exact)

    @pytest.mark.parametrize("hidden", [1, 7, 16, 31, 64, 257])
    @pytest.mark.parametrize("dtype", TYPES)
    def test_any_numbers_are_summed_bit_by_bit_as_said(
        self, subject: Subject, seed: Seed, dtype: str, hidden: int
    ) -> None:
        rng = seed.rng()

        def spread(shape: tuple[int, ...]) -> Array:
            return (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(np.float32)

        sources = [encoded(spread((4, hidden)), dtype) for _ in range(3)]
        out, weights, where = encoded(spread((6, hidden)), dtype), spread((6, 5)), places(rng, 6, 5, 3, 4)
        for factors in (weights, None):
            for accumulate in (False, True):
                wanted = sum_by_definition(out, sources, where, factors, accumulate, dtype, dtype)
                assert numbers.same(summed(subject, out, sources, where, factors, accumulate), wanted, dtype)

    def test_terms_are_added_from_the_first_k_on(self, subject: Subject) -> None:
        rows = np.array([[1e8], [-1e8], [1]], np.float32)  # 1e8 + 1 is 1e8 in float32
        where = np.array([[[0, 0], [0, 1], [0, 2]], [[0, 2], [0, 0], [0, 1]]], np.int32)
        assert summed(subject, np.zeros((2, 1), np.float32), [rows], where, None).tolist() == [[1], [0]]

    def test_tokens_without_terms_are_zero_or_stay(self, subject: Subject) -> None:
        where, out = np.full((2, 3, 2), -1, np.int32), np.full((2, 5), 3, np.float32)
        rows, weights = np.full((1, 5), np.nan, np.float32), np.ones((2, 3), np.float32)
        assert np.all(summed(subject, out, [rows], where, weights) == 0)
        assert np.all(summed(subject, out, [rows], where, weights, accumulate=True) == 3)

    def test_no_token_and_no_source(self, subject: Subject) -> None:
        assert summed(subject, np.zeros((0, 8), np.float32), [], np.zeros((0, 2, 2), np.int32), None).shape == (0, 8)

    @pytest.mark.parametrize("out_dtype", ["float16", "bfloat16"])
    def test_sums_are_rounded_to_nearest_with_ties_to_even(self, subject: Subject, out_dtype: str) -> None:
        values = numbers.telling_values(out_dtype)
        values = values if subject.exhaustive else values[:: len(values) // 4000]
        found = summed(subject, np.zeros((1, len(values)), TYPES[out_dtype]), [values[None]], ONE, None)
        assert numbers.same(found[0], encoded(values + np.float32(0), out_dtype), out_dtype)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_all_numbers_of_two_bytes_are_read_as_they_are(self, subject: Subject, dtype: str) -> None:
        codes = np.arange(2**16, dtype=np.uint16)[:: 1 if subject.exhaustive else 17].view(TYPES[dtype])
        found = summed(subject, np.zeros((1, len(codes)), np.float32), [codes[None]], ONE, None)
        with np.errstate(invalid="ignore"):  # signalling NaNs
            wanted = decoded(codes, dtype) + np.float32(0)
        assert numbers.same(found[0], wanted, "float32")

    def test_partial_sums_of_two_nodes_add_up(self, subject: Subject, seed: Seed) -> None:
        """What each node sums for another is a row of float32, and the origin adds up rows without weights."""
        rng = seed.rng()
        y = encoded(rng.integers(-8, 9, (8, 32)).astype(np.float32), "bfloat16")
        weights, where = rng.integers(-2, 3, (4, 6)).astype(np.float32), places(rng, 4, 6, 1, 8)
        halves = [where.copy(), where.copy()]  # rows 0 .. 3 are one node's, rows 4 .. 7 the other's
        halves[0][where[..., 1] >= 4] = -1
        halves[1][where[..., 1] < 4] = -1
        partial = [summed(subject, np.zeros((4, 32), np.float32), [y], half, weights) for half in halves]
        both = np.stack([np.stack([np.full(4, s), np.arange(4)], axis=-1) for s in range(2)], axis=1).astype(np.int32)
        found = summed(subject, np.zeros((4, 32), np.uint16), partial, both, None)
        assert np.array_equal(found, summed(subject, np.zeros((4, 32), np.uint16), [y], where, weights))

    @pytest.mark.parametrize("place", [(0, 4), (0, -2), (2, 0), (-1, 0), (1, 2**31 - 1), (2**31 - 1, 0)])
    def test_row_that_is_not_there_refused_before_anything_is_written(
        self, subject: Subject, place: tuple[int, int]
    ) -> None:
        where = np.zeros((3, 2, 2), np.int32)
        where[2, 1] = place
        out, rows = subject.array(np.full((3, 8), 9, np.float32)), subject.array(np.ones((4, 8), np.float32))
        with pytest.raises(UsageError, match=r"where\[2, 1\]"):
            subject.kernels.reduce(out, [rows, rows], subject.array(where), None)
        assert np.all(subject.numpy(out) == 9)

    def test_arrays_that_do_not_belong_together_refused(self, subject: Subject) -> None:
        array = subject.array
        out, rows, weights = np.zeros((3, 8), np.float32), np.zeros((4, 8), np.float32), np.zeros((3, 2), np.float32)
        where = np.zeros((3, 2, 2), np.int32)
        for bad in (
            (out, [rows[:, :7].copy()], where, weights),
            (out, [rows, rows.astype(np.float16)], where, weights),
            (out.astype(np.int32), [rows], where, weights),
            (out, [rows.astype(np.int32)], where, weights),
            (out, [rows], where[:2], weights),
            (out, [rows], where.astype(np.int64), weights),
            (out, [rows], where, weights[:, :1].copy()),
            (out, [rows], where, weights.astype(np.float64)),
        ):
            with pytest.raises(UsageError):
                subject.kernels.reduce(array(bad[0]), [array(s) for s in bad[1]], array(bad[2]), array(bad[3]))


ONE = np.zeros((1, 1, 2), np.int32)  # one token, one term: row 0 of source 0


class Quantizing:
    @pytest.mark.parametrize(("hidden", "block"), [(256, 128), (200, 128), (96, 32), (5, 128), (7, 1)])
    @pytest.mark.parametrize("dtype", TYPES)
    def test_codes_and_scales_are_as_defined(
        self, subject: Subject, seed: Seed, dtype: str, hidden: int, block: int
    ) -> None:
        rng = seed.rng()
        x = encoded((rng.standard_normal((4, hidden)) * 10.0 ** rng.integers(-8, 4, (4, 1))).astype(np.float32), dtype)
        x[3, : hidden // 2] = 0
        codes, scales = map(subject.numpy, subject.kernels.quantize(subject.array(x), block))
        values = decoded(x, dtype)
        for begin in range(0, hidden, block):
            part = values[:, begin : begin + block]
            magnitude = np.maximum(np.abs(part).max(axis=1), np.float32(1e-4))
            assert np.array_equal(scales[:, begin // block], magnitude / np.float32(448))
            scaled = part * (np.float32(448) / magnitude)[:, None]
            assert np.array_equal(codes[:, begin : begin + block], numbers.e4m3(scaled))

    def test_all_there_is_to_round_to_eight_bits(self, subject: Subject) -> None:
        values = numbers.telling_values("float8_e4m3fn")
        values = values[np.abs(values) <= 448]
        x = np.append(values, np.float32(448))[None]  # one block, whose largest makes the scale 1
        codes, scales = map(subject.numpy, subject.kernels.quantize(subject.array(x), x.size))
        assert np.all(scales == 1)
        assert np.array_equal(codes, numbers.e4m3(x))

    def test_block_with_an_infinity_or_nan_has_it_for_scale_and_others_are_untouched(self, subject: Subject) -> None:
        x = np.ones((3, 24), np.float32)
        x[1, 9], x[2, 17] = np.inf, np.nan
        codes, scales = map(subject.numpy, subject.kernels.quantize(subject.array(x), 8))
        assert np.array_equal(np.isfinite(scales), [[True] * 3, [True, False, True], [True, True, False]])
        assert scales[1, 1] == np.inf and np.isnan(scales[2, 2])
        assert codes[1, 9] & 0x7F == 0x7F and codes[2, 17] & 0x7F == 0x7F
        assert np.all(codes[0] == 0x7E) and np.all(codes[1, 10:16] == 0)

    @pytest.mark.parametrize("dtype", TYPES)
    def test_all_codes_mean_what_the_format_says(self, subject: Subject, dtype: str) -> None:
        codes = np.arange(256, dtype=np.uint8)[None].repeat(2, axis=0)
        scales = np.array([[1, 2, 0.5, 3.3], [1e-3, 1e-30, 1e30, 7]], np.float32)
        found = subject.numpy(subject.kernels.dequantize(subject.array(codes), subject.array(scales), 64, dtype))
        with np.errstate(over="ignore"):
            wanted = encoded(numbers.e4m3_decoded(codes) * scales.repeat(64, axis=1), dtype)
        assert numbers.same(found, wanted, dtype)

    def test_arrays_that_do_not_belong_together_refused(self, subject: Subject) -> None:
        array, kernels = subject.array, subject.kernels
        x, codes = array(np.zeros((2, 8), np.float32)), array(np.zeros((2, 8), np.uint8))
        scales = array(np.ones((2, 2), np.float32))
        for refused in (
            lambda: kernels.quantize(x, 0),
            lambda: kernels.quantize(codes, 4),
            lambda: kernels.quantize(array(np.zeros(8, np.float32)), 4),
            lambda: kernels.dequantize(codes, scales, 8),
            lambda: kernels.dequantize(codes, scales, 0),
            lambda: kernels.dequantize(codes, scales, 4, "int8"),
            lambda: kernels.dequantize(x, scales, 4),
        ):
            with pytest.raises(UsageError):
                refused()


class KernelsContract(Counting, Moving, Reducing, Quantizing):
    """Subclass it as Test..., with a fixture `subject`."""
