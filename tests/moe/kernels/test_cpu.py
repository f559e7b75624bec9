"""The native kernels, each of their variants that this processor can run, on numpy arrays."""

import mmap

import numpy as np
import pytest

from crossrail.errors import UsageError
from crossrail.moe.kernels import CpuKernels, cpu_levels
from tests.moe.kernels import numbers
from tests.moe.kernels.contract import KernelsContract, Subject
from tests.moe.kernels.numbers import TYPES
from tests.support.seeds import Seed


@pytest.fixture(params=cpu_levels())
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(CpuKernels(request.param), array=np.array, numpy=np.asarray)


class TestCpu(KernelsContract):
    pass


def test_levels_end_with_what_every_processor_can_do() -> None:
    assert cpu_levels()[-1] == "portable"
    assert CpuKernels().name == f"cpu:{cpu_levels()[0]}"
    with pytest.raises(UsageError, match='"mmx", this processor has auto, '):
        CpuKernels("mmx")


@pytest.mark.parametrize("dtype", TYPES)
def test_all_variants_give_the_same_bits_for_any_bits(seed: Seed, dtype: str) -> None:
    rng = seed.rng()
    raw = rng.integers(0, 256, (8, 1003 * 4), np.uint8)
    rows = raw.view(TYPES[dtype]) if dtype == "float32" else raw[:, : 1003 * 2].copy().view(TYPES[dtype])
    where = np.stack([np.zeros((5, 6), np.int32), rng.integers(-1, 8, (5, 6)).astype(np.int32)], axis=-1)
    weights = rng.standard_normal((5, 6)).astype(np.float32)
    results = []
    for level in cpu_levels():
        kernels = CpuKernels(level)
        sums = {out: np.zeros((5, rows.shape[1]), TYPES[out]) for out in TYPES}
        for out in sums.values():
            kernels.reduce(out, [rows], where, weights)
        results.append((sums, kernels.quantize(rows, 100)))
    for sums, (codes, scales) in results[1:]:
        assert all(numbers.same(sums[out], results[0][0][out], out) for out in TYPES)
        assert np.array_equal(codes & 0x7F, results[0][1][0] & 0x7F)
        assert numbers.same(scales, results[0][1][1], "float32")


@pytest.mark.parametrize("rows", [600, 40])
def test_long_calls_that_skip_the_caches_copy_all_there_is(subject: Subject, seed: Seed, rows: int) -> None:
    source = seed.rng().integers(0, 256, (rows, 4112), np.uint8)
    table = np.stack([seed.rng(1).permutation(rows)] * 2, axis=-1).astype(np.int32)
    table[:, 1] = seed.rng(2).permutation(rows)
    x, scales = np.zeros((rows, 4099), np.uint8), np.zeros((rows, 13), np.uint8)
    subject.kernels.pull(x, scales, source, table)
    assert np.array_equal(np.concatenate([x, scales], axis=1)[table[:, 1]], source[table[:, 0]])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hidden", [1, 37, 64, 700])
def test_nothing_is_touched_past_the_last_row(subject: Subject, dtype: str, hidden: int) -> None:
    """Rows end where a page ends that nobody may touch: a vector too many would end the process."""
    size = hidden * np.dtype(TYPES[dtype]).itemsize
    with Guarded(size) as source, Guarded(size) as target, Guarded(hidden) as codes:
        rows, out = (np.frombuffer(part, TYPES[dtype]).reshape(1, hidden) for part in (source.end, target.end))
        rows[:] = 1
        subject.kernels.reduce(out, [rows], np.zeros((1, 1, 2), np.int32), None)
        assert np.array_equal(rows, out)
        subject.kernels.pull(out, None, rows.view(np.uint8), np.zeros((1, 2), np.int32))
        quantized, scales = subject.kernels.quantize(rows)
        eight = np.frombuffer(codes.end, np.uint8).reshape(1, hidden)
        eight[:] = quantized
        assert subject.kernels.dequantize(eight, scales, dtype=dtype).shape == (1, hidden)
        del rows, out, eight


class Guarded:
    """Memory whose last byte is the last of a page; the page behind it may not be touched."""

    def __init__(self, size: int) -> None:
        self._room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self._room + mmap.PAGESIZE)
        self._size = size

    def __enter__(self) -> "Guarded":
        import ctypes

        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(address + self._room), mmap.PAGESIZE, 0) == 0
        self.end = memoryview(self._map)[self._room - self._size : self._room]
        return self

    def __exit__(self, *_: object) -> None:
        self.end.release()
        self._map.close()


def test_arrays_that_cannot_be_used_in_place_are_refused(subject: Subject) -> None:
    kernels = subject.kernels
    out, rows, where = np.zeros((4, 8), np.float32), np.ones((4, 16), np.float32), np.zeros((4, 2, 2), np.int32)
    frozen = np.zeros((4, 8), np.float32)
    frozen.flags.writeable = False
    crooked = np.zeros(4 * 8 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(4, 8)
    for bad, message in (
        (lambda: kernels.reduce(out, [rows[:, ::2]], where, None), "sources must be C-contiguous, not ndarray with"),
        (lambda: kernels.reduce(out, [rows.T], where, None), "sources must be C-contiguous"),
        (lambda: kernels.reduce(frozen, [rows[:, :8].copy()], where, None), "out must be a writable array"),
        (lambda: kernels.reduce(crooked, [rows[:, :8].copy()], where, None), "out must be aligned"),
        (lambda: kernels.reduce([[1.0]], [rows], where, None), "out must be a writable array in host memory .* list"),
        (lambda: kernels.reduce(out, [rows[0]], where, None), "sources must be an array of 2 dimensions"),
    ):
        with pytest.raises(UsageError, match=message):
            bad()


def test_read_only_inputs_and_empty_ones_are_taken(subject: Subject) -> None:
    rows, where = np.ones((4, 8), np.float32), np.zeros((4, 2, 2), np.int32)
    rows.flags.writeable = where.flags.writeable = False
    out = np.zeros((4, 8), np.float32)
    subject.kernels.reduce(out, [rows], where, None)
    assert np.all(out == 2)
    subject.kernels.pull(np.zeros((0, 8), np.uint8), None, np.zeros((0, 16), np.uint8), np.zeros((0, 2), np.int32))
    subject.kernels.pack(np.zeros((0, 16), np.uint8), np.zeros((0, 8), np.uint8), None, None)
