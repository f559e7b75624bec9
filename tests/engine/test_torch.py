"""Torch tensors. Collected only where torch is installed."""

import numpy as np
import pytest
import torch

import crossrail as xr
from tests.support.limits import WAIT_S


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_tensors_of_any_type_can_be_written(engine: xr.Engine, dtype: torch.dtype) -> None:
    src = torch.randint(0, 2, (30, 70)).to(dtype)
    dst = torch.zeros_like(src)

    target = engine.register(dst)
    engine.submit_write(engine.register(src), target.descriptor, imm=1).wait(WAIT_S)
    engine.imm_counter(1).wait(1, WAIT_S)

    assert torch.equal(src, dst)


def test_tensor_with_gaps_is_refused(engine: xr.Engine) -> None:
    with pytest.raises(xr.UsageError, match="contiguous"):
        engine.register(torch.zeros(10, 10).T)


@pytest.mark.parametrize("view", [torch.zeros(3, dtype=torch.complex64).conj(), torch._neg_view(torch.zeros(3))])
def test_tensor_whose_memory_has_other_values_is_refused(engine: xr.Engine, view: torch.Tensor) -> None:
    with pytest.raises(xr.UsageError, match=r"make buffer.resolve_conj\(\).resolve_neg\(\)"):
        engine.register(view)


def test_tensor_that_requires_grad_can_be_registered(engine: xr.Engine) -> None:
    assert engine.register(torch.zeros(10, requires_grad=True)).nbytes == 40


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_page_indices_may_be_tensors(engine: xr.Engine, dtype: torch.dtype) -> None:
    src = np.arange(1000, dtype=np.uint8).reshape(10, 100)
    dst = np.zeros_like(src)
    order = torch.randperm(10).to(dtype)

    target = engine.register(dst)
    engine.submit_paged_writes(engine.register(src), order, target.descriptor, order, 100, imm=1).wait(WAIT_S)
    engine.imm_counter(1).wait(10, WAIT_S)

    assert np.array_equal(src, dst)


@pytest.mark.parametrize("pages", [torch.zeros(4), torch.zeros((2, 2), dtype=torch.int64), torch.arange(8)[::2]])
def test_wrong_index_tensor_is_refused(engine: xr.Engine, pages: torch.Tensor) -> None:
    region = engine.alloc(1000)

    with pytest.raises(xr.UsageError, match="src_pages"):
        engine.submit_paged_writes(region, pages, region.descriptor, pages, 100)


@pytest.mark.parametrize("pages", [torch.zeros(3).to_sparse(), torch.zeros(3, dtype=torch.float8_e4m3fn)])
def test_index_tensor_that_numpy_cannot_view_is_refused(engine: xr.Engine, pages: torch.Tensor) -> None:
    region = engine.alloc(1000)

    with pytest.raises(xr.UsageError, match="the tensor gives no numpy view of itself"):
        engine.submit_paged_writes(region, pages, region.descriptor, pages, 100)
