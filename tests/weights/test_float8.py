"""Quantisation is exact: each element is the nearest e4m3 to value / scale, by a definition that shares no code."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import crossrail as xr
from crossrail.weights.conversion import float8
from crossrail.weights.conversion.float8 import BLOCK, BlockQuantiser, blocks
from crossrail.weights.errors import NotFinite
from tests.support.seeds import Seed
from tests.weights.float8_values import decoded

Floats = npt.NDArray[np.float32]


def magnitude(code: int) -> float:
    """Of an e4m3 code without its sign, by the format's definition."""
    exponent, fraction = code >> 3, code & 7
    return fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)


MAGNITUDES = [magnitude(code) for code in range(127)]  # the 127th is NaN


EVEN_FIRST = np.array([*range(0, 127, 2), *range(1, 127, 2)])


def nearest(values: Floats) -> npt.NDArray[np.uint8]:
    """Codes of the nearest e4m3; of two that are equally near, the even one."""
    distances = np.abs(np.abs(values.astype(np.float64))[..., np.newaxis] - np.array(MAGNITUDES)[EVEN_FIRST])
    codes = EVEN_FIRST[distances.argmin(axis=-1)]  # the first of those that are equally near
    return (codes | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def quantised(values: npt.NDArray[np.generic]) -> tuple[npt.NDArray[np.uint8], Floats]:
    out = np.full(values.shape, 0xEE, np.uint8)
    scales = np.full((blocks(values.shape[0]), blocks(values.shape[1])), np.nan, np.float32)
    BlockQuantiser().quantise(values, out, scales, "w")
    return out, scales


def definition(values: Floats) -> tuple[npt.NDArray[np.uint8], Floats]:
    rows, columns = values.shape
    out = np.zeros(values.shape, np.uint8)
    scales = np.zeros((blocks(rows), blocks(columns)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = np.s_[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            scale = np.float32(max(np.abs(values[at]).max(), np.float32(448 * 2.0**-126))) / np.float32(448)
            scales[i, j] = scale
            out[at] = nearest(values[at] / scale)
    return out, scales


def test_all_codes_and_all_that_lies_between_them() -> None:
    ends = np.array(MAGNITUDES, np.float32)
    ties = ((ends[1:].astype(np.float64) + ends[:-1]) / 2).astype(np.float32)
    all_of_them = np.concatenate([ends, ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9))])
    row = np.concatenate([all_of_them, -all_of_them])
    # With 448 in each block the scale is 1, so the elements stay what they are.
    values = np.zeros((1, 2 * blocks(row.size) * BLOCK), np.float32)
    values[0, ::2][: row.size] = row
    values[0, 1::2] = 448.0
    out, scales = quantised(values)
    assert (scales == 1.0).all()
    assert np.array_equal(out[0, ::2][: row.size], nearest(row))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 128), (130, 127), (127, 257), (1, 300)])
@pytest.mark.parametrize("exponent", [-130, -20, 0, 100])
def test_random_matrices_by_the_definition(rows: int, columns: int, exponent: int, seed: Seed) -> None:
    rng = seed.rng()
    spread = 2.0 ** rng.uniform(-12, 0, (rows, columns))
    values = (rng.standard_normal((rows, columns)) * spread * 2.0**exponent).astype(np.float32)
    expected, expected_scales = definition(values)
    out, scales = quantised(values)
    assert np.array_equal(scales, expected_scales)
    assert np.array_equal(out, expected)


def test_bfloat16_is_what_its_float32_is(seed: Seed) -> None:
    bits = (seed.rng().standard_normal((150, 200)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    out, scales = quantised(bits)
    wide_out, wide_scales = quantised((bits.astype(np.uint32) << 16).view(np.float32))
    assert np.array_equal(out, wide_out)
    assert np.array_equal(scales, wide_scales)


def test_transposed_and_sliced_views(seed: Seed) -> None:
    whole = seed.rng().standard_normal((300, 140)).astype(np.float32)
    out, scales = quantised(whole.T[3:, 5:])
    expected, expected_scales = quantised(np.ascontiguousarray(whole.T[3:, 5:]))
    assert np.array_equal(out, expected)
    assert np.array_equal(scales, expected_scales)


@pytest.mark.parametrize("block", [(1, 128), (64, 32), (200, 200)])
def test_other_blocks(block: tuple[int, int], seed: Seed) -> None:
    values = seed.rng().standard_normal((130, 140)).astype(np.float32)
    out = np.zeros(values.shape, np.uint8)
    scales = np.zeros((blocks(130, block[0]), blocks(140, block[1])), np.float32)
    BlockQuantiser().quantise(values, out, scales, "w", block)
    assert scales.shape == (-(-130 // block[0]), -(-140 // block[1]))
    for i, j in np.ndindex(*scales.shape):
        at = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        assert scales[i, j] == np.abs(values[at]).max() / np.float32(448)
        assert np.array_equal(out[at], nearest(values[at] / scales[i, j]))


def test_block_of_zeros_is_zeros() -> None:
    out, scales = quantised(np.zeros((128, 128), np.float32))
    assert not out.any()
    assert np.isfinite(scales).all() and (scales > 0).all()


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_any_finite_row(row: list[float]) -> None:
    values = np.array([row], np.float32)
    expected, expected_scales = definition(values)
    out, scales = quantised(values)
    assert np.array_equal(scales, expected_scales)
    assert np.array_equal(out, expected)
    assert np.isfinite(decoded(out)).all()


def with_gaps(matrix: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same, in every other column of a wider one: numpy converts those, native code all others."""
    wide = np.zeros((matrix.shape[0], 2 * matrix.shape[1]), matrix.dtype)
    wide[:, ::2] = matrix
    return wide[:, ::2]


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 70),
    block=st.tuples(st.integers(1, 50), st.integers(1, 80)),
    bits=st.sampled_from([np.uint32, np.uint16]),
    is_finite=st.booleans(),
    shift=st.integers(0, 3),
    data=st.integers(0, 1 << 32),
)
def test_native_code_and_numpy_give_the_same_bits(
    rows: int, columns: int, block: tuple[int, int], bits: Any, is_finite: bool, shift: int, data: int
) -> None:
    """Of all bit patterns, at any address: also those of numbers so small, or so unlike, that most become zero."""
    words = np.random.default_rng(data).integers(0, 1 << (8 * np.dtype(bits).itemsize), (rows, columns), bits)
    if is_finite:  # the exponent's last bit is not set
        words &= np.array(0xFF7FFFFF >> (32 - 8 * words.itemsize), bits)
    memory = np.zeros(words.nbytes + 3, np.uint8)[shift : shift + words.nbytes]
    memory[:] = words.reshape(-1).view(np.uint8)
    kind = np.float32 if bits is np.uint32 else np.uint16
    values = memory.view(kind).reshape(words.shape)
    found = []
    for matrix in (values, with_gaps(values)):
        out = np.full(words.shape, 0xEE, np.uint8)
        scales = np.full((blocks(rows, block[0]), blocks(columns, block[1])), np.nan, np.float32)
        try:
            BlockQuantiser().quantise(matrix, out, scales, "w", block)
        except NotFinite as error:
            found.append(str(error))
        else:
            found.append((out.tobytes(), scales.tobytes()))
    assert found[0] == found[1]
    assert isinstance(found[0], tuple) or not is_finite


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_is_refused_by_name_and_place(bad: float) -> None:
    values = np.ones((300, 400), np.float32)
    values[200, 333] = bad
    with pytest.raises(NotFinite, match=r"^w\[200, 333\] is") as raised:
        quantised(values)
    assert raised.value.index == (200, 333)


@pytest.mark.parametrize("block", [(128, 128), (1, 128), (300, 400), (300, 7), (5, 400), (1000, 1000)], ids=str)
@pytest.mark.parametrize("kind", [np.float32, np.uint16])
def test_scratch_has_an_end_and_pieces_change_nothing(
    monkeypatch: pytest.MonkeyPatch, block: tuple[int, int], kind: type, seed: Seed
) -> None:
    values = seed.rng().standard_normal((300, 400)).astype(np.float32)
    if kind is np.uint16:
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    grid = blocks(300, block[0]), blocks(400, block[1])
    whole, scales = np.zeros(values.shape, np.uint8), np.zeros(grid, np.float32)
    BlockQuantiser().quantise(values, whole, scales, "w", block)

    monkeypatch.setattr(float8, "_PIECE_ELEMENTS", 1000)
    quantiser = BlockQuantiser()
    out, again = np.zeros(values.shape, np.uint8), np.zeros(grid, np.float32)
    quantiser.quantise(with_gaps(values), out, again, "w", block)
    assert quantiser._wide.size <= 1000
    assert np.array_equal(out, whole) and np.array_equal(again, scales)

    values[7, 390] = values[250, 3] = np.array(0x7F80, np.uint16) if kind is np.uint16 else np.inf
    with pytest.raises(NotFinite, match=r"^w\[7, 390\] is inf"):
        quantiser.quantise(with_gaps(values), out, again, "w", block)


def test_scratch_is_made_once() -> None:
    quantiser = BlockQuantiser()
    values, out = with_gaps(np.ones((256, 512), np.float32)), np.zeros((256, 512), np.uint8)
    scales = np.zeros((2, 4), np.float32)
    quantiser.quantise(values, out, scales)
    before = quantiser._wide
    quantiser.quantise(values[:100, :300], out[:100, :300], scales[:1, :3])
    assert quantiser._wide is before


@pytest.mark.parametrize(
    ("values", "out", "scales"),
    [
        (np.ones((2, 2), np.float32), np.zeros((2, 3), np.uint8), np.ones((1, 1), np.float32)),
        (np.ones((2, 2), np.float32), np.zeros((2, 2), np.int8), np.ones((1, 1), np.float32)),
        (np.ones((2, 2), np.float32), np.zeros((2, 2), np.uint8), np.ones((1, 2), np.float32)),
        (np.ones((2, 2), np.float64), np.zeros((2, 2), np.uint8), np.ones((1, 1), np.float32)),
    ],
)
def test_shapes_and_types_are_checked(
    values: npt.NDArray[np.generic], out: npt.NDArray[np.uint8], scales: Floats
) -> None:
    with pytest.raises(xr.UsageError):
        BlockQuantiser().quantise(values, out, scales)
