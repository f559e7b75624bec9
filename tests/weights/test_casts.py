"""Casts round to the nearest, ties to even: compared with exact arithmetic on the neighbours."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import crossrail as xr
from crossrail.weights.conversion.casts import Caster, check_cast, storage
from tests.support.seeds import Seed


def widened(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(values: npt.NDArray[np.generic], source: str = "float32") -> npt.NDArray[np.uint16]:
    out = np.empty(values.shape, np.uint16)
    Caster().cast(values, source, out, "bfloat16")
    return out


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_float32_becomes_the_nearest_bfloat16(value: float) -> None:
    (code,) = to_bfloat16(np.array([value], np.float32)).tolist()
    down = np.array([value], np.float32).view(np.uint32)[0] >> 16
    around = [int(down), int(down) + 1]
    exact = [float(widened(np.array([each], np.uint16))[0]) for each in around]
    # What would be infinite counts as the number that the format would have there.
    exact = [2.0**128 * math.copysign(1, value) if math.isinf(each) else each for each in exact]
    best = min((abs(each - value), at & 1, at) for each, at in zip(exact, around, strict=True))
    assert code == best[2]


def test_all_of_bfloat16_survives_both_ways() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = np.empty(bits.shape, np.float32)
    Caster().cast(bits, "bfloat16", wide, "float32")
    assert np.array_equal(wide.view(np.uint32), bits.astype(np.uint32) << 16)
    back = to_bfloat16(wide)
    is_nan = np.isnan(wide)
    assert np.array_equal(back[~is_nan], bits[~is_nan])
    assert np.isnan(widened(back[is_nan])).all()


def test_nan_whose_bits_are_all_cut_off_stays_nan() -> None:
    assert np.isnan(widened(to_bfloat16(np.array([0x7F800001, 0xFF800001], np.uint32).view(np.float32)))).all()


@pytest.mark.parametrize("shape", [(), (7,), (300_001,), (3, 200_000), (700, 600), (2, 3, 70_000)])
def test_shapes_longer_than_a_piece(shape: tuple[int, ...], seed: Seed) -> None:
    values = np.asarray(seed.rng().standard_normal(shape), np.float32)
    whole = to_bfloat16(values)
    one_by_one = to_bfloat16(values.reshape(-1)[:1000].copy())
    assert np.array_equal(whole.reshape(-1)[:1000], one_by_one)
    assert np.abs(widened(whole.reshape(-1)) - values.reshape(-1)).max() <= np.abs(values).max() * 2.0**-8


def test_strided_views(seed: Seed) -> None:
    values = seed.rng().standard_normal((900, 500)).astype(np.float32)
    out = np.zeros((450, 1000), np.uint16)
    Caster().cast(values.T[10:460, ::2], "float32", out[:, 100:550], "bfloat16")
    assert np.array_equal(out[:, 100:550], to_bfloat16(np.ascontiguousarray(values.T[10:460, ::2])))
    assert not out[:, :100].any() and not out[:, 550:].any()


@pytest.mark.parametrize(
    ("source", "target"), [("float16", "float32"), ("float64", "float16"), ("bfloat16", "float16")]
)
def test_other_floats_as_numpy_does_it(source: str, target: str, seed: Seed) -> None:
    plain = seed.rng().standard_normal(1000).astype(np.float32)
    values = to_bfloat16(plain) if source == "bfloat16" else plain.astype(source)
    out = np.empty(1000, storage(target))
    Caster().cast(values, source, out, target)
    assert np.array_equal(out, (widened(values) if source == "bfloat16" else values).astype(target))


def test_equal_types_are_copied_bit_by_bit() -> None:
    bits = np.array([0x7FC1, 0xFFFF, 0x8000], np.uint16)
    out = np.zeros(3, np.uint16)
    Caster().cast(bits, "bfloat16", out, "bfloat16")
    assert np.array_equal(out, bits)


@pytest.mark.parametrize(
    ("source", "target"), [("int32", "float32"), ("float32", "float8_e4m3fn"), ("float8_e4m3fn", "bfloat16")]
)
def test_what_is_not_cast_is_refused_by_name(source: str, target: str) -> None:
    with pytest.raises(xr.UsageError, match=f"model.w: {source} does not become {target}"):
        check_cast(source, target, "model.w")
    check_cast(source, source, "model.w")
