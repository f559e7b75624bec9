"""A process's memory for weights, registered in large blocks, and the inventory of what lies there."""

from __future__ import annotations

import math
import mmap
import operator
import sys
import threading
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import crossrail as xr
from crossrail._buffers import gpu_allocation
from crossrail._closing import Closing
from crossrail.errors import UsageError
from crossrail.weights import gpu
from crossrail.weights.conversion.casts import storage
from crossrail.weights.inventory.holdings import (
    Box,
    Holding,
    Inventory,
    RegionInfo,
    Role,
    called,
    check_holding,
    check_member,
    checked_dtype,
)

_DLPACK_CUDA = 2  # of dlpack.h
_MOVED = "(.data was set, or the module was moved to another device)"
_RESHAPED = "(.data was set to a view of it)"
_PADDING_BYTES = 512  # allocators hand out a GPU's memory in multiples of that: smaller gaps in one are nobody's


Place = tuple[int, object, object]  # of a torch tensor: its address, type and strides


def place_of(tensor: Any) -> Place:
    """Where a torch tensor's elements are, and how they lie there."""
    return tensor.data_ptr(), tensor.dtype, tensor.stride()


def _form(place: Place) -> str:
    return f"{str(place[1]).removeprefix('torch.')} with strides {place[2]}"


@dataclass(frozen=True)
class _Tensor:
    """A torch tensor. storage: kept alive even if the tensor gets another one."""

    tensor: Any
    storage: Any


@dataclass(frozen=True)
class _Piece:
    """Where an array is. address, strides: bytes; block: the allocation that contains it, [begin, end)."""

    address: int
    strides: tuple[int, ...]
    extent: tuple[int, ...]
    dtype: str
    block: tuple[int, int]
    owner: object
    is_cuda: bool = False
    is_read_only: bool = False
    gpu: str = ""  # such as "cuda:0", where the array says it


class WeightMemory(Closing):
    """What one process holds of a model. Made empty; filled by add(); then registered, all at once, by inventory().

    Allocations are registered whole, and neighbours as one region: a model has thousands of tensors, and each region
    takes an entry at every NIC. Neighbours have no unused page between them (NICs take whole pages anyway); on a GPU
    they are pieces that torch's allocator cut from one allocation of the driver. In a simulation, which must not depend
    on where arrays happen to lie, neighbours stay regions of their own.
    regions: memory that is registered already (Engine.alloc: peers on this host then write it directly). Arrays in them
        need no registration of their own; the caller closes these regions.
    is_torn: an update into these arrays has begun, and none has been completed since: they are part old, part new. Of
        an inference rank: its WeightReceiver keeps it up to date, and the next one on this memory begins with it.
    Owner of the arrays: the caller; they are kept alive until close(). Threads: one at a time; inventory() and close()
    may be called on any thread, and wait for each other.
    """

    def __init__(self, engine: xr.Engine, role: Role, rank: int, regions: Sequence[xr.Region] = ()) -> None:
        check_member(role, rank)
        self.engine = engine
        self._is_simulated = engine._world is not None
        self.role: Role = role
        self.rank = operator.index(rank)
        self.regions: list[xr.Region] = list(regions)
        self._given = len(self.regions)
        self._made: list[tuple[int, int]] = []  # of regions that were made here, disjoint: begin and index, ascending
        self._added: list[tuple[Holding, _Piece]] = []
        self._names: set[str] = set()  # also of boxes that are empty
        self._watched: list[tuple[str, Callable[[], Place], Place]] = []
        self._gpus: set[str] = set()  # of arrays that say it
        self._inventory: Inventory | None = None
        self._registering = threading.Lock()
        self._is_closed = False
        self.is_torn = False

    def __repr__(self) -> str:
        return f"<WeightMemory of {called(self.role, self.rank)}, {len(self._added)} tensors>"

    @property
    def closed(self) -> bool:
        """close() was called, or one of its regions was closed."""
        return self._is_closed or any(region.closed for region in self.regions)

    def add(
        self,
        name: str,
        array: Any,
        *,
        shape: Sequence[int] | None = None,
        box: Box | None = None,
        dtype: object = None,
        mesh: str = "",
        scale_of: str | None = None,
        block: Sequence[int] = (),
    ) -> None:
        """A box of a parameter is stored in this array, which must stay at its address.

        array: numpy, torch on the CPU or on an NVIDIA GPU, or anything with `__cuda_array_interface__`. The innermost
            dimension has no gaps, and the others are in C order, as in a slice: neither transposed nor broadcast.
        At an inference rank it must be writable. For a DTensor, use torch_tensors.add_tensor().
        name, shape, box, mesh, scale_of, block: as for Holding; shape None: the array's; box None: the whole parameter.
        dtype: of elements that are stored in an array of another type, "bfloat16" in uint16 or "float8_e4m3fn" in
            uint8: a name, or torch's type.
        A UsageError names the parameter, and nothing is added.
        """
        piece = self.add_unwatched(name, array, shape, box, dtype, mesh, scale_of, block)
        if isinstance(piece.owner, _Tensor) and 0 not in piece.extent:
            self.watch(name, partial(place_of, piece.owner.tensor))

    def add_unwatched(
        self,
        name: str,
        array: Any,
        shape: Sequence[int] | None,
        box: Box | None,
        dtype: object,
        mesh: str,
        scale_of: str | None,
        block: Sequence[int],
    ) -> _Piece:
        """Like add(), for arrays that nobody else can move."""
        if self._inventory is not None:
            raise UsageError(f"{name}: this memory is registered already, nothing more can be added")
        if not isinstance(name, str):
            raise UsageError(f"name is {name!r}, must be a parameter's, of the checkpoint")
        piece = _piece_of(name, array, dtype)
        if piece.is_read_only and self.role == "target":
            raise UsageError(f"{name}: the array is read-only, and weights are written into it")
        whole, place = _place_of(name, piece.extent if shape is None else shape, box)
        if tuple(stop - start for start, stop in place) != piece.extent:
            raise UsageError(f"{name}: the array has the shape {piece.extent}, its box {place} of {whole} has not")
        self._names.add(name)
        if 0 in piece.extent:  # an uneven shard may have nothing here
            return piece
        holding = Holding(name, piece.dtype, whole, place, 0, 0, piece.strides, mesh, scale_of, _block_of(name, block))
        check_holding(holding)
        if scale_of is not None and any(size != 1 for size in holding.block[:-2]):
            raise UsageError(
                f"{name}: blocks of {holding.block} share a scale, must be 1 in all dimensions but the last two"
            )
        self._added.append((holding, piece))
        if piece.gpu:
            self._gpus.add(piece.gpu)
        return piece

    def watch(self, name: str, place: Callable[[], Place]) -> None:
        """check_in_place() refuses what lies elsewhere, or otherwise, than now. place: says how, see place_of()."""
        self._watched.append((name, place, place()))

    def check_in_place(self) -> None:
        """UsageError names a tensor of torch that lies elsewhere than when it was added, or has another type or other
        strides; 0.5 to 1 us for each.

        `tensor.data = another` and `module.to(...)` move it. What replaced it in its module is not seen.
        """
        for name, place, before in self._watched:
            if (now := place()) != before:
                what = f"lies elsewhere than when it was added {_MOVED}"
                if now[0] == before[0]:
                    what = f"was {_form(before)} when it was added, and is {_form(now)} now {_RESHAPED}"
                raise UsageError(
                    f"{name}: its tensor {what}. Next: copy new values into it; or close() this trainer or receiver, "
                    "and make one with a new WeightMemory"
                )

    @property
    def names(self) -> set[str]:
        """Names of the parameters that were added, in whole or in part."""
        return set(self._names)

    def gpus(self) -> list[str]:
        """Of what was added: "cuda:0" and its like. Before inventory() without those of arrays that are neither torch's
        nor speak DLPack. Any thread.
        """
        return sorted({*self._gpus, *gpu.gpus_of(list(self.regions))})

    def inventory(self) -> Inventory:
        """Registers what is not registered yet, and says what is stored where, with current descriptors.

        The first call takes some 50 us for each array: run it in a thread if an event loop must go on meanwhile.
        """
        with self._registering:
            if self.closed:
                raise UsageError(f"memory of {called(self.role, self.rank)} was closed")
            if self._inventory is None:
                self._register()
            infos = [RegionInfo(bytes(region.descriptor), region.nbytes) for region in self.regions]
            if self._inventory is None:
                self._inventory = Inventory.of(self.role, self.rank, infos, self._placed())
            elif self._inventory.regions != tuple(infos):  # some were revoked and renewed
                old = self._inventory
                self._inventory = Inventory(old.role, old.rank, infos, old.names, old.meshes, old.rows)
            return self._inventory

    def like(self, array: Any, regions: Sequence[xr.Region]) -> Any:
        """What lies in these regions where the array lies in ours: a numpy array that shares their memory.

        array: as given to add(). regions: as many and as long as ours.
        On a GPU it is the array itself if the regions are ours, else a torch tensor, of torch's type of that name,
        which may be used as long as the regions are open.
        """
        piece = _piece_of("like()", array, None)
        if 0 in piece.extent:  # it lies nowhere
            return array
        index = self._region_of(piece)
        if index is None:
            raise UsageError("the array lies in none of the regions of this memory")
        if regions[index].device != "cpu" and regions[index] is self.regions[index]:
            return array
        return self._view(piece, index, regions)

    def copy_from(self, regions: Sequence[xr.Region]) -> None:
        """Copies what lies in these regions, as many and as long as ours, to where our arrays are, which are whole
        then, and torn if it fails in the middle. Blocks; any thread. Nobody may read or write the arrays meanwhile.

        On a GPU, waits for its kernels before and after. UsageError once it was closed.
        """
        with self._registering:
            if self.closed:
                raise UsageError(f"memory of {called(self.role, self.rank)} was closed")
            devices = gpu.gpus_of(regions)
            views = []
            for _, piece in self._added:
                index = self._region_of(piece)
                assert index is not None
                views.append((self._view(piece, index, self.regions), self._view(piece, index, regions)))
            gpu.wait_for_kernels(devices)
            self.is_torn = True
            for own, other in views:
                if isinstance(own, np.ndarray):
                    own[...] = other
                else:
                    with gpu.told("copying weights back from spare memory"):
                        own.copy_(other)
            gpu.wait_for_kernels(devices)
            self.is_torn = False

    def _view(self, piece: _Piece, index: int, regions: Sequence[xr.Region]) -> Any:
        """The part of that region which corresponds to the piece in ours."""
        offset = piece.address - self.regions[index].base
        if regions[index].device != "cpu":
            return gpu.tensor_at(regions[index], offset, piece.extent, piece.strides, piece.dtype)
        memory = regions[index].array()
        return np.ndarray(piece.extent, storage(piece.dtype), memory.data, offset, piece.strides)

    def close(self) -> None:
        """Closes the regions that were made here, and releases the arrays. Idempotent."""
        with self._registering:
            self._is_closed = True
            for region in self.regions[self._given :]:
                region.close()
            del self.regions[self._given :]
            self._made.clear()
            self._added.clear()
            self._watched.clear()

    def _register(self) -> None:
        blocks = dict.fromkeys(
            (piece.block, piece.is_cuda) for _, piece in self._added if self._region_of(piece) is None
        )
        access = "read" if self.role == "trainer" else "write"
        for begin, end in _as_added(list(blocks)) if self._is_simulated else _merged(sorted(blocks), _next_to):
            self.regions.append(self.engine.register((begin, end - begin), access=access))
            insort(self._made, (begin, len(self.regions) - 1))

    def _region_of(self, piece: _Piece) -> int | None:
        """The index of the region that it lies in; None when it is in none yet."""
        for index, region in enumerate(self.regions[: self._given]):
            if region.base <= piece.address < region.base + region.nbytes:
                return index
        at = bisect_right(self._made, (piece.address, len(self.regions))) - 1
        if at < 0:
            return None
        begin, index = self._made[at]
        return index if piece.address < begin + self.regions[index].nbytes else None

    def _placed(self) -> list[Holding]:
        placed = []
        for holding, piece in self._added:
            index = self._region_of(piece)
            assert index is not None
            offset = piece.address - self.regions[index].base
            placed.append(
                Holding(
                    holding.name, holding.dtype, holding.shape, holding.box, index, offset, holding.strides,
                    holding.mesh, holding.scale_of, holding.block,
                )
            )  # fmt: skip
        return placed


def _as_added(blocks: Sequence[tuple[tuple[int, int], bool]]) -> list[tuple[int, int]]:
    """Merges overlapping blocks, in the order in which they were added, so that addresses do not matter."""
    merged = _merged(sorted(blocks), lambda end, _: end)
    begins = [begin for begin, _ in merged]
    return list(dict.fromkeys(merged[bisect_right(begins, begin) - 1] for (begin, _), _ in blocks))


def _merged(
    blocks: Sequence[tuple[tuple[int, int], bool]], next_to: Callable[[int, bool], int]
) -> list[tuple[int, int]]:
    """Neighbours made one; ascending. On a GPU only within an allocation: the driver maps no two."""
    merged: list[tuple[int, int]] = []
    before: tuple[int, int] | None = None
    for (begin, end), is_cuda in blocks:
        allocation = gpu_allocation(begin) if is_cuda else None
        if merged and allocation == before and begin < next_to(merged[-1][1], is_cuda):
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
        before = allocation
    return merged


def _next_to(end: int, is_cuda: bool) -> int:
    """Blocks that begin before this are neighbours of one that ends here."""
    return end + _PADDING_BYTES if is_cuda else (-(-end // mmap.PAGESIZE) + 1) * mmap.PAGESIZE


def _place_of(name: str, shape: Sequence[int], box: Box | None) -> tuple[tuple[int, ...], Box]:
    """The whole parameter's shape, and what of it is here."""
    try:
        whole = tuple(operator.index(n) for n in shape)
        if box is None:
            return whole, tuple((0, n) for n in whole)
        return whole, tuple((operator.index(start), operator.index(stop)) for start, stop in box)
    except (TypeError, ValueError):
        raise UsageError(
            f"{name}: shape {shape!r} must be a number, and box {box!r} a (start, stop), for each dimension"
        ) from None


def _block_of(name: str, block: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(n) for n in block)
    except TypeError:
        raise UsageError(f"{name}: block {block!r} must be a whole number for each dimension") from None


def _piece_of(name: str, array: Any, dtype: object) -> _Piece:
    if isinstance(array, np.ndarray):
        return _numpy_piece(name, array, dtype)
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    if torch is not None and isinstance(array, torch.Tensor):
        return _torch_piece(name, array, dtype)
    if hasattr(array, "__cuda_array_interface__"):
        return _cuda_piece(name, array, dtype)
    raise UsageError(f"{name}: a {type(array).__name__} is neither a numpy array nor a torch tensor")


def _numpy_piece(name: str, array: np.ndarray[Any, Any], dtype: object) -> _Piece:
    kind = _kind_of(name, _named(array.dtype), dtype)
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    if min(array.strides, default=0) < 0 or min(base.strides, default=0) < 0:
        raise UsageError(f"{name}: the array is reversed, strides {array.strides}")
    begin = base.ctypes.data
    block = begin, begin + _span(base.shape, base.strides, base.itemsize)
    is_read_only = not array.flags.writeable
    return _Piece(array.ctypes.data, array.strides, array.shape, kind, block, array, False, is_read_only)


def _cuda_piece(name: str, array: Any, dtype: object) -> _Piece:
    """GPU memory exported by Numba's protocol: CuPy, JAX."""
    interface = array.__cuda_array_interface__
    stored, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    kind = _kind_of(name, _named(stored), dtype)
    dense = [stored.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    strides = tuple(interface.get("strides") or dense)
    if min(strides, default=0) < 0:
        raise UsageError(f"{name}: the array is reversed, strides {strides}")
    begin, is_read_only = int(interface["data"][0]), bool(interface["data"][1])
    block = begin, begin + _span(shape, strides, stored.itemsize)
    return _Piece(begin, strides, shape, kind, block, array, True, is_read_only, _gpu_of(array))


def _gpu_of(array: Any) -> str:
    """The GPU according to DLPack; "" if the array does not support DLPack."""
    asked = getattr(array, "__dlpack_device__", None)
    kind, number = (0, 0) if asked is None else asked()
    return f"cuda:{int(number)}" if int(kind) == _DLPACK_CUDA else ""


def _named(stored: np.dtype[Any]) -> str:
    return stored.name if stored.isnative else str(stored)


def _kind_of(name: str, stored: str, dtype: object) -> str:
    """stored: the type of the array."""
    if dtype is None:
        return stored
    kind = checked_dtype(name, dtype)
    if stored not in (kind, storage(kind).name):
        raise UsageError(f"{name}: {kind} lies in an array of {storage(kind)}, not of {stored}")
    return kind


def _span(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes from the first element to the end of the last."""
    return sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + itemsize


def _torch_piece(name: str, tensor: Any, dtype: object) -> _Piece:
    if hasattr(tensor, "to_local"):
        raise UsageError(
            f"{name}: the tensor is a {type(tensor).__name__}: "
            "crossrail.weights.inventory.torch_tensors.add_tensor() takes it"
        )
    stored, begin = torch_storage(name, tensor)
    strides = tuple(step * tensor.element_size() for step in tensor.stride())
    kind = _kind_of(name, str(tensor.dtype).removeprefix("torch."), dtype)
    block = begin, begin + stored.nbytes()
    owner, is_cuda = _Tensor(tensor, stored), tensor.device.type == "cuda"
    on = str(tensor.device) if is_cuda else ""
    return _Piece(tensor.data_ptr(), strides, tuple(tensor.shape), kind, block, owner, is_cuda, gpu=on)


def torch_storage(name: str, tensor: Any) -> tuple[Any, int]:
    """A torch tensor's storage, and the address at which it begins; no DTensor's.

    UsageError, naming the parameter, for a device or layout that is not taken, and where the memory does not hold the
    tensor's values: those of a class that keeps them in other tensors, those whose storage was freed, and those that
    torch negates as they are read.
    """
    if tensor.device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"{name}: the tensor is on {tensor.device}, only those on the CPU or a GPU of NVIDIA's are taken"
        )
    if tensor.layout is not sys.modules["torch"].strided:
        raise UsageError(f"{name}: the tensor's layout is {tensor.layout}, must be torch.strided")
    try:
        stored = tensor.untyped_storage()
        begin = stored.data_ptr()
        tensor.stride()  # nested ones have none
    except RuntimeError as error:
        raise UsageError(
            f"{name}: the tensor, a {type(tensor).__name__}, has no memory of its own ({error}). Next: add the tensors "
            "that it is made of, or hold a plain copy, and add that"
        ) from None
    if not begin and tensor.numel():
        raise UsageError(
            f"{name}: the tensor, a {type(tensor).__name__}, has no memory now: its storage was freed, as FSDP does "
            "with unsharded parameters, or it never had any. Next: add the sharded parameters, those after reshard()"
        )
    if tensor.is_neg() or tensor.is_conj():
        raise UsageError(
            f"{name}: torch negates or conjugates it as it is read. Next: add a copy that resolve_neg() made"
        )
    return stored, begin
