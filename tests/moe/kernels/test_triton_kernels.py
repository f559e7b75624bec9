"""Kernels in Triton: the same cases, on the GPU if there is one, else in its interpreter, where some see a sample."""

import numpy as np
import pytest
import torch

from crossrail.moe.kernels.triton import TritonKernels
from tests.conftest import HAS_GPU
from tests.moe.kernels.contract import KernelsContract, Subject, summed
from tests.moe.kernels.numbers import Array
from tests.moe.kernels.torch_arrays import to_numpy, to_torch
from tests.support.seeds import Seed

DEVICE = "cuda" if HAS_GPU else "cpu"

# The interpreter computes with numpy, which says so when a float16 overflows or an infinity meets a zero.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def to_device(array: Array) -> torch.Tensor:
    return to_torch(array).to(DEVICE)


def make_subject(checked: bool = True) -> Subject:
    kernels = TritonKernels(checked)
    return Subject(kernels, array=to_device, numpy=lambda tensor: to_numpy(tensor.cpu()), exhaustive=HAS_GPU)


@pytest.fixture
def subject() -> Subject:
    return make_subject()


class TestTriton(KernelsContract):
    pass


def test_every_bfloat16_becomes_the_e4m3_that_torch_makes_of_it(subject: Subject) -> None:
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = values[values.abs() <= 448][None].to(DEVICE)  # one block, whose largest makes the scale 1
    codes, scales = subject.kernels.quantize(x, x.numel())
    assert torch.all(scales == 1) and torch.equal(codes, x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_unchecked_kernels_leave_out_what_a_table_should_not_hold(seed: Seed) -> None:
    """They are for graphs, where nobody can be told: but nothing outside of an array may be touched."""
    subject = make_subject(checked=False)
    kernels, array = subject.kernels, subject.array
    bad = [-1, -(2**31), 2**31 - 1, 4]
    x = seed.rng().integers(1, 256, (4, 16)).astype(np.uint8)
    target = array(np.full((6, 16), 9, np.uint8))
    kernels.pack(target, array(x), None, array(np.array([2, *bad], np.int32)))
    packed = subject.numpy(target)
    assert np.array_equal(packed[0], x[2]) and np.all(packed[1:5] == 0) and np.all(packed[5] == 9)
    for column in range(2):
        out, table = array(np.full((4, 16), 9, np.uint8)), np.zeros((5, 2), np.int32)
        table[1:, column] = bad
        kernels.pull(out, None, array(x), array(table))
        pulled = subject.numpy(out)
        assert np.array_equal(pulled[0], x[0]) and np.all(pulled[1:] == 9)
    rows = seed.rng(1).standard_normal((4, 16)).astype(np.float32)
    where = np.array([[[0, 1], [0, row]] for row in bad] + [[[0, 1], [source, 0]] for source in bad], np.int32)
    assert np.array_equal(summed(subject, np.zeros((8, 16), np.float32), [rows], where, None), rows[[1] * 8])
    counts, slots = array(np.zeros(3, np.int32)), array(np.zeros((1, 4), np.int32))
    kernels.count(array(np.array([[1, 7, -5, 1]], np.int32)), 3, counts, slots)
    assert subject.numpy(counts).tolist() == [0, 2, 0] and subject.numpy(slots).tolist() == [[0, -1, -1, 1]]
