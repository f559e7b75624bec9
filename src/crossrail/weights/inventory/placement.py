"""Which box of a tensor a process has, given its placement on a process mesh as torch's DTensor describes it.

The arithmetic is torch.chunk's: pieces of ceil(n / count), the last ones shorter or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from crossrail.errors import UsageError
from crossrail.weights.inventory.holdings import Box


@dataclass(frozen=True)
class Replicate:
    """Every process along this dimension of the mesh has the same."""


@dataclass(frozen=True)
class Shard:
    """Pieces of the tensor's dimension `dim` along this dimension of the mesh.

    split_factor: more than 1 where another dimension of the mesh, further right, has divided that dimension into so
    many pieces before (_StridedShard of FSDP2 with tensor parallelism): each of them is divided.
    """

    dim: int
    split_factor: int = 1


Placement: TypeAlias = Replicate | Shard


def local_box(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> Box:
    """The part of a tensor at this coordinate of the mesh; may be empty.

    mesh: processes along each of its dimensions. placements: one for each of them.
    """
    if not len(mesh) == len(coordinate) == len(placements):
        raise UsageError(f"mesh {tuple(mesh)}, coordinate {tuple(coordinate)} and {len(placements)} placements differ")
    box = [(0, extent) for extent in shape]
    shards = [(axis, placed) for axis, placed in enumerate(placements) if isinstance(placed, Shard)]
    for axis, placed in shards:
        if not 0 <= placed.dim < len(shape):
            raise UsageError(f"dimension {placed.dim} of a tensor of shape {tuple(shape)} cannot be sharded")
        if not 0 <= coordinate[axis] < mesh[axis]:
            raise UsageError(f"coordinate {tuple(coordinate)} is not in a mesh of {tuple(mesh)}")
        further = [mesh[other] for other, one in shards if other > axis and one.dim == placed.dim]
        before = 1
        for count in further:
            before *= count
        if placed.split_factor not in (1, before):
            raise UsageError(f"split_factor={placed.split_factor} must be 1, or {before} as the mesh divides later")
    # First the plain ones from left to right, then those that divide what remains.
    for axis, placed in sorted(shards, key=lambda one: one[1].split_factor > 1):
        box[placed.dim] = chunk(*box[placed.dim], coordinate[axis], mesh[axis])
    return tuple(box)


def chunk(start: int, stop: int, index: int, count: int) -> tuple[int, int]:
    """The piece of this index of start .. stop, divided by count."""
    size = -(-(stop - start) // count)
    return min(start + size * index, stop), min(start + size * (index + 1), stop)
