"""torch casts and quantises as numpy does, to the bit: the same code that runs on a GPU, here on the CPU."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import crossrail as xr
from crossrail.weights.conversion import torch_casts
from crossrail.weights.conversion.casts import Caster, storage
from crossrail.weights.conversion.float8 import BlockQuantiser, blocks
from crossrail.weights.conversion.torch_casts import Checks, cast, quantise
from crossrail.weights.errors import NotFinite
from tests.support.seeds import Seed

Array = npt.NDArray[Any]
FLOATS = ("float64", "float32", "float16", "bfloat16")
# Of these numpy and processors say which bits a NaN has; of the others only that it is one.
EXACT_NAN = {("float32", "bfloat16"), ("bfloat16", "float32")}


def as_torch(array: Array, dtype: str) -> torch.Tensor:
    signed = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[array.itemsize]
    return torch.from_numpy(array.view(signed)).view(getattr(torch, dtype))


def by_both(values: Array, source: str, target: str) -> tuple[Array, Array]:
    """What numpy and what torch make of it, as bits."""
    ours, theirs = np.empty(values.shape, storage(target)), np.empty(values.shape, storage(target))
    Caster().cast(values, source, ours, target)
    cast(as_torch(values, source), as_torch(theirs, target))
    bits = f"u{theirs.itemsize}"
    return ours.view(bits), theirs.view(bits)


def assert_same(values: Array, source: str, target: str) -> None:
    ours, theirs = by_both(values, source, target)
    if (source, target) not in EXACT_NAN and source != target:
        is_nan = [torch.isnan(as_torch(bits.view(storage(target)), target)).numpy() for bits in (ours, theirs)]
        assert np.array_equal(*is_nan)
        ours, theirs = ours[~is_nan[0]], theirs[~is_nan[0]]
    assert np.array_equal(ours, theirs)


def any_bits(rng: np.random.Generator, dtype: str, count: int) -> Array:
    """All kinds of numbers: also infinities, NaN, subnormal ones, and those halfway between two of a narrower type."""
    kind = storage(dtype)
    bits = rng.integers(0, 256, count * kind.itemsize, np.uint8).view(f"u{kind.itemsize}")
    bits[::3] &= ~bits.dtype.type(0) << bits.dtype.type(rng.integers(1, 8 * kind.itemsize // 2))
    values = bits.view(kind)
    if dtype == "float64":  # most of them are beyond the other types
        values[1::2] = rng.standard_normal(len(values[1::2])) * 2.0 ** rng.integers(-160, 130, len(values[1::2]))
        with np.errstate(over="ignore", invalid="ignore"):
            values[2::4] = values[2::4].astype(np.float32)
    return values


@pytest.mark.parametrize(("source", "target"), list(product(FLOATS, FLOATS)))
def test_casts_of_any_bits(source: str, target: str, seed: Seed) -> None:
    assert_same(any_bits(seed.rng(), source, 60_000), source, target)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8", "uint8", "bool"])
def test_equal_types_are_copied_bit_by_bit(dtype: str, seed: Seed) -> None:
    kind = storage(dtype)
    assert_same(seed.rng().integers(0, 2, 100 * kind.itemsize, np.uint8).view(kind), dtype, dtype)


def test_float64_is_rounded_to_float16_once() -> None:
    """By way of float32, which rounds them to the middle between two, they would be rounded up."""
    halves = np.arange(1, 1 << 15, 37, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    middles = (halves.astype(np.float64) + np.nextafter(halves, np.float16(np.inf)).astype(np.float64)) / 2
    middles = middles[np.isfinite(middles)]
    for nudge in (-(2.0**-40), 0.0, 2.0**-40):
        for sign in (1, -1):
            assert_same(sign * middles * (1 + nudge), "float64", "float16")


@given(st.lists(st.floats(width=32), min_size=1, max_size=30))
def test_any_floats_to_bfloat16(values: list[float]) -> None:
    assert_same(np.array(values, np.float32), "float32", "bfloat16")


def test_strided_views_and_pieces(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_casts, "_PIECE_ELEMENTS", 1000)
    values = seed.rng().standard_normal((90, 3, 50)).astype(np.float32)
    for shown in (values[10:, :, 3:40], values[:, 1], values[5:6], values[:, :, 7], values[0, 0]):
        out = np.zeros((100, 200), np.uint16)
        strided = np.lib.stride_tricks.as_strided(out, shown.shape, [2 * 199, 2 * 53, 2][3 - shown.ndim :])
        cast(torch.from_numpy(shown), as_torch(strided, "bfloat16"))
        wanted = np.zeros((100, 200), np.uint16)
        Caster().cast(
            shown, "float32", np.lib.stride_tricks.as_strided(wanted, shown.shape, strided.strides), "bfloat16"
        )
        assert np.array_equal(out, wanted)


def quantised(values: Array, block: tuple[int, int]) -> tuple[Array, Array]:
    """By torch."""
    source = "bfloat16" if values.dtype == np.uint16 else "float32"
    out = np.full(values.shape, 0xEE, np.uint8)
    scales = np.full((blocks(values.shape[0], block[0]), blocks(values.shape[1], block[1])), np.nan, np.float32)
    checks = Checks()
    quantise(as_torch(values, source), torch.from_numpy(out), torch.from_numpy(scales), "w", block, checks)
    checks.finish()
    return out, scales


def assert_quantised_alike(values: Array, block: tuple[int, int]) -> None:
    out, scales = quantised(values, block)
    wanted, wanted_scales = np.empty_like(out), np.empty_like(scales)
    BlockQuantiser().quantise(values, wanted, wanted_scales, "w", block)
    assert np.array_equal(scales, wanted_scales)
    assert np.array_equal(out, wanted)


@pytest.mark.parametrize("block", [(128, 128), (1, 128), (64, 32), (200, 200), (1, 1), (3, 7)])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 128), (130, 127), (127, 257), (1, 300), (256, 384)])
def test_quantised_as_numpy_does(rows: int, columns: int, block: tuple[int, int], seed: Seed) -> None:
    rng = seed.rng()
    for exponent in (-130, -20, 0, 100):
        spread = 2.0 ** rng.uniform(-12, 0, (rows, columns))
        values = (rng.standard_normal((rows, columns)) * spread * 2.0**exponent).astype(np.float32)
        assert_quantised_alike(values, block)
        assert_quantised_alike((values.view(np.uint32) >> 16).astype(np.uint16), block)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_any_finite_row_quantised(row: list[float]) -> None:
    assert_quantised_alike(np.array([row], np.float32), (128, 128))


def test_quantised_in_pieces_and_from_strided_views(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_casts, "_PIECE_ELEMENTS", 20_000)
    whole = seed.rng().standard_normal((700, 400)).astype(np.float32)
    assert_quantised_alike(whole, (128, 128))
    assert_quantised_alike(whole[3:400, 7:140], (32, 64))
    assert_quantised_alike(whole.T[5:, 9:], (128, 128))


@pytest.mark.parametrize("block", [(700, 400), (1000, 1000), (128, 128), (300, 7), (1, 400), (700, 1)], ids=str)
def test_no_more_than_a_piece_is_widened_at_once(
    seed: Seed, monkeypatch: pytest.MonkeyPatch, block: tuple[int, int]
) -> None:
    values = seed.rng().standard_normal((700, 400)).astype(np.float32)
    wanted = quantised(values, block)
    sizes = []

    def spied(some: Any) -> Any:
        sizes.append(some.numel())
        return widened(some)

    widened = torch_casts._float32
    monkeypatch.setattr(torch_casts, "_float32", spied)
    monkeypatch.setattr(torch_casts, "_PIECE_ELEMENTS", 17_000)
    out, scales = quantised(values, block)
    assert np.array_equal(out, wanted[0]) and np.array_equal(scales, wanted[1])
    assert max(sizes) <= 17_000
    values[699, 399] = np.nan
    with pytest.raises(NotFinite, match=r"^w\[699, 399\] is nan"):
        quantised(values, block)


def test_leading_dimensions_count_matrices(seed: Seed) -> None:
    values = seed.rng().standard_normal((2, 3, 130, 40)).astype(np.float32)
    out, scales = torch.zeros(values.shape, dtype=torch.uint8), torch.zeros(2, 3, 2, 1)
    quantise(torch.from_numpy(values), out, scales, "w", (1, 1, 128, 128), Checks())
    for index in np.ndindex(2, 3):
        one, one_scales = quantised(values[index], (128, 128))
        assert np.array_equal(out[index].numpy(), one) and np.array_equal(scales[index].numpy(), one_scales)
    with pytest.raises(xr.UsageError, match=r"w: scales \(2, 3, 2, 1\) for values \(2, 2, 130, 40\)"):
        quantise(torch.from_numpy(values[:, :2]), out[:, :2], scales, "w", (1, 1, 128, 128), Checks())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_not_finite_is_refused_as_numpy_refuses_it(bad: float, dtype: str) -> None:
    values = np.ones((300, 400), np.float32)
    values[200, 333] = values[200, 334] = values[290, 2] = bad
    if dtype == "bfloat16":
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    told = []
    for by in (lambda: quantised(values, (128, 128)), lambda: assert_quantised_by_numpy(values)):
        with pytest.raises(NotFinite, match=r"^w\[200, 333\] is") as raised:
            by()
        told.append((str(raised.value), raised.value.index))
    assert told[0] == told[1]


def assert_quantised_by_numpy(values: Array) -> None:
    BlockQuantiser().quantise(values, np.empty(values.shape, np.uint8), np.empty((3, 4), np.float32), "w")


def test_first_matrix_that_is_not_finite_is_named() -> None:
    checks = Checks()
    for number in range(4):
        values = torch.ones(5, 5)
        values[1, number] = torch.inf if number > 1 else 1.0
        quantise(values, torch.zeros(5, 5, dtype=torch.uint8), torch.zeros(1, 1), f"w{number}", (128, 128), checks)
    with pytest.raises(NotFinite, match=r"^w2\[1, 2\] is inf"):
        checks.finish()
    checks.finish()
