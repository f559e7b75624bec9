"""Torch tensors. Collected only where torch is installed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import crossrail as xr
from tests.support.fake_gpu import FakeGpu
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


class _Wrapper(torch.Tensor):
    """A tensor around another one, as DTensor is."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "_Wrapper":
        wrapper: _Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape)  # type: ignore[attr-defined]
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: object, *_arguments: object) -> object:
        raise NotImplementedError(func)


def test_tensor_without_memory_of_its_own_is_refused(engine: xr.Engine) -> None:
    with FakeTensorMode():
        fake = torch.zeros(3)

    for tensor in (_Wrapper(torch.zeros(3)), fake, torch._efficientzerotensor((3,))):
        with pytest.raises(xr.UsageError, match=r"buffer is a \w+ without memory of its own: register what"):
            engine.register(tensor)
    with pytest.raises(xr.UsageError, match=r"without memory of its own: Cannot access"):
        torch.vmap(engine.register)(torch.zeros(2, 3))


@pytest.mark.parametrize("of_module", [False, True])
def test_memory_of_a_tensor_that_was_given_other_memory_stays(engine: xr.Engine, of_module: bool) -> None:
    module = torch.nn.Linear(512, 512, bias=False).requires_grad_(False)
    before = module.weight.clone()
    source = engine.register(module.weight)

    if of_module:
        module.to(torch.bfloat16)
    else:
        module.weight.data = torch.zeros(3)

    target = engine.alloc(source.nbytes)
    engine.submit_write(source, target.descriptor).wait(WAIT_S)
    assert torch.equal(target.tensor("float32", (512, 512)), before)


def test_tensor_that_requires_grad_can_be_registered(engine: xr.Engine) -> None:
    assert engine.register(torch.zeros(10, requires_grad=True)).nbytes == 40


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_tensor_over_a_file_that_is_mapped_to_be_read_is_readable_only(engine: xr.Engine, tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(100_000))

    region = engine.register(torch.from_numpy(np.memmap(file, np.uint8, mode="r")))

    assert region.access == "read"
    target = engine.alloc(100_000)
    engine.submit_write(region, target.descriptor).wait(WAIT_S)


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


def test_region_as_a_tensor(engine: xr.Engine) -> None:
    """Of a type that numpy lacks; what either side writes is the other's."""
    region = engine.alloc(4096)
    source = torch.arange(2048).to(torch.bfloat16).reshape(32, 64)

    engine.submit_write(engine.register(source), region.descriptor, imm=1).wait(WAIT_S)
    engine.imm_counter(1).wait(1, WAIT_S)

    seen = region.tensor(torch.bfloat16, (32, -1))
    assert torch.equal(seen, source)
    assert torch.equal(region.tensor("bfloat16"), source.flatten())
    assert region.tensor("int16", 3).shape == (3,)
    assert region.tensor("int16", np.int64(3)).shape == region.tensor("int16", np.array([3])).shape == (3,)
    seen.fill_(0)
    assert not region.array().any()


def test_tensor_keeps_the_memory_of_its_region() -> None:
    with xr.Engine("here") as engine:
        region = engine.alloc(1 << 20)
        seen = region.tensor("float32")
        seen.fill_(7)
        region.close()
        del region
    assert torch.equal(seen, torch.full((1 << 18,), 7.0))


def test_tensor_of_a_registered_tensor_is_over_its_memory(engine: xr.Engine) -> None:
    given = torch.zeros(100, dtype=torch.bfloat16)
    assert engine.register(given).tensor(torch.bfloat16).data_ptr() == given.data_ptr()


@pytest.mark.parametrize(
    ("dtype", "shape", "complaint"),
    [
        ("float64", None, "not a whole number of torch.float64"),
        ("uint8", 1004, "takes 1004 bytes"),
        ("uint8", (-1, 7), "as torch.uint8 of shape"),
        ("uint8", "three", "shape is 'three', must be a whole number or several"),
        (np.uint8, None, "dtype is <class 'numpy.uint8'>, which is not a dtype of torch"),
        ("nonsense", None, "dtype is 'nonsense'"),
    ],
)
def test_tensor_that_does_not_fit_is_refused(engine: xr.Engine, dtype: object, shape: object, complaint: str) -> None:
    region = engine.alloc(1003)
    with pytest.raises(xr.UsageError, match=complaint):
        region.tensor(dtype, shape)  # type: ignore[arg-type]


def test_no_tensor_of_what_must_not_be_written(engine: xr.Engine) -> None:
    with pytest.raises(xr.UsageError, match="read-only"):
        engine.register(bytes(100)).tensor()


def test_no_tensor_of_a_closed_region(engine: xr.Engine) -> None:
    region = engine.alloc(100)
    region.close()
    with pytest.raises(xr.UsageError, match="closed"):
        region.tensor()


def test_no_tensor_of_a_gpus_memory_that_was_registered(gpu: FakeGpu, engine: xr.Engine) -> None:
    with pytest.raises(xr.UsageError, match="on cuda:0, and was registered: use what was"):
        engine.register(gpu.allocate(64)).tensor()


def test_current_stream_of_a_torch_without_cuda(engine: xr.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def current_stream() -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")  # torch's own words, of a build for CPUs

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    with pytest.raises(xr.CrossrailError, match="asking for the current stream: AssertionError: Torch not compiled"):
        engine.alloc_watcher(lambda _old, _new: None).add_on()


def test_from_dlpack_of_a_region_is_its_bytes(engine: xr.Engine) -> None:
    region = engine.alloc(64)
    tensor = torch.from_dlpack(region)
    tensor.fill_(5)
    assert (tensor.dtype, tensor.shape) == (torch.uint8, (64,)) and set(region.array().tolist()) == {5}
