"""What a process holds of a model's parameters, and where in its memory. Pure data; mistakes are refused by parameter.

Parameters have the names and shapes of the checkpoint (mapping.py translates a framework's own), and a holding is a box
of one of them at a place in a registered region. So a fused tensor is several holdings in one piece of memory, a shard
is a smaller box, and neither side knows how the other is sharded.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from crossrail.errors import UsageError
from crossrail.weights.dtypes import DTYPES, ITEM_BYTES, dtype_code

Role: TypeAlias = Literal["trainer", "target"]
Box: TypeAlias = tuple[tuple[int, int], ...]
Rows: TypeAlias = npt.NDArray[Any]

VERSION = 1
DIMS = 5
REGION_BYTES_MAX = 1 << 44
_EXTENT_MAX = 1 << 48
_ELEMENTS_MAX = 1 << 56
_ROWS_MAX = 1 << 24
_RANK_MAX = (1 << 31) - 1
_NAME_MAX = 512
_MESH_MAX = 128

# One holding. Dimensions that it lacks follow those it has, with the extent 1. name, mesh and scale_of are indices into
# the inventory's names and meshes (scale_of -1: none); dtype into DTYPES; offset and strides are bytes.
HOLDING = np.dtype(
    [
        ("name", "<i4"),
        ("mesh", "<i4"),
        ("scale_of", "<i4"),
        ("region", "<i4"),
        ("dtype", "<i2"),
        ("dims", "<i2"),
        ("offset", "<i8"),
        ("shape", "<i8", DIMS),
        ("start", "<i8", DIMS),
        ("stop", "<i8", DIMS),
        ("strides", "<i8", DIMS),
        ("block", "<i8", DIMS),
    ]
)


class RegionInfo(Struct, frozen=True, array_like=True):
    """A registered region: its descriptor as bytes (RegionDescriptor.to_bytes()), and how long it is."""

    descriptor: Annotated[bytes, Meta(max_length=4096)]
    nbytes: Annotated[int, Meta(ge=0, le=REGION_BYTES_MAX)]


class Holding(Struct, frozen=True):
    """A box (index ranges) of one parameter, at a place in memory.

    name: of the parameter in the checkpoint. shape: of the whole parameter. box: (start, stop) in elements, for each
        dimension; () for a scalar. dtype: of the elements in this memory.
    region: index of the region in the inventory; offset: bytes from its start to the box's first element.
    strides: in bytes, for each dimension; None: the box is stored in C order without gaps. The elements of the
        innermost dimension are always contiguous.
    mesh (trainers): a name for the processes that share something, as in a DeviceMesh. The boxes of a parameter in a
        mesh are equal or disjoint, and together make one box, its hull: for an expert-parallel mesh the experts of the
        mesh, otherwise mostly the whole parameter. The hulls of different meshes are equal or disjoint, and make up the
        whole parameter; what is left of a mesh that lost processes may have holes or be less, and is not used where
        another mesh has all of it; where none has, PlanOptions.partial.
    scale_of, block (targets): this holds the fp32 scales of the parameter of that name, whose holdings here are
        float8_e4m3fn; block: elements per scale in each dimension. shape and box then count blocks.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    region: int
    offset: int
    strides: tuple[int, ...] | None = None
    mesh: str = ""
    scale_of: str | None = None
    block: tuple[int, ...] = ()

    @classmethod
    def whole(cls, name: str, dtype: str, shape: Sequence[int], region: int, offset: int, **more: Any) -> Holding:
        """A parameter that is here in one piece."""
        return cls(name, dtype, tuple(shape), tuple((0, n) for n in shape), region, offset, **more)


class _Wire(Struct, frozen=True, tag="crossrail.weights.inventory", forbid_unknown_fields=True):
    version: int
    role: Role
    rank: Annotated[int, Meta(ge=0, le=_RANK_MAX)]
    regions: Annotated[tuple[RegionInfo, ...], Meta(max_length=1 << 16)]
    names: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=_NAME_MAX)], ...], Meta(max_length=_ROWS_MAX)]
    meshes: Annotated[tuple[Annotated[str, Meta(max_length=_MESH_MAX)], ...], Meta(max_length=1 << 16)]
    rows: bytes


class Inventory:
    """All holdings of one process. Immutable; any thread.

    role: "trainer" or "target". rank: its number among those of its role; the numbers need not be 0, 1, 2...
    rows: one HOLDING each, read-only; names, meshes: what they refer to.
    Made by Inventory.of() from Holdings, by from_bytes() from the bytes of to_bytes(), or directly from rows if there
    are many. A malformed one raises UsageError.
    """

    def __init__(
        self,
        role: Role,
        rank: int,
        regions: Iterable[RegionInfo],
        names: Sequence[str],
        meshes: Sequence[str],
        rows: Rows,
    ) -> None:
        check_member(role, rank)
        self.role: Role = role
        self.rank = operator.index(rank)  # numpy's numbers and texts are no others
        self.regions = tuple(regions)
        self.names = _plain(names)
        self.meshes = _plain(meshes)
        self.rows = rows
        self._check()
        rows.flags.writeable = False

    @classmethod
    def of(cls, role: Role, rank: int, regions: Iterable[RegionInfo], holdings: Iterable[Holding]) -> Inventory:
        """From Holdings. Those with an empty box are left out: an uneven shard may have nothing on some rank."""
        held = [holding for holding in holdings if all(start != stop for start, stop in holding.box)]
        names: dict[str, int] = {}
        meshes: dict[str, int] = {}

        def row(holding: Holding) -> tuple[Any, ...]:
            check_holding(holding)
            name = names.setdefault(holding.name, len(names))
            mesh = meshes.setdefault(holding.mesh, len(meshes))
            scale_of = -1 if holding.scale_of is None else names.setdefault(holding.scale_of, len(names))
            return name, mesh, scale_of, *_place(holding)

        rows = np.fromiter(map(row, held), HOLDING, len(held))
        return cls(role, rank, regions, list(names), list(meshes), rows)

    @property
    def holdings(self) -> Iterator[Holding]:
        """The rows as Holdings, for people and small inventories."""
        for row in self.rows:
            dims = int(row["dims"])
            scaled = int(row["scale_of"]) >= 0
            yield Holding(
                name=self.names[row["name"]],
                dtype=DTYPES[row["dtype"]],
                shape=tuple(row["shape"][:dims].tolist()),
                box=tuple(zip(row["start"][:dims].tolist(), row["stop"][:dims].tolist(), strict=True)),
                region=int(row["region"]),
                offset=int(row["offset"]),
                strides=tuple(row["strides"][:dims].tolist()),
                mesh=self.meshes[row["mesh"]],
                scale_of=self.names[row["scale_of"]] if scaled else None,
                block=tuple(row["block"][:dims].tolist()) if scaled else (),
            )

    # ---- telling others

    def to_bytes(self) -> bytes:
        """The inventory as bytes, for a message or a file."""
        wire = _Wire(VERSION, self.role, self.rank, self.regions, self.names, self.meshes, self.rows.tobytes())
        return msgspec.msgpack.encode(wire)

    @classmethod
    def from_bytes(cls, data: bytes) -> Inventory:
        """The inverse of to_bytes(). Raises UsageError for anything else."""
        try:
            wire = msgspec.msgpack.decode(data, type=_Wire)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"not an inventory: {error}") from None
        if wire.version != VERSION:
            raise UsageError(
                f"inventory of version {wire.version}, this is version {VERSION}: use the same on all sides"
            )
        if len(wire.rows) % HOLDING.itemsize:
            raise UsageError(f"inventory with {len(wire.rows)} bytes of rows, {HOLDING.itemsize} each")
        rows = np.frombuffer(wire.rows, HOLDING)
        return cls(wire.role, wire.rank, wire.regions, wire.names, wire.meshes, rows)

    # ---- refusing

    def _check(self) -> None:
        rows = self.rows
        if rows.dtype != HOLDING or rows.ndim != 1:
            raise UsageError(f"rows must be one-dimensional and of the dtype HOLDING, not {rows.dtype}")
        if len(set(self.names)) != len(self.names):
            raise UsageError(f"{self}: a name is listed twice")
        if too_long := next((region.nbytes for region in self.regions if region.nbytes > REGION_BYTES_MAX), None):
            raise UsageError(f"{self}: a region of {too_long} bytes, at most {REGION_BYTES_MAX} are possible")
        if not len(rows):
            return
        self._refuse((rows["name"] < 0) | (rows["name"] >= len(self.names)), "names no parameter", named=False)
        self._refuse((rows["mesh"] < 0) | (rows["mesh"] >= len(self.meshes)), "names no mesh")
        self._refuse((rows["region"] < 0) | (rows["region"] >= len(self.regions)), "region", rows["region"])
        self._refuse((rows["dtype"] < 0) | (rows["dtype"] >= len(DTYPES)), "has no dtype", rows["dtype"])
        self._refuse((rows["dims"] < 0) | (rows["dims"] > DIMS), f"has more than {DIMS} dimensions", rows["dims"])
        beyond = np.arange(DIMS) >= rows["dims"][:, np.newaxis]
        self._refuse((beyond & (rows["shape"] != 1)).any(1), "shape", rows["shape"])
        self._refuse(((rows["shape"] < 1) | (rows["shape"] > _EXTENT_MAX)).any(1), "shape", rows["shape"])
        # In floating point, which does not overflow; all that is computed later then does not either.
        elements = rows["shape"].astype(np.float64).prod(axis=1)
        self._refuse(elements > _ELEMENTS_MAX, "has too many elements: shape", rows["shape"])
        empty = (rows["start"] < 0) | (rows["start"] >= rows["stop"]) | (rows["stop"] > rows["shape"])
        self._refuse(empty.any(1), "box is empty or not in the shape: starts at", rows["start"])
        self._check_scales()
        self._check_memory()

    def _check_scales(self) -> None:
        rows = self.rows
        scales = rows["scale_of"] >= 0
        self._refuse((rows["scale_of"] < -1) | (rows["scale_of"] >= len(self.names)), "scales of no parameter")
        self._refuse(scales & (rows["dtype"] != dtype_code("float32")), "scales must be float32")
        self._refuse(scales & (rows["block"] < 1).any(1), "scales: blocks must be 1 or more", rows["block"])

    def _check_memory(self) -> None:
        rows = self.rows
        extent = rows["stop"] - rows["start"]
        item = ITEM_BYTES[rows["dtype"]]
        self._refuse((rows["strides"] < 0).any(1) | (rows["offset"] < 0), "offset or strides below 0")
        self._refuse(rows["offset"] > REGION_BYTES_MAX, "ends behind its region, at", rows["offset"])
        span = item.copy()
        for dim in reversed(range(DIMS)):
            # C order, gaps allowed: a step of an outer dimension passes all that lies within it.
            stride, count = rows["strides"][:, dim], extent[:, dim]
            self._refuse(stride > REGION_BYTES_MAX // count, "is longer than any region: strides", rows["strides"])
            self._refuse((count > 1) & (stride < span), "strides are not in C order (transposed?)", rows["strides"])
            innermost = (rows["dims"] == dim + 1) & (count > 1)
            self._refuse(innermost & (stride != item), "innermost dimension has gaps (transposed?)", rows["strides"])
            span = np.where(count > 1, (count - 1) * stride + span, span)
        nbytes = np.array([region.nbytes for region in self.regions], np.int64)
        end = rows["offset"] + span
        self._refuse(end > nbytes[rows["region"]], "ends behind its region, at", end)

    def _refuse(self, bad: Any, what: str, values: Any = None, *, named: bool = True) -> None:
        if not bad.any():
            return
        row = int(np.argmax(bad))
        name = repr(self.names[self.rows["name"][row]]) if named else f"row {row}"
        value = ""
        if values is not None:
            told = np.asarray(values[row])
            value = f" {told[: max(int(self.rows['dims'][row]), 1)].tolist() if told.ndim else told}"
        raise UsageError(f"{self}: {name}: {what}{value}")

    def __repr__(self) -> str:
        return f"<Inventory of {called(self.role, self.rank)}, {len(self.rows)} holdings>"


def called(role: Role, rank: int) -> str:
    """A member, for people."""
    return f"trainer {rank}" if role == "trainer" else f"inference rank {rank}"


def check_member(role: object, rank: object) -> None:
    """UsageError unless these identify a trainer or an inference rank."""
    if role not in ("trainer", "target"):
        raise UsageError(f"role={role!r} must be 'trainer' or 'target', an inference rank")
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or not 0 <= rank <= _RANK_MAX:
        raise UsageError(f"rank={rank!r} must be a whole number in 0..{_RANK_MAX}")


def check_holding(holding: Holding) -> None:
    """UsageError for a holding that no inventory accepts, wherever it is in memory: Inventory's checks of all rows, for
    one.

    The box must not be empty.
    """
    name, dims = repr(holding.name), len(holding.shape)
    _check_text("name", holding.name, 1, _NAME_MAX)
    _check_text(f"{name}: mesh", holding.mesh, 0, _MESH_MAX)
    if dims > DIMS:
        raise UsageError(f"{name}: shape {holding.shape} has more than {DIMS} dimensions")
    if len(holding.box) != dims:
        raise UsageError(f"{name}: box {holding.box} does not have the {dims} dimensions of the shape")
    if not all(0 <= start < stop <= extent for (start, stop), extent in zip(holding.box, holding.shape, strict=True)):
        raise UsageError(f"{name}: box {holding.box} is empty or not in the shape {holding.shape}")
    if max(holding.shape, default=1) > _EXTENT_MAX or math.prod(holding.shape) > _ELEMENTS_MAX:
        raise UsageError(f"{name}: has too many elements: shape {holding.shape}")
    dtype = checked_dtype(holding.name, holding.dtype)
    if holding.scale_of is not None:
        _check_scale(name, dtype, holding.block, dims)
    item_bytes = int(ITEM_BYTES[dtype_code(dtype)])
    if holding.strides is not None:
        _check_strides(name, [stop - start for start, stop in holding.box], holding.strides, item_bytes)


def _check_scale(name: str, dtype: str, block: Sequence[int], dims: int) -> None:
    if len(block) != dims:
        raise UsageError(f"{name}: block {block} does not have the {dims} dimensions of the shape")
    if not all(1 <= size <= _EXTENT_MAX for size in block):
        raise UsageError(f"{name}: scales: blocks must be 1 or more, at most {_EXTENT_MAX}, not {block}")
    if dtype != "float32":
        raise UsageError(f"{name}: scales must be float32, not {dtype}")


def checked_dtype(name: str, dtype: object) -> str:
    """Our name of a type. UsageError, naming the parameter, for one that is not taken."""
    try:
        return DTYPES[dtype_code(dtype)]
    except UsageError as error:
        raise UsageError(f"{name!r}: {error}") from None


def _check_strides(name: str, extent: Sequence[int], strides: Sequence[int], item_bytes: int) -> None:
    if len(strides) != len(extent):
        raise UsageError(f"{name}: strides {strides} do not have the {len(extent)} dimensions of the shape")
    span = item_bytes
    for dim in reversed(range(len(extent))):
        count, stride = extent[dim], strides[dim]
        if count == 1:
            continue
        is_innermost = dim == len(extent) - 1
        if stride < span or (is_innermost and stride != item_bytes):
            what = "innermost dimension has gaps (transposed?)" if is_innermost and stride else "not in C order"
            raise UsageError(
                f"{name}: {what}, strides {list(strides)} bytes: an array that is transposed, broadcast or has gaps "
                "between its innermost elements is not taken. Next: hold a contiguous copy, and add that"
            )
        span += (count - 1) * stride


def _plain(texts: Sequence[str]) -> tuple[str, ...]:
    """Python's, also of texts of another class, as numpy's are."""
    return tuple(map(str, texts))


def _check_text(what: str, text: object, least: int, most: int) -> None:
    if not isinstance(text, str) or not least <= len(text) <= most or text.encode(errors="ignore").decode() != text:
        raise UsageError(f"{what} is {text!r}, must be a text of {least}..{most} characters that UTF-8 has")


def _place(holding: Holding) -> tuple[Any, ...]:
    """The fields of HOLDING from `region` on."""
    dims = len(holding.shape)
    dtype = dtype_code(holding.dtype)
    beyond = (1,) * (DIMS - dims)
    shape, block = (*holding.shape, *beyond), (*holding.block, *(1,) * (DIMS - len(holding.block)))
    start = (*(start for start, _ in holding.box), *(0 for _ in beyond))
    stop = (*(stop for _, stop in holding.box), *beyond)
    item_bytes = int(ITEM_BYTES[dtype])
    if holding.strides is None:
        extent = np.array(stop) - np.array(start)
        strides = tuple(c_strides(extent, item_bytes).tolist())
    else:
        strides = (*holding.strides, *(item_bytes for _ in beyond))
    return holding.region, dtype, dims, holding.offset, shape, start, stop, strides, block


def c_strides(extent: npt.NDArray[np.int64], item_bytes: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Bytes from one element to the next in each dimension, for boxes without gaps. extent: shape (..., DIMS)."""
    inner = np.ones_like(extent)
    inner[..., :-1] = np.cumprod(extent[..., :0:-1], axis=-1)[..., ::-1]
    strides: npt.NDArray[np.int64] = inner * np.asarray(item_bytes)[..., np.newaxis]
    return strides
