"""Plans for people: totals, how two plans differ, and who sends how much to whom."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from crossrail.errors import UsageError
from crossrail.weights.dtypes import ITEM_BYTES, dtype_code
from crossrail.weights.planning.boxes import Ints, distinct
from crossrail.weights.planning.plan import Plan

_SHADES = " ·░▒▓█"


class Spread(NamedTuple):
    """The spread of a figure over several ranks."""

    least: float
    mean: float
    most: float


class Summary(NamedTuple):
    """The totals of a plan. Bytes; of each trainer: sent, writes, tasks; of each target: received.

    gathered_bytes: read from other trainers. tmp_bytes: the largest task's. typical_bytes: of a write, the median.
    """

    nbytes: int
    sent: Spread
    received: Spread
    tasks: Spread
    writes: Spread
    gathered_bytes: int
    tmp_bytes: int
    typical_bytes: int
    direct_bytes: int


def summary(plan: Plan) -> Summary:
    """Pure."""
    sender = plan.tasks["trainer"][plan.writes["task"]]
    nbytes = plan.writes["nbytes"]
    one = np.ones(len(nbytes), np.int64)
    task = plan.parts["task"][plan.gathers["part"]]
    away = plan.gathers["trainer"] != plan.tasks["trainer"][task]
    elements = (plan.gathers["stop"] - plan.gathers["start"]).prod(axis=1)
    item = ITEM_BYTES[[dtype_code(param.dtype) for param in plan.params]]
    gathered = elements * item[plan.parts["param"][plan.gathers["part"]]] if len(elements) else elements
    return Summary(
        nbytes=int(nbytes.sum()),
        sent=_spread(plan.trainers, sender, nbytes),
        received=_spread(plan.targets, plan.writes["target"], nbytes),
        tasks=_spread(plan.trainers, plan.tasks["trainer"], np.ones(len(plan.tasks), np.int64)),
        writes=_spread(plan.trainers, sender, one),
        gathered_bytes=int(gathered[away].sum()),
        tmp_bytes=int(plan.tasks["tmp_bytes"].max(initial=0)),
        typical_bytes=int(np.median(nbytes)) if len(nbytes) else 0,
        direct_bytes=int(nbytes[plan.tasks["direct"][plan.writes["task"]]].sum()),
    )


def _spread(ranks: tuple[int, ...], owner: Ints, amount: Ints) -> Spread:
    if not ranks:
        return Spread(0.0, 0.0, 0.0)
    sums = np.bincount(np.searchsorted(ranks, owner), weights=amount, minlength=len(ranks))
    return Spread(float(sums.min()), float(sums.mean()), float(sums.max()))


def matrix(plan: Plan) -> npt.NDArray[np.float64]:
    """Bytes from each trainer (row) to each target (column), in the order of plan.trainers and plan.targets."""
    row = np.searchsorted(plan.trainers, plan.tasks["trainer"][plan.writes["task"]])
    column = np.searchsorted(plan.targets, plan.writes["target"])
    shape = len(plan.trainers), len(plan.targets)
    weights = plan.writes["nbytes"].astype(np.float64)
    flat = np.bincount(row * shape[1] + column, weights=weights, minlength=shape[0] * shape[1])
    return flat.astype(np.float64).reshape(shape)


def heat_map(plan: Plan, rows_max: int = 32, columns_max: int = 64) -> list[str]:
    """The matrix as lines of text, darker where more goes; neighbouring ranks are added up until it fits. Without
    ranks of a side there are none.
    """
    whole = matrix(plan)
    if not whole.size:
        return []
    cells = _shrunk(_shrunk(whole, rows_max).T, columns_max).T
    level = np.ceil(cells / max(cells.max(), 1) * (len(_SHADES) - 1)).astype(int)
    return ["".join(_SHADES[shade] * (2 if cells.shape[1] * 2 <= columns_max else 1) for shade in row) for row in level]


def _shrunk(cells: npt.NDArray[np.float64], rows_max: int) -> npt.NDArray[np.float64]:
    step = -(-len(cells) // rows_max)
    return np.add.reduceat(cells, np.arange(0, len(cells), step), axis=0)


def check_drawing() -> None:
    """UsageError when there is nothing to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("drawing needs matplotlib: pip install 'crossrail[bench]'")


def new_figure(width: float, height: float) -> Any:
    """A matplotlib Figure of so many inches, which needs no display. UsageError as of check_drawing()."""
    check_drawing()
    return importlib.import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def draw(plan: Plan, path: str | Path) -> None:
    """The matrix as a PNG. Needs matplotlib: `pip install crossrail[bench]`. Blocks. UsageError where there is none."""
    if not (plan.trainers and plan.targets):
        raise UsageError("a plan without trainers or without targets cannot be drawn")
    figure = new_figure(8, 7)
    axes = figure.subplots()
    cells = np.ma.masked_equal(matrix(plan) / 1e9, 0)  # white: zero
    image = axes.imshow(cells, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0)
    for axis, ranks, label in ((axes.xaxis, plan.targets, "target"), (axes.yaxis, plan.trainers, "trainer")):
        axis.set_label_text(label)
        axis.get_major_locator().set_params(integer=True)
        axis.set_major_formatter(partial(_rank_at, ranks))
    axes.set_title(f"{len(plan.trainers)} trainers to {len(plan.targets)} targets: {summary(plan).nbytes / 1e9:.1f} GB")
    figure.colorbar(image, label="GB")
    figure.savefig(path, dpi=150)


def _rank_at(ranks: tuple[int, ...], row: float, _: object) -> str:
    return str(ranks[int(row)]) if 0 <= row < len(ranks) else ""


def differences(one: Plan, other: Plan) -> list[str]:
    """How two plans differ, a line each; empty if they do not."""
    if one == other:
        return []
    lines = []
    for what, before, after in (("trainer", one.trainers, other.trainers), ("target", one.targets, other.targets)):
        lines += [f"{ranks} gone" for ranks in _runs(what, set(before) - set(after))]
        lines += [f"{ranks} new" for ranks in _runs(what, set(after) - set(before))]
    had, has = ({param.name: param for param in plan.params} for plan in (one, other))
    lines += [f"parameter {name} is gone" for name in had if name not in has]
    lines += [f"parameter {name} is new" for name in has if name not in had]
    changed = [name for name, param in had.items() if name in has and has[name] != param]
    lines += [f"parameter {name} has another shape or dtype" for name in changed]
    for name in ("tasks", "parts", "gathers", "outputs", "writes"):
        counts = len(getattr(one, name)), len(getattr(other, name))
        if counts[0] != counts[1]:
            lines.append(f"{name}: {counts[0]:,} and {counts[1]:,}")
    moved = _moved(one, other)
    if moved:
        lines.append(f"{moved:,} bytes go another way: from another trainer, or to another place")
    return lines or ["tasks are in another order, or are prepared otherwise"]


def _runs(what: str, ranks: set[int]) -> list[str]:
    """Neighbours together, as the subject of a sentence: "target 5 is", "targets 7 to 9 are"."""
    firsts, lasts = ([rank for rank in sorted(ranks) if rank + step not in ranks] for step in (-1, 1))
    pairs = zip(firsts, lasts, strict=True)
    return [f"{what} {first} is" if first == last else f"{what}s {first} to {last} are" for first, last in pairs]


def _moved(one: Plan, other: Plan) -> int:
    """Bytes at the targets that the other plan writes from a different trainer, or not at all."""
    columns, sizes, sign = [], [], []
    for plan, by in ((one, 1), (other, -1)):
        writes = plan.writes
        sender = plan.tasks["trainer"][writes["task"]].astype(np.int64)
        begin = writes["offset"]
        columns.append([sender, writes["target"].astype(np.int64), writes["region"].astype(np.int64), begin])
        sizes.append(writes["nbytes"])
        sign.append(np.full(len(writes), by))
    sender, target, region, begin = (np.concatenate(pair) for pair in zip(*columns, strict=True))
    nbytes, step = np.concatenate(sizes), np.concatenate(sign)
    # Both plans as edges on a line, for each trainer and place: where their sums differ, one has what the other lacks.
    _, key = distinct([sender, target, region])
    at = np.concatenate([begin, begin + nbytes])
    edges = np.lexsort((at, np.concatenate([key, key])))
    keys, at = np.concatenate([key, key])[edges], at[edges]
    height = np.cumsum(np.concatenate([step, -step])[edges])
    lengths = np.where(keys[1:] == keys[:-1], at[1:] - at[:-1], 0)
    return int(lengths[height[:-1] > 0].sum())
