"""Boxes of DTensors as torch shards them: FSDP2's and two-dimensional meshes', on one process that is given a rank."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import crossrail as xr
from crossrail.errors import UsageError
from crossrail.weights.inventory.families import QWEN3_MOE
from crossrail.weights.inventory.mapping import Names
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.inventory.torch_tensors import add_tensor, dtensor_box, mesh_name, torch_holdings

RANKS = 4


@pytest.fixture(params=range(RANKS))
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """This process as one rank of many; the others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=RANKS)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((4,), [Shard(0)]),
        ((4,), [Shard(1)]),
        ((4,), [Replicate()]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 2), [Shard(0), Shard(0)]),
    ],
)
def test_local_tensor_is_the_box(rank: int, mesh: tuple[int, ...], placements: list) -> None:
    whole = torch.arange(19 * 10).reshape(19, 10)
    tensor = distribute_tensor(whole, init_device_mesh("cpu", mesh), placements, src_data_rank=None)

    box = dtensor_box("w", tensor)

    assert torch.equal(tensor.to_local(), whole[tuple(slice(*piece) for piece in box)].reshape(tensor.to_local().shape))


def test_holdings_of_a_shard_lie_where_the_local_tensor_does(rank: int) -> None:
    whole = torch.arange(64.0).reshape(16, 4)
    tensor = distribute_tensor(whole, init_device_mesh("cpu", (RANKS,)), [Shard(0)], src_data_rank=None)
    base = tensor.to_local().data_ptr() - 64

    (held,) = torch_holdings(Names([], {"w": (16, 4)}), "w", tensor, 0, base)

    assert (held.name, held.shape, held.offset, held.dtype) == ("w", (16, 4), 64, "float32")
    assert held.box == ((4 * rank, 4 * rank + 4), (0, 4))
    assert held.mesh == mesh_name(tensor)


def test_fused_experts_in_uneven_shards_are_added_as_parameters(rank: int) -> None:
    experts = "model.layers.0.mlp.experts"
    gate, up = (f"{experts}.{name}_proj.weight" for name in ("gate", "up"))
    whole = torch.arange(6 * 8 * 4, dtype=torch.float32).reshape(6, 8, 4)
    names = Names(QWEN3_MOE, {gate: (6, 4, 4), up: (6, 4, 4)})
    tensor = distribute_tensor(whole, init_device_mesh("cpu", (RANKS,)), [Shard(0)], src_data_rank=None)
    with xr.Engine("trainer", transport="null") as engine, WeightMemory(engine, "trainer", rank) as memory:
        add_tensor(memory, names, f"{experts}.gate_up_proj", tensor)

        inventory = memory.inventory()

        held = {inventory.names[row["name"]]: row for row in inventory.rows}
        assert list(held) == (
            [gate, up] if rank < 3 else []
        )  # six experts over four ranks: two each, none for the last
        base = tensor.to_local().data_ptr()
        for name, row in held.items():
            assert (row["start"][:3].tolist(), row["stop"][:3].tolist()) == ([2 * rank, 0, 0], [2 * rank + 2, 4, 4])
            assert memory.regions[row["region"]].base + row["offset"] == base + (4 * 4 * 4 if name == up else 0)
            assert row["strides"][:3].tolist() == [8 * 4 * 4, 4 * 4, 4]


def test_partial_sums_refused(rank: int) -> None:
    tensor = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (RANKS,)), [Partial()], run_check=False)

    with pytest.raises(UsageError, match="'w' is placed as"):
        dtensor_box("w", tensor)


def test_dtensor_given_as_plain_memory_is_refused_by_name(rank: int) -> None:
    tensor = distribute_tensor(torch.ones(8, 4), init_device_mesh("cpu", (RANKS,)), [Shard(0)], src_data_rank=None)

    with xr.Engine("trainer") as engine, WeightMemory(engine, "trainer", rank) as memory:
        with pytest.raises(UsageError, match=r"w: the tensor is a DTensor: .*add_tensor\(\) takes it"):
            memory.add("w", tensor)


def test_tensors_of_others_classes_are_tensors_and_sparse_ones_are_refused() -> None:
    class ModelWeight(torch.nn.Parameter):
        """As vLLM has them: of a module that is not torch's."""

    with xr.Engine("trainer") as engine, WeightMemory(engine, "trainer", 0) as memory:
        memory.add("w", ModelWeight(torch.ones(8, 4)))
        with pytest.raises(UsageError, match=r"s: the tensor's layout is torch.sparse_coo, must be torch.strided"):
            memory.add("s", torch.ones(8, 4).to_sparse())
        assert memory.inventory().names == ("w",)


def test_type_that_is_said_is_that_of_the_elements_and_must_fit() -> None:
    with xr.Engine("trainer") as engine, WeightMemory(engine, "trainer", 0) as memory:
        memory.add("w", torch.zeros(8, 4, dtype=torch.uint8), dtype="float8_e4m3fn")
        memory.add("v", torch.zeros(8, 4, dtype=torch.bfloat16), dtype=torch.bfloat16)
        with pytest.raises(UsageError, match=r"u: bfloat16 lies in an array of uint16, not of float32"):
            memory.add("u", torch.zeros(8, 4), dtype="bfloat16")
        with pytest.raises(UsageError, match=r"'t': innermost dimension has gaps"):
            memory.add("t", torch.zeros(8, 4).t())
        assert [holding.dtype for holding in memory.inventory().holdings] == ["float8_e4m3fn", "bfloat16"]


class ElsewhereTensor(torch.Tensor):
    """As quantised ones of torchao: what it stands for is in another tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> ElsewhereTensor:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> object:
        raise NotImplementedError


def freed() -> torch.Tensor:
    tensor = torch.ones(4, 6)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: ElsewhereTensor(torch.ones(4, 6)), "the tensor, a ElsewhereTensor, has no memory of its own"),
        (freed, "the tensor, a Tensor, has no memory now: its storage was freed"),
        (lambda: torch._neg_view(torch.ones(4, 6)), "torch negates or conjugates it"),
        (lambda: torch.ones(4, 6).to_sparse(), "the tensor's layout is torch.sparse_coo"),
        (lambda: torch.ones(4, 6, device="meta"), "the tensor is on meta"),
    ],
)
def test_tensor_whose_memory_does_not_hold_its_values_is_refused_by_name(
    make: Callable[[], torch.Tensor], why: str
) -> None:
    with xr.Engine("here", transport="null") as engine:
        memory = WeightMemory(engine, "trainer", 0)
        with pytest.raises(UsageError, match=f"^w: {why}"):
            memory.add("w", make())
        with pytest.raises(UsageError, match=f"^w: {why}"):
            add_tensor(memory, Names([], {"w": (4, 6)}), "w", make())
        assert not memory.names


def test_what_is_no_tensor_is_refused_by_name() -> None:
    with xr.Engine("here", transport="null") as engine:
        memory = WeightMemory(engine, "trainer", 0)
        with pytest.raises(UsageError, match=r"^w: a ndarray is no torch tensor"):
            add_tensor(memory, Names([], {"w": (4, 6)}), "w", np.zeros((4, 6)))


def test_tensor_that_moved_is_refused_by_name() -> None:
    module = torch.nn.Linear(4, 4)
    with xr.Engine("trainer", transport="null") as engine, WeightMemory(engine, "trainer", 0) as memory:
        memory.add("w", module.weight)
        memory.add("b", module.bias)
        memory.check_in_place()
        with torch.no_grad():
            module.bias.copy_(torch.ones(4))
            memory.check_in_place()
            module.bias.data = torch.ones(4)
        with pytest.raises(UsageError, match=r"^b: its tensor lies elsewhere than when it was added"):
            memory.check_in_place()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda data: data.t(),
            r"float32 with strides \(8, 1\) when it was added, and is float32 with strides \(1, 8\)",
        ),
        (lambda data: data.view(torch.bfloat16)[:, :8], r"float32 .* and is bfloat16 with strides \(16, 1\) now"),
    ],
)
@pytest.mark.parametrize("how", ["add", "add_tensor"])
def test_tensor_that_lies_otherwise_at_its_place_is_refused_by_name(
    change: Callable[[torch.Tensor], torch.Tensor], text: str, how: str
) -> None:
    """Its bytes would be sent as what it was."""
    weight = torch.nn.Parameter(torch.arange(32.0).reshape(4, 8))
    with xr.Engine("trainer", transport="null") as engine, WeightMemory(engine, "trainer", 0) as memory:
        if how == "add":
            memory.add("w", weight)
        else:
            add_tensor(memory, Names([], {"w": (4, 8)}), "w", weight)
        before = weight.data_ptr()
        weight.data = weight.data[:2]  # the same bytes lie there
        memory.check_in_place()
        weight.data = change(weight.data)
        assert weight.data_ptr() == before
        with pytest.raises(UsageError, match=rf"^w: its tensor was {text}"):
            memory.check_in_place()


def test_shard_that_moved_is_refused_by_name() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        tensor, moved = (distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)], src_data_rank=None) for _ in range(2))
        with xr.Engine("trainer", transport="null") as engine, WeightMemory(engine, "trainer", 0) as memory:
            add_tensor(memory, Names([], {"w": (8, 4)}), "w", tensor)
            memory.check_in_place()
            torch.utils.swap_tensors(tensor, moved)  # as module.to(another device) does
            with pytest.raises(UsageError, match=r"^w: its tensor lies elsewhere"):
                memory.check_in_place()
    finally:
        dist.destroy_process_group()


def test_memory_of_a_tensor_that_moved_is_kept_until_it_is_closed() -> None:
    """Others may still read or write there."""
    values = np.ones(4096, np.float32)
    kept = weakref.ref(values)
    with xr.Engine("trainer", transport="null") as engine, WeightMemory(engine, "trainer", 0) as memory:
        tensor = torch.from_numpy(values)
        del values
        memory.add("w", tensor)
        memory.inventory()
        tensor.data = torch.zeros(4096)
        gc.collect()
        assert kept() is not None
    gc.collect()
    assert kept() is None
