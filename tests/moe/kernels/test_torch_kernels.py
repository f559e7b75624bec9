"""Kernels on torch tensors: the plain reference, and the native ones in place."""

import numpy as np
import pytest
import torch

from crossrail.moe.kernels import CpuKernels
from crossrail.moe.kernels.reference import ReferenceKernels
from tests.moe.kernels.contract import KernelsContract, Subject
from tests.moe.kernels.torch_arrays import to_numpy, to_torch
from tests.support.seeds import Seed


@pytest.fixture(params=["reference", "cpu"])
def subject(request: pytest.FixtureRequest) -> Subject:
    kernels = ReferenceKernels() if request.param == "reference" else CpuKernels()
    return Subject(kernels, array=to_torch, numpy=to_numpy)


class TestTorch(KernelsContract):
    pass


def test_every_bfloat16_becomes_the_e4m3_that_torch_makes_of_it(subject: Subject) -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    x = torch.stack([values, torch.full_like(values, 448)], dim=1)[values.abs() <= 448]  # scale 1 in all rows
    codes, scales = subject.kernels.quantize(x, 2)
    assert len(x) == 2 * 0x43E1 and torch.all(scales == 1)
    assert torch.equal(codes, x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_tensors_of_float8_are_rows_like_any(subject: Subject, seed: Seed) -> None:
    x = to_torch(seed.rng().standard_normal((6, 32)).astype(np.float32)).to(torch.float8_e4m3fn)
    rows = torch.zeros((6, 32), dtype=torch.uint8)
    subject.kernels.pack(rows, x, None, None)
    back = torch.zeros_like(x)
    table = torch.arange(6, dtype=torch.int32)[:, None].repeat(1, 2)
    subject.kernels.pull(back, None, rows, table)
    assert torch.equal(rows, x.view(torch.uint8)) and torch.equal(back.view(torch.uint8), rows)


def test_outputs_are_torch_tensors_where_inputs_are(subject: Subject) -> None:
    x = torch.ones((2, 256), dtype=torch.bfloat16)
    codes, scales = subject.kernels.quantize(x)
    assert codes.dtype == torch.uint8 and scales.dtype == torch.float32
    assert torch.equal(subject.kernels.dequantize(codes, scales), x)
