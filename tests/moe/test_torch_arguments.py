"""Tensors of torch that are refused: those that require gradients where torch would record them, since none passes
through; those whose elements are in no memory of their own; sums that would overwrite outputs of experts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import crossrail as xr
from crossrail.moe import AllToAll, EngineGroup

INDICES = torch.tensor([[0, 1], [1, -1]])
X, WEIGHTS = torch.ones(2, 16), torch.ones(2, 2)


@pytest.fixture
def alone(engine: xr.Engine) -> Iterator[AllToAll]:
    sizes: dict[str, Any] = {"experts": 2, "hidden": 16, "top_k": 2, "max_tokens": 4, "scale_block": None}
    with (
        EngineGroup(engine, [engine.address]) as group,
        AllToAll(engine, group, dtype="float32", out_dtype="float32", **sizes) as part,
    ):
        yield part


def with_gradient(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_()


def _x(part: AllToAll) -> None:
    part.dispatch(with_gradient(X), None, INDICES)


def _weights(part: AllToAll) -> None:
    got = part.dispatch(X, None, INDICES)
    part.combine(got.x.clone(), got, with_gradient(WEIGHTS))


def _y(part: AllToAll) -> None:
    got = part.dispatch(X, None, INDICES)
    part.combine(got.x * torch.nn.Parameter(torch.ones(16)), got, WEIGHTS)


def _y_in_place(part: AllToAll) -> None:
    got = part.dispatch(X, None, INDICES)
    y = part.expert_output(got)
    y[:] = got.x * torch.nn.Parameter(torch.ones(16))
    part.combine(y, got, WEIGHTS)


def _out(part: AllToAll) -> None:
    got = part.dispatch(X, None, INDICES)
    part.combine(got.x.clone(), got, WEIGHTS, out=with_gradient(X))


GIVEN: dict[str, Callable[[AllToAll], None]] = {"x": _x, "weights": _weights, "y": _y, "out": _out}


@pytest.mark.parametrize("name", GIVEN)
def test_a_tensor_that_would_wait_for_a_gradient_in_vain_is_refused(alone: AllToAll, name: str) -> None:
    with pytest.raises(xr.UsageError, match=rf"^{name} requires a gradient, and none passes .*torch\.no_grad\(\)"):
        GIVEN[name](alone)


def test_outputs_with_a_gradient_are_refused_where_they_are_written_in_place(alone: AllToAll) -> None:
    with pytest.raises(xr.UsageError, match=r"^y requires a gradient"):
        _y_in_place(alone)


@pytest.mark.parametrize("calls", [*GIVEN.values(), _y_in_place])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_where_torch_records_no_gradients_they_are_taken(
    alone: AllToAll, mode: Callable[[], Any], calls: Callable[[AllToAll], None]
) -> None:
    with mode():
        calls(alone)


def test_sums_that_would_overwrite_what_ranks_still_read_are_refused(alone: AllToAll) -> None:
    got = alone.dispatch(X, None, INDICES)
    y = alone.expert_output(got)
    y.fill_(1)
    with pytest.raises(xr.UsageError, match=r"^out lies in what expert_output\(\) gave"):
        alone.combine(y, got, WEIGHTS, out=y[:2])
    assert alone.combine(y, got, WEIGHTS, out=torch.empty(2, 16))[:, 0].tolist() == [2.0, 1.0]


class Wrapped(torch.Tensor):
    """Its elements are in another tensor, as a DTensor's are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        raise NotImplementedError(function)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """As FSDP frees what it unsharded: the tensor keeps its shape."""
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(tensor.shape)


def nested(tensor: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        return torch.nested.nested_tensor(list(tensor))


STRANGE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "negated": (torch._neg_view, r"is negated .*resolve_neg\(\)"),
    "wrapped": (Wrapped, r"is a Wrapped .*to_local\(\)"),
    "stand-in": (stand_in, r"is a FakeTensor .*plain tensor"),
    "sparse": (torch.Tensor.to_sparse, r"is a Tensor of layout torch\.sparse_coo, must be a plain tensor"),
    "nested": (nested, r"is a Tensor .*must be a plain tensor"),
    "freed": (freed, r"has no memory now: its storage was freed"),
}


def round_with(part: AllToAll, name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A round whose argument of that name is what `make` makes of it."""

    def given(of: str, tensor: torch.Tensor) -> torch.Tensor:
        return make(tensor) if of == name else tensor

    got = part.dispatch(given("x", X), None, INDICES)
    part.combine(given("y", got.x.clone()), got, given("weights", WEIGHTS), out=given("out", torch.empty(2, 16)))


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", ["x", "weights", "y", "out"])
def test_a_tensor_whose_elements_are_in_no_memory_of_its_own_is_refused(alone: AllToAll, name: str, kind: str) -> None:
    make, words = STRANGE[kind]
    with pytest.raises(xr.UsageError, match=rf"^{name} {words}"):
        round_with(alone, name, make)
    assert len(alone.open_rounds) == (name != "x")


def test_a_tensor_under_vmap_is_refused(alone: AllToAll) -> None:
    with pytest.raises(xr.UsageError, match=r"^x is a Tensor without memory"):
        torch.vmap(lambda x: alone.dispatch(x, None, INDICES).x)(X[None])


def test_subclasses_that_have_their_elements_are_taken(alone: AllToAll) -> None:
    class Named(torch.Tensor):
        pass

    for x in (X.as_subclass(Named), torch.nn.Parameter(X, requires_grad=False)):
        got = alone.dispatch(x, None, INDICES)
        assert alone.combine(got.x.clone(), got, WEIGHTS)[:, 0].tolist() == [2.0, 1.0]
