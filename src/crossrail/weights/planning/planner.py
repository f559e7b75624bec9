"""Decides who sends what to whom, from everyone's holdings: numpy over all byte ranges at once.

The idea is section 5 of the paper: one static schedule, each slice from the holder with the fewest bytes so far. Where
the paper gathers every parameter in full at all trainers of its mesh, this cuts parameters as the trainers hold them
(sources.cells_of), so that most of it is prepared in place and nothing is gathered; gather="full" is the paper's way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeGuard, get_args

import numpy as np

from crossrail._options import check_whole
from crossrail.errors import UsageError
from crossrail.weights.dtypes import ITEM_BYTES
from crossrail.weights.errors import Unheld
from crossrail.weights.inventory.holdings import Inventory
from crossrail.weights.planning import balance, relay, tables
from crossrail.weights.planning.assemble import Slices, assemble
from crossrail.weights.planning.boxes import Boxes, Ints, distinct, overlaps, ranges
from crossrail.weights.planning.check import check_plan
from crossrail.weights.planning.plan import Plan, ranks_of
from crossrail.weights.planning.sources import Sources, cells_of, sources_of
from crossrail.weights.planning.speeds import check_speeds, costs_of
from crossrail.weights.planning.tables import Forms, Tables, Wants

Gather = Literal["needed", "full"]


@dataclass(frozen=True)
class PlanOptions:
    """What make_plan() may choose.

    gather: "needed": parameters are prepared in the pieces that trainers hold; only what a piece lacks to whole blocks
        is fetched from others. "full": every sender gathers the whole parameter, as the paper does.
    write_bytes_min: pieces are joined until their values have at least this many bytes, where possible; this limits the
        number of small writes. Bytes of the target's dtype.
    ignore: parameters that trainers hold and no target needs.
    groups: (meshes) the order in which each trainer takes their tasks; meshes not named come last. make_plan() refuses
        one that no trainer has.
    partial: meshes may have lost trainers. Of a parameter that none of them has whole, whatever any of them has is
        used, and only what nobody has is refused; otherwise hulls that overlap, or have holes, are taken for a mistake.
        A WeightController sets it by itself once a trainer has gone.
    task_bytes_max: pieces are not joined beyond this size, and are cut along their first dimension where possible, so
        that one is prepared while another is being sent. Bytes of the trainers' dtype. Not with gather="full".
    speeds: of trainers, by rank; those not named have 1. If several have a piece, the one that finishes first sends it.
        With gather="needed", others also fetch pieces that only a slow trainer has, and send them in its place, if that
        is less work for it than sending them to all (relay).
    """

    gather: Gather = "needed"
    write_bytes_min: int = 256 << 10
    ignore: tuple[str, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    partial: bool = False
    task_bytes_max: int = 96 << 20
    speeds: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.gather not in get_args(Gather):
            raise UsageError(f"gather={self.gather!r} must be one of {', '.join(get_args(Gather))}")
        check_whole(write_bytes_min=self.write_bytes_min, task_bytes_max=self.task_bytes_max)
        for name in ("write_bytes_min", "task_bytes_max"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} must be 1 or more")
        _check_names("ignore", self.ignore, "('value_head.weight',)")
        example = "(('experts',), ('dense',))"
        if not _is_sequence(self.groups):
            raise UsageError(f"groups={self.groups!r} must be groups of meshes, such as {example}")
        for meshes in self.groups:
            _check_names("groups: each", meshes, example)
        for mesh, times in Counter(mesh for meshes in self.groups for mesh in set(meshes)).items():
            if times > 1:
                raise UsageError(f"groups={self.groups!r}: mesh {mesh!r} is in {times} of them")
        check_speeds(self.speeds)


def _check_names(argument: str, names: object, example: str) -> None:
    """UsageError for one name instead of some: its letters would be taken as names, and match nothing."""
    if not _is_sequence(names) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{argument}={names!r} must be some names, such as {example}")


def _is_sequence(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def make_plan(trainers: Sequence[Inventory], targets: Sequence[Inventory], options: PlanOptions | None = None) -> Plan:
    """The plan by which these trainers write everything that these targets hold.

    Pure: the same input gives the same plan. It has been checked (check_plan) when it is returned.

    Raises UsageError, which names the parameter, if their holdings do not fit together; Unheld, which is one, where no
    trainer holds what targets want.
    """
    options = options or PlanOptions()
    _check_roles(trainers, targets)
    trainer_ranks, target_ranks = ranks_of(trainers), ranks_of(targets)
    joined = tables.join(sorted(trainers, key=_rank), sorted(targets, key=_rank))
    tables.check_meshes(joined, options.groups)
    forms, wants = tables.match(joined, options.ignore)
    sources = sources_of(joined, options.partial)
    whole = options.gather == "full"
    cells = cells_of(forms, sources, whole, options.write_bytes_min, options.task_bytes_max)
    slices = _slices(joined, forms, wants, cells)
    cost = costs_of(trainer_ranks, options.speeds)
    chosen = _senders(joined, forms, sources, cells, slices, np.array(trainer_ranks), options.gather, cost)
    plan = assemble(
        joined,
        forms,
        sources,
        cells,
        slices._replace(sender=chosen),
        options.groups,
        trainer_ranks,
        target_ranks,
        cost,
    )
    check_plan(plan, trainers, targets)
    return plan


def _rank(inventory: Inventory) -> int:
    return inventory.rank


def _check_roles(trainers: Sequence[Inventory], targets: Sequence[Inventory]) -> None:
    for role, inventories in (("trainer", trainers), ("target", targets)):
        if not inventories:
            missing, what = (Unheld, "trainer") if role == "trainer" else (UsageError, "inference rank")
            raise missing(f"there is no {what}: a plan needs one or more")
        for inventory in inventories:
            if inventory.role != role:
                raise UsageError(f"{inventory} is given as a {role}")


def _slices(joined: Tables, forms: Forms, wants: Wants, cells: Boxes) -> Slices:
    """All of a cell that some target wants; for scales, in blocks."""
    block = np.maximum(forms.block, 1)[cells.key]
    scaled = Boxes(cells.key, cells.start // block, -(-cells.stop // block))
    rows = joined.target.rows
    found: list[Slices] = []
    for scales, boxes in ((False, cells), (True, scaled)):
        chosen = np.flatnonzero(wants.scales == scales)
        chosen = chosen[np.argsort(wants.form[chosen], kind="stable")]
        row = wants.row[chosen]
        pairs = overlaps(boxes, Boxes(wants.form[chosen], rows["start"][row], rows["stop"][row]))
        want = row[pairs.right]
        item = ITEM_BYTES[rows["dtype"][want]]
        flags = np.full(len(want), scales)
        nbytes = (pairs.stop - pairs.start).prod(axis=1) * item
        found.append(Slices(pairs.left, want, flags, pairs.start, pairs.stop, nbytes, np.zeros(0, np.int64)))
    joined_slices = [np.concatenate(parts) for parts in zip(*found, strict=True)]
    return Slices(*joined_slices)


def _senders(
    joined: Tables,
    forms: Forms,
    sources: Sources,
    cells: Boxes,
    slices: Slices,
    ranks: Ints,
    gather: Gather,
    cost: Ints,
) -> Ints:
    """The trainer that sends each slice, by rank."""
    holders = _holders(joined, forms, sources, cells, ranks)
    is_relayed, already = np.zeros(len(cells.key), bool), None
    if gather == "needed" and (cost != cost.min()).any():
        wanted = np.bincount(slices.cell, weights=slices.nbytes, minlength=len(cells.key)).astype(np.int64)
        held = cells.volume * ITEM_BYTES[forms.source_dtype[cells.key]]
        relayed = relay.hand_over(holders, relay.mates_of(joined, ranks), forms.param[cells.key], wanted, held, cost)
        holders, is_relayed, already = relayed
    kind, candidates = balance.classes_of(*holders)
    # Everything that one target wants of a cell comes from one sender: values and scales are made together. A cell
    # fetched from a slow trainer is fetched once, and goes from there to all targets.
    target = np.where(is_relayed[slices.cell], -1, joined.target.rank[slices.want])
    units, unit = distinct([slices.cell, target])
    nbytes = np.bincount(unit, weights=slices.nbytes).astype(np.int64)
    cell = slices.cell[units]
    # If everyone gathers everything, each cell is sent by its whole mesh, so that all are busy at the same time.
    turn = cell if gather == "full" else np.zeros_like(cell)
    sender: Ints = ranks[balance.choose(kind[cell], candidates, nbytes, turn, cost, already)[unit]]
    return sender


def _holders(joined: Tables, forms: Forms, sources: Sources, cells: Boxes, ranks: Ints) -> tuple[Ints, Ints]:
    """For each cell the trainers that may prepare it, as indices into ranks: those with at least half of what any
    holds.
    """
    pairs = overlaps(Boxes(forms.param[cells.key], cells.start, cells.stop), sources.boxes)
    counts = np.diff(sources.first)[pairs.right]
    cell = np.repeat(pairs.left, counts)
    held = np.repeat((pairs.stop - pairs.start).prod(axis=1), counts)
    row = sources.holders[np.repeat(sources.first[pairs.right], counts) + ranges(counts)]
    trainer = np.searchsorted(ranks, joined.source.rank[row])
    # A trainer may hold several boxes of a cell: what counts is their sum.
    key = cell * len(ranks) + trainer
    keys, at = np.unique(key, return_inverse=True)
    share = np.bincount(at, weights=held)
    cell, trainer = keys // len(ranks), keys % len(ranks)
    most = np.zeros(len(cells.key))
    np.maximum.at(most, cell, share)
    able = share * 2 >= most[cell]
    cell, trainer = cell[able], trainer[able]
    return np.searchsorted(cell, np.arange(len(cells.key) + 1)), trainer
