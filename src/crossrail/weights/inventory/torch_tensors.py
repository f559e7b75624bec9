"""Holdings from torch tensors: plain ones and DTensors. Needs torch."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

from crossrail._extras import needs
from crossrail.errors import UsageError
from crossrail.weights.inventory.holdings import Box, Holding
from crossrail.weights.inventory.mapping import ALONE, Names, Ranks
from crossrail.weights.inventory.memory import Place, WeightMemory, place_of, torch_storage
from crossrail.weights.inventory.placement import Placement, Replicate, Shard, local_box

with needs(__name__, "'crossrail[torch]'"):
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as TorchShard


def dtensor_box(name: str, tensor: DTensor) -> Box:
    """The part of the whole tensor in its to_local(); may be empty. UsageError for placements that hold no values."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise UsageError(f"{name!r}: this process is not in the mesh of the tensor")
    placements = [_placement(name, placed) for placed in tensor.placements]
    return local_box(tensor.shape, tensor.device_mesh.shape, coordinate, placements)


def _placement(name: str, placed: Any) -> Placement:
    if placed.is_replicate():
        return Replicate()
    # _StridedShard is a Shard in some versions of torch, and only looks like one in others.
    if isinstance(placed, TorchShard) or hasattr(placed, "split_factor"):
        return Shard(placed.dim, getattr(placed, "split_factor", 1))
    raise UsageError(f"{name!r} is placed as {placed}, which is neither Shard nor Replicate")


def mesh_name(tensor: DTensor) -> str:
    """A name that all processes of the tensor's mesh share, and no others."""
    ranks = tensor.device_mesh.mesh.flatten().tolist()
    return f"{len(ranks)} ranks {zlib.crc32(','.join(map(str, ranks)).encode()):08x}"


def torch_holdings(
    names: Names, name: str, tensor: torch.Tensor, region: int, region_base: int, *, ranks: Ranks = ALONE
) -> list[Holding]:
    """A framework's tensor in terms of the checkpoint.

    region_base: address of the region's first byte; the tensor must be in it and stay there. ranks: those by which the
    tensor's shape is already divided; not those of a DTensor's own mesh.
    """
    local, box, mesh = tensor, None, ""
    if isinstance(tensor, DTensor):
        local, box, mesh = tensor.to_local(), dtensor_box(name, tensor), mesh_name(tensor)
        extent = tuple(stop - start for start, stop in box)
        if tuple(local.shape) != extent and 0 not in extent:
            raise UsageError(f"{name!r}: the local tensor has the shape {tuple(local.shape)}, its placement {extent}")
    return names.holdings(
        name,
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        region,
        local.data_ptr() - region_base if local.numel() else 0,
        ranks=ranks,
        box=box,
        strides=[stride * local.element_size() for stride in local.stride()],
        mesh=mesh,
    )


def add_tensor(memory: WeightMemory, names: Names, name: str, tensor: torch.Tensor, *, ranks: Ranks = ALONE) -> None:
    """Adds a framework's tensor to this memory, as all those parameters of the checkpoint that lie in it.

    tensor: plain or a DTensor, on the CPU or a GPU; its elements stay where they are. name, ranks: as torch_holdings
    has them. A UsageError names the tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{name}: a {type(tensor).__name__} is no torch tensor")
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    torch_storage(str(name), local)
    local = local.detach()
    if not local.numel():  # an uneven shard
        return
    size = local.element_size()
    for held in torch_holdings(names, name, tensor, 0, local.data_ptr(), ranks=ranks):
        assert held.strides is not None
        extent = [stop - start for start, stop in held.box]
        steps = [stride // size for stride in held.strides]
        piece = local.as_strided(extent, steps, local.storage_offset() + held.offset // size)
        memory.add_unwatched(held.name, piece, held.shape, held.box, None, held.mesh, held.scale_of, held.block)
    memory.watch(name, _place_of(tensor))


def _place_of(tensor: torch.Tensor) -> Callable[[], Place]:
    """Says where it lies now. Each update asks that of thousands of tensors."""
    if not isinstance(tensor, DTensor):
        return partial(place_of, tensor)
    # The same as to_local() without gradients; entering no_grad() for that takes 20 times as long.
    return lambda: place_of(tensor._local_tensor)
