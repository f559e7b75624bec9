"""A safetensors checkpoint as a source of weights: inference ranks are filled from it by the same plans as updates use.

The format is https://github.com/huggingface/safetensors: eight bytes with the header's length, the header in JSON, the
tensors. Files are mapped, not read: pages come in as they are written to inference ranks.
"""

from __future__ import annotations

import heapq
import json
import math
import mmap
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

import crossrail as xr
from crossrail.errors import UsageError
from crossrail.weights.conversion.casts import storage
from crossrail.weights.inventory.holdings import DIMS
from crossrail.weights.inventory.memory import WeightMemory

READERS_MAX = 1 << 16
_HEADER_BYTES_MAX = 100 << 20
_DIMS_MAX = 64  # numpy's
_SHAPE_TOLD = 120  # characters, in an error
_LENGTH_BYTES = 8
_LFS = b"version https://git-lfs"
_INDEX = "model.safetensors.index.json"
_EXPERT = re.compile(r"(.+\.experts)\.(0|[1-9][0-9]{0,8})\.(.+)")
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip


_Tensor: TypeAlias = tuple[str, npt.NDArray[Any]]  # its dtype, by our name for it; in storage() of that


class _Entry(Struct):
    dtype: str
    shape: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=_DIMS_MAX)]
    data_offsets: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]


class _Index(Struct):
    weight_map: dict[str, Annotated[str, Meta(pattern=r"^[^\x00]+$")]]


class Checkpoint:
    """Tensors of one or more files, mapped read-only. Closed by close(), after memories that hold it.

    path: a .safetensors file, or a folder with some; with an index beside them (model.safetensors.index.json) those
    that it names. UsageError for a malformed file, naming it and the tensor, and for what the index names and is not
    there, as after a download that was cut off. A tensor of a type that is not taken is refused when it is asked for.
    """

    def __init__(self, path: str | Path) -> None:
        self._tensors: dict[str, _Tensor] = {}
        self._refused: dict[str, str] = {}  # why, by name
        files, indexed = _files(Path(path))
        where = {name: file for file in files for name in self._add(file)}
        for name, file in indexed.items():
            if where.get(name) != file:
                raise UsageError(f"{file}: {name!r} is not in it, and {_INDEX} says that it is")

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in order."""
        return sorted([*self._tensors, *self._refused])

    def nbytes(self, names: Sequence[str]) -> int:
        """Bytes of these tensors together."""
        return sum(self._tensor(name)[1].nbytes for name in names)

    def memory(self, engine: xr.Engine, rank: int, count: int, names: Sequence[str] | None = None) -> WeightMemory:
        """What rank `rank` of `count` readers holds, as a trainer would: whole tensors, about as many bytes each.
        UsageError for more than READERS_MAX.

        names: those wanted; None: all. Experts that lie there one by one are also held as parts of a stack of all of
        them, under the name without a number, as families.py has it: inference ranks may want either.
        """
        if not 0 <= rank < count <= READERS_MAX:
            raise UsageError(f"reader {rank} of {count} is none: there may be {READERS_MAX}, numbered from 0")
        memory = WeightMemory(engine, "trainer", rank)
        held = [(0, reader) for reader in range(count)]  # the least first
        wanted = self.names if names is None else names
        stacks = self._stacks(wanted)
        for name in sorted(wanted, key=lambda name: (-self._tensor(name)[1].nbytes, name)):
            dtype, array = self._tensor(name)
            nbytes, reader = held[0]
            heapq.heapreplace(held, (nbytes + array.nbytes, reader))
            if reader == rank:
                memory.add(name, array, dtype=dtype)
                if name in stacks:
                    stack, expert, experts = stacks[name]
                    shape = (experts, *array.shape)
                    box = ((expert, expert + 1), *((0, extent) for extent in array.shape))
                    memory.add(stack, array[np.newaxis], shape=shape, box=box, dtype=dtype)
        return memory

    def close(self) -> None:
        """Idempotent. A file is unmapped once nobody has an array of it: an exception on its way here may have some."""
        self._tensors.clear()

    def _tensor(self, name: str) -> _Tensor:
        if name in self._refused:
            raise UsageError(self._refused[name])
        if name not in self._tensors:
            raise UsageError(f"the checkpoint has no tensor {name!r}")
        return self._tensors[name]

    def _stacks(self, names: Sequence[str]) -> dict[str, tuple[str, int, int]]:
        """By an expert's name: its stack's name, its number, and how many experts the stack has.

        Only if all experts from 0 on exist and are alike, and nothing else has the stack's name.
        """
        found: dict[str, dict[int, str]] = {}
        for name in names:
            if match := _EXPERT.fullmatch(name):
                found.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = name
        return {
            name: (stack, expert, len(experts))
            for stack, experts in found.items()
            if stack not in self._tensors and stack not in self._refused and self._are_alike(experts)
            for expert, name in experts.items()
        }

    def _are_alike(self, experts: Mapping[int, str]) -> bool:
        """Whether the experts are numbered without gaps, have one dtype and shape, and the shape has room for one more
        dimension.
        """
        kinds = {(dtype, array.shape) for dtype, array in map(self._tensor, experts.values())}
        return max(experts) == len(experts) - 1 and len(kinds) == 1 and len(kinds.pop()[1]) < DIMS

    def _add(self, file: Path) -> list[str]:
        """The names of its tensors."""
        length = file.stat().st_size
        if length < _LENGTH_BYTES:
            raise UsageError(f"{file}: {length} bytes, a safetensors file has more")
        with file.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        if mapped[: len(_LFS)] == _LFS:
            raise UsageError(f"{file}: a pointer of Git LFS, the tensors are elsewhere. Next: git lfs pull")
        header_bytes = int.from_bytes(mapped[:_LENGTH_BYTES], "little")
        begin = _LENGTH_BYTES + header_bytes
        if header_bytes > _HEADER_BYTES_MAX or begin > length:
            raise UsageError(f"{file}: a header of {header_bytes} bytes in a file of {length}")
        try:
            header = msgspec.json.decode(mapped[_LENGTH_BYTES:begin], type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"{file}: no safetensors header: {error}") from None
        header.pop("__metadata__", None)
        entries = {name: _entry_of(file, name, raw) for name, raw in header.items()}
        _check_once(file, mapped[_LENGTH_BYTES:begin])
        _check_apart(file, entries)
        for name, tensor in entries.items():
            if name in self._tensors or name in self._refused:
                raise UsageError(f"{file}: {name!r} is in another file too")
            if tensor.dtype in _DTYPES:
                self._tensors[name] = _tensor_of(file, name, tensor, mapped, begin)
            else:
                self._refused[name] = (
                    f"{file}: {name!r} is of {tensor.dtype}, which is none of {', '.join(_DTYPES)}. Next: leave it out "
                    "(crossrail weights load --ignore), or convert it"
                )
        _check_filled(file, entries, length - begin)
        return [*entries]


def _entry_of(file: Path, name: str, raw: msgspec.Raw) -> _Entry:
    try:
        return msgspec.json.decode(raw, type=_Entry)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{file}: {name!r}: {error}") from None


def _check_once(file: Path, header: bytes) -> None:
    """No name twice, which the format forbids: of two tensors a decoder keeps one, and does not say so."""

    def checked(pairs: list[tuple[str, object]]) -> None:
        name, count = Counter(name for name, _ in pairs).most_common(1)[0] if pairs else ("", 1)
        if count > 1:
            raise UsageError(f"{name!r} occurs {count} times")

    try:
        json.loads(header, object_pairs_hook=checked)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: no safetensors header: {error}") from None


def _check_filled(file: Path, entries: Mapping[str, _Entry], length: int) -> None:
    """All bytes after the header must belong to tensors, as the format demands: otherwise the header does not match
    them.

    entries: disjoint.
    """
    end, before = 0, "the header"
    for (begin, stop), name in sorted((entry.data_offsets, name) for name, entry in entries.items()):
        if begin > end:
            raise UsageError(f"{file}: between {before} and {name!r} lie {begin - end} bytes that are of no tensor")
        end, before = stop, repr(name)
    if end != length:
        raise UsageError(f"{file}: {before} ends at {end}, and what follows the header at {length}")


def _check_apart(file: Path, entries: Mapping[str, _Entry]) -> None:
    placed = sorted((entry.data_offsets, name) for name, entry in entries.items())
    for ((_, end), before), ((begin, _), name) in pairwise(placed):
        if begin < end:
            raise UsageError(f"{file}: {name!r} begins at {begin}, where {before!r} has not ended: that is at {end}")


def _tensor_of(file: Path, name: str, entry: _Entry, mapped: mmap.mmap, begin: int) -> _Tensor:
    dtype = _DTYPES[entry.dtype]
    kind = storage(dtype)
    count = math.prod(entry.shape)
    first, last = entry.data_offsets
    if last - first != count * kind.itemsize or begin + last > len(mapped):
        raise UsageError(f"{file}: {name!r} of shape {_told(entry)} in {entry.dtype} does not lie at {first}..{last}")
    try:
        return dtype, np.frombuffer(mapped, kind, count, begin + first).reshape(entry.shape)
    except ValueError as error:  # of no elements, in dimensions that numpy cannot count
        raise UsageError(f"{file}: {name!r} of shape {_told(entry)}: {error}") from None


def _told(entry: _Entry) -> str:
    shape = str(entry.shape)
    return shape if len(shape) <= _SHAPE_TOLD else f"{shape[:_SHAPE_TOLD]}..."


def _files(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files to read; and for each tensor in an index, the file that it names."""
    if path.is_file():
        return [path], {}
    index = path / _INDEX
    if index.is_file():
        indexed = _indexed(index)
        files = sorted(set(indexed.values()))
        if missing := [file.name for file in files if not file.is_file()]:
            raise UsageError(
                f"{index}: {missing[0]} is not there; of {len(files)} files {len(missing)} are missing. Next: fetch "
                "the whole checkpoint again"
            )
        return files, indexed
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{path}: no .safetensors file there")
    return files, {}


def _indexed(index: Path) -> dict[str, Path]:
    try:
        found = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{index}: no index: {error}") from None
    for file in found.values():
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise UsageError(f"{index}: {file!r} is not in its folder")
    return {name: index.parent / file for name, file in found.items()}
