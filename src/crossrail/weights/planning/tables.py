"""All inventories as one table per side, and how they fit together; what does not fit is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from crossrail.errors import UsageError
from crossrail.weights.dtypes import CASTS, DTYPES, FP8, QUANTISED, dtype_code
from crossrail.weights.errors import Unheld
from crossrail.weights.inventory.holdings import DIMS, HOLDING, Inventory, Role, called
from crossrail.weights.inventory.wrappers import meant
from crossrail.weights.planning.boxes import Boxes, Ints, columns_of, distinct, find_fault, overlaps

_SHOWN = 5
_CASTS = [dtype_code(name) for name in CASTS]
_QUANTISED = [dtype_code(name) for name in QUANTISED]


class Side(NamedTuple):
    """Holdings of all processes of one role; name and mesh are global numbers. rank: of each row."""

    rows: npt.NDArray[Any]
    rank: Ints


class Tables(NamedTuple):
    """Both sides, of the same names."""

    source: Side
    target: Side
    names: list[str]
    meshes: list[str]


class Wants(NamedTuple):
    """What the targets are to receive: their holdings of values and scales, by form.

    row: of the target side. form: its number. scales: bool. start, stop: as in the row.
    """

    row: Ints
    form: Ints
    scales: npt.NDArray[np.bool_]


class Forms(NamedTuple):
    """A parameter in the dtype that some targets want: each is prepared once for all of them.

    param: name number. block: elements that share a scale, shape (n, DIMS), all 0 for none. shape: of the parameter.
    """

    param: Ints
    dtype: Ints
    block: Ints
    shape: Ints
    source_dtype: Ints


def join(trainers: Sequence[Inventory], targets: Sequence[Inventory]) -> Tables:
    """The tables of both sides. A parameter must have the same shape everywhere, and one dtype at the trainers."""
    names: dict[str, int] = {}
    meshes: dict[str, int] = {}
    source = _side(trainers, names, meshes)
    target = _side(targets, names, meshes)
    tables = Tables(source, target, list(names), list(meshes))
    both: list[tuple[Role, Side]] = [("trainer", source), ("target", target)]
    _check_same(tables, both, "shape", "has different shapes")
    _check_same(tables, both[:1], "dtype", "has different dtypes at the trainers")
    return tables


def _side(inventories: Sequence[Inventory], names: dict[str, int], meshes: dict[str, int]) -> Side:
    parts = []
    for inventory in inventories:
        name_of = np.array([names.setdefault(name, len(names)) for name in inventory.names], np.int32)
        mesh_of = np.array([meshes.setdefault(mesh, len(meshes)) for mesh in inventory.meshes], np.int32)
        rows = inventory.rows.copy()
        if len(rows):
            rows["name"] = name_of[rows["name"]]
            rows["mesh"] = mesh_of[rows["mesh"]]
            rows["scale_of"] = np.where(rows["scale_of"] < 0, -1, name_of[rows["scale_of"]])
        parts.append(rows)
    ranks = np.repeat([inventory.rank for inventory in inventories], [len(rows) for rows in parts])
    return Side(np.concatenate([*parts, np.zeros(0, HOLDING)]), ranks.astype(np.int64))


def _check_same(tables: Tables, sides: Sequence[tuple[Role, Side]], field: str, what: str) -> None:
    rows = np.concatenate([side.rows for _, side in sides])
    name, values = rows["name"], rows[field]
    first = np.zeros(len(tables.names), np.int64)
    first[name[::-1]] = np.arange(len(name))[::-1]
    differ = values != values[first[name]]
    bad = differ.any(axis=1) if differ.ndim > 1 else differ
    if bad.any():
        row = int(np.argmax(bad))
        owners = [called(role, rank) for role, side in sides for rank in side.rank]
        pair = [f"{_text(field, rows[i])} at {owners[i]}" for i in (first[name[row]], row)]
        raise UsageError(f"{tables.names[name[row]]!r} {what}: {' and '.join(pair)}")


def _text(field: str, row: Any) -> str:
    return DTYPES[row["dtype"]] if field == "dtype" else str(tuple(row[field][: row["dims"]].tolist()))


def check_meshes(tables: Tables, groups: Sequence[Sequence[str]]) -> None:
    """UsageError for one that no trainer has: it is misspelt, and its tasks would come last."""
    there = sorted(tables.meshes[mesh] for mesh in np.unique(tables.source.rows["mesh"]))
    missing = sorted({mesh for meshes in groups for mesh in meshes} - set(there))
    if missing:
        raise UsageError(f"groups: no trainer has a mesh {_listed(missing)}, there is {_listed(there)}")


def match(tables: Tables, ignore: Sequence[str]) -> tuple[Forms, Wants]:
    """The forms to make of each parameter, and for whom.

    ignore: names that trainers hold and no target wants.
    """
    source, target, names, _ = tables
    held = np.zeros(len(names), bool)
    held[source.rows["name"]] = True
    source_dtype = np.full(len(names), -1)
    source_dtype[source.rows["name"]] = source.rows["dtype"]
    shape = np.ones((len(names), DIMS), np.int64)
    shape[source.rows["name"]] = source.rows["shape"]

    rows = target.rows
    scales = (rows["scale_of"] >= 0) & ~held[rows["name"]]
    param = np.where(scales, rows["scale_of"], rows["name"]).astype(np.int64)
    _check_held(names, param, held)
    dtype = np.where(scales, FP8, rows["dtype"]).astype(np.int64)
    block = np.where(scales[:, np.newaxis], rows["block"], 0)
    quantised = ~scales & (dtype == FP8) & (source_dtype[param] != FP8)
    _check_grids(tables, scales, shape)
    block[quantised] = _blocks(tables, param, scales, quantised)
    _check_covered(tables, param, scales, np.flatnonzero(quantised), block)
    _check_made(tables, param, source_dtype[param], dtype, scales | quantised)
    _check_extra(tables, np.unique(param), ignore)

    first, form = distinct(columns_of(param, dtype, block))
    forms = Forms(param[first], dtype[first], block[first], shape[param[first]], source_dtype[param[first]])
    return forms, Wants(np.arange(len(rows)), form, scales)


def _check_held(names: Sequence[str], wanted: Ints, held: npt.NDArray[np.bool_]) -> None:
    missing = np.unique(wanted[~held[wanted]])
    if len(missing):
        left = held.copy()
        left[wanted] = False
        hint = meant(names[int(missing[0])], [names[at] for at in np.flatnonzero(left).tolist()])
        what = (
            "wanted by inference ranks and held by no trainer. Next: add() it under this name at a trainer, also if it "
            f"is tied to another{hint}"
        )
        _refuse_names(names, missing, what, Unheld)


def _check_made(tables: Tables, param: Ints, have: Ints, want: Ints, quantised: npt.NDArray[np.bool_]) -> None:
    """Each dtype can be made of what trainers have, as conversion/ does it. have, want: of each row of the targets."""
    rank = tables.target.rank
    castable = (have == want) | (np.isin(have, _CASTS) & np.isin(want, _CASTS))
    for row in np.flatnonzero(np.where(quantised, ~np.isin(have, _QUANTISED), ~castable))[:1]:
        why = f"{tables.names[param[row]]!r}: inference rank {rank[row]} wants {DTYPES[want[row]]}"
        if quantised[row]:
            raise UsageError(
                f"{why} with scales, trainers have {DTYPES[have[row]]}: it is made of {' and '.join(QUANTISED)} only"
            )
        raise UsageError(f"{why}, trainers have {DTYPES[have[row]]}")


def _check_grids(tables: Tables, scales: npt.NDArray[np.bool_], shape: Ints) -> None:
    rows = tables.target.rows[scales]
    grid = -(-shape[rows["scale_of"]] // rows["block"])
    for row in np.flatnonzero((grid != rows["shape"]).any(axis=1))[:1]:
        dims = rows["dims"][row]
        raise UsageError(
            f"{tables.names[rows['name'][row]]!r}: shape {rows['shape'][row][:dims].tolist()}, but "
            f"{tables.names[rows['scale_of'][row]]!r} has {grid[row][:dims].tolist()} blocks"
        )


def _blocks(tables: Tables, param: Ints, scales: npt.NDArray[np.bool_], wanted: npt.NDArray[np.bool_]) -> Ints:
    """The blocks of values that become fp8: what the same target says of their scales."""
    key = tables.target.rank * len(tables.names) + param
    order = np.flatnonzero(scales)[np.argsort(key[scales], kind="stable")]
    at = np.searchsorted(key[order], key[wanted])
    found = at < len(order)
    found[found] = key[order][at[found]] == key[wanted][found]
    for row in np.flatnonzero(wanted)[~found][:1]:
        raise UsageError(
            f"{tables.names[param[row]]!r}: inference rank {tables.target.rank[row]} wants float8_e4m3fn, and no "
            "scales of it"
        )
    block: Ints = tables.target.rows["block"][order[at]]
    return block


def _check_covered(tables: Tables, param: Ints, scales: npt.NDArray[np.bool_], values: Ints, block: Ints) -> None:
    """Checks that each block of values that become fp8 has exactly one scale, at the same target."""
    rows, rank = tables.target
    key = rank * len(tables.names) + param
    of = np.flatnonzero(scales)[np.argsort(key[scales], kind="stable")]
    size = block[values]
    start, stop = rows["start"][values] // size, -(-rows["stop"][values] // size)
    pairs = overlaps(Boxes(key[values], start, stop), Boxes(key[of], rows["start"][of], rows["stop"][of]))
    fault = find_fault(Boxes(pairs.left, pairs.start, pairs.stop), start, stop)
    if fault is not None:
        row = values[fault.key]
        dims, what = int(rows["dims"][row]), "scales twice" if fault.claims else "no scales"
        raise UsageError(
            f"{tables.names[param[row]]!r}: inference rank {rank[row]} has float8_e4m3fn, and {what} of its blocks "
            f"{fault.where(dims)}"
        )


def _check_extra(tables: Tables, used: Ints, ignore: Sequence[str]) -> None:
    """Refuses parameters that nobody wants: a mistake, unless ignored, or merely another name of a wanted one."""
    rows, rank = tables.source
    extra = ~np.isin(rows["name"], used)
    place = [rank, rows["region"], rows["offset"]]
    _, kind = distinct(columns_of(*place))
    shared = np.isin(kind, kind[~extra])
    found = np.unique(rows["name"][extra & ~shared])
    left = frozenset(ignore)
    ignored = np.array([tables.names[name] in left for name in found], bool)
    what = (
        "held by trainers and wanted by no inference rank. Next: if that is meant, name it in PlanOptions(ignore=), or "
        "by --ignore of `crossrail weights load`"
    )
    _refuse_names(tables.names, found[~ignored], what)


def _refuse_names(names: Sequence[str], found: Ints, what: str, kind: type[UsageError] = UsageError) -> None:
    if len(found):
        raise kind(f"{_listed([names[name] for name in found])}: {what}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
