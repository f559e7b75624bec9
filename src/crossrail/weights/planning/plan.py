"""The schedule that every update replays: who prepares what, and which bytes go where. Pure data.

    task    one unit of work of one trainer: parts that are made in one buffer and then written
    part    a box of a parameter, in the target's dtype; gathered, converted, laid out as outputs
    gather  a box of a part, and who holds it: the trainer itself, or others from whom it is read
    output  a box of a part (of its values or its scales), packed in C order at a place in the task's buffer
    write   a range of the task's buffer, and where it goes; counts 1 at its target

All are rows of numpy arrays, tasks in the order in which a trainer takes them, the others in the order of their tasks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from crossrail._files import read_at_most
from crossrail.errors import UsageError
from crossrail.weights.dtypes import DTYPES, dtype_code
from crossrail.weights.inventory.holdings import DIMS, REGION_BYTES_MAX
from crossrail.weights.planning.boxes import Ints, ranges

Rows: TypeAlias = npt.NDArray[Any]

VERSION = 1
_FILE_BYTES_MAX = 1 << 30
_RANK_MAX = (1 << 31) - 1

# trainer: rank. mesh: index into the plan's. group: groups run one after another at each trainer. direct: nothing to
# prepare and no buffer: the bytes are at (region, offset) in the trainer's memory. buffer_bytes: of the prepared
# buffer. tmp_bytes: the most memory that the task needs at once, its buffer included.
TASK = np.dtype(
    [
        ("trainer", "<i4"),
        ("mesh", "<i4"),
        ("group", "<i4"),
        ("direct", "?"),
        ("region", "<i4"),
        ("offset", "<i8"),
        ("buffer_bytes", "<i8"),
        ("tmp_bytes", "<i8"),
    ]
)
# start, stop: elements of the parameter. dtype: the target type (index into DTYPES). block: all 0 for a copy or cast;
# else the part becomes fp8 with one fp32 scale per block of so many elements, and begins at a whole block.
PART = np.dtype(
    [
        ("task", "<i4"),
        ("param", "<i4"),
        ("dtype", "<i2"),
        ("start", "<i8", DIMS),
        ("stop", "<i8", DIMS),
        ("block", "<i8", DIMS),
    ]
)
# offset: bytes in the holder's region, of the element at `start`; strides: bytes. trainer: who holds it.
GATHER = np.dtype(
    [
        ("part", "<i4"),
        ("trainer", "<i4"),
        ("region", "<i4"),
        ("offset", "<i8"),
        ("strides", "<i8", DIMS),
        ("start", "<i8", DIMS),
        ("stop", "<i8", DIMS),
    ]
)
# start, stop: elements of the parameter, or with `scales` blocks of it. offset: in the task's buffer.
OUTPUT = np.dtype(
    [
        ("part", "<i4"),
        ("scales", "?"),
        ("offset", "<i8"),
        ("nbytes", "<i8"),
        ("start", "<i8", DIMS),
        ("stop", "<i8", DIMS),
    ]
)
# source: offset in the task's buffer. target: rank; region, offset: where in its memory.
WRITE = np.dtype(
    [("task", "<i4"), ("target", "<i4"), ("region", "<i4"), ("source", "<i8"), ("offset", "<i8"), ("nbytes", "<i8")]
)
TABLES = {"tasks": TASK, "parts": PART, "gathers": GATHER, "outputs": OUTPUT, "writes": WRITE}


class Param(Struct, frozen=True, array_like=True):
    """A parameter of the checkpoint; dtype: the trainers'."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class _Wire(Struct, frozen=True, tag="crossrail.weights.plan", forbid_unknown_fields=True):
    version: int
    trainers: tuple[int, ...]
    targets: tuple[int, ...]
    params: tuple[Param, ...]
    meshes: tuple[str, ...]
    tables: dict[str, bytes]


@dataclass(frozen=True, eq=False)
class Plan:
    """All writes of one update. Made by make_plan(); immutable, any thread.

    trainers, targets: the ranks that took part, ascending, including those that have nothing to do.
    """

    trainers: tuple[int, ...]
    targets: tuple[int, ...]
    params: tuple[Param, ...]
    meshes: tuple[str, ...]
    tasks: Rows
    parts: Rows
    gathers: Rows
    outputs: Rows
    writes: Rows

    def __post_init__(self) -> None:
        for name in TABLES:
            getattr(self, name).flags.writeable = False

    def expected(self, target: int) -> int:
        """How many counts a complete update makes at this target: the number of its writes."""
        if target not in self.targets:
            raise UsageError(f"inference rank {target} is not in this plan")
        return self.expectations[target]

    @cached_property
    def expectations(self) -> dict[int, int]:
        """expected() of all targets, by rank."""
        counts = np.bincount(np.searchsorted(self.targets, self.writes["target"]), minlength=len(self.targets))
        return dict(zip(self.targets, counts.tolist(), strict=True))

    def of_trainer(self, trainer: int) -> Plan:
        """The plan with one trainer's tasks only, and what belongs to them, renumbered."""
        if trainer not in self.trainers:
            raise UsageError(f"trainer {trainer} is not in this plan")
        order, ranks = self._tasks_by_trainer
        tasks = order[np.searchsorted(ranks, trainer, "left") : np.searchsorted(ranks, trainer, "right")]
        part, parts = _follow(self.parts, "task", self.task_parts, tasks)
        _, gathers = _follow(self.gathers, "part", self.part_gathers, part)
        _, outputs = _follow(self.outputs, "part", self.part_outputs, part)
        _, writes = _follow(self.writes, "task", self.task_writes, tasks)
        used, parts["param"] = np.unique(parts["param"], return_inverse=True)
        params = tuple(self.params[param] for param in used)
        return Plan(
            self.trainers, self.targets, params, self.meshes, self.tasks[tasks], parts, gathers, outputs, writes
        )

    @cached_property
    def _tasks_by_trainer(self) -> tuple[Ints, Ints]:
        """Numbers of tasks by trainer, each one's in their order; and the trainer of each."""
        order = np.argsort(self.tasks["trainer"], kind="stable")
        return order, self.tasks["trainer"][order]

    # Row ranges of a task or part: those of number i are [i] to [i + 1].

    @cached_property
    def task_parts(self) -> Ints:
        """For each task, its rows of parts."""
        return _starts(self.parts["task"], len(self.tasks))

    @cached_property
    def task_writes(self) -> Ints:
        """For each task, its rows of writes."""
        return _starts(self.writes["task"], len(self.tasks))

    @cached_property
    def part_gathers(self) -> Ints:
        """For each part, its rows of gathers."""
        return _starts(self.gathers["part"], len(self.parts))

    @cached_property
    def part_outputs(self) -> Ints:
        """For each part, its rows of outputs."""
        return _starts(self.outputs["part"], len(self.parts))

    # ---- telling others

    def to_bytes(self) -> bytes:
        """The plan as bytes, for a message or a file."""
        tables = {name: getattr(self, name).tobytes() for name in TABLES}
        wire = _Wire(VERSION, self.trainers, self.targets, self.params, self.meshes, tables)
        return msgspec.msgpack.encode(wire)

    @classmethod
    def from_bytes(cls, data: bytes) -> Plan:
        """The inverse of to_bytes(). Raises UsageError for anything else, so that everything that rows refer to exists.

        Whether the plan is correct is for check_plan() to judge.
        """
        try:
            wire = msgspec.msgpack.decode(data, type=_Wire)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"not a plan: {error}") from None
        if wire.version != VERSION:
            raise UsageError(f"plan of version {wire.version}, this is version {VERSION}")
        if set(wire.tables) != set(TABLES):
            raise UsageError(f"a plan has the tables {', '.join(TABLES)}, not {', '.join(wire.tables)}")
        for name, dtype in TABLES.items():
            if len(wire.tables[name]) % dtype.itemsize:
                raise UsageError(f"table {name} of a plan: {len(wire.tables[name])} bytes, {dtype.itemsize} a row")
        tables = {name: np.frombuffer(wire.tables[name], dtype) for name, dtype in TABLES.items()}
        _check_rows(wire, tables)
        return cls(wire.trainers, wire.targets, wire.params, wire.meshes, **tables)

    def save(self, path: str | Path) -> None:
        """Writes to_bytes() to a file. Blocks. Raises OSError, which names the file."""
        data = self.to_bytes()
        try:
            Path(path).write_bytes(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None  # of a full disk Python names none

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a file that save() wrote. UsageError, OSError."""
        try:
            return cls.from_bytes(read_at_most(path, _FILE_BYTES_MAX, "plan"))
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None

    @cached_property
    def digest(self) -> str:
        """16 hex digits that equal plans share."""
        return hashlib.sha256(self.to_bytes()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return all(
            np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs
            for mine, theirs in ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        )

    __hash__ = None  # type: ignore[assignment]  # equal by content, which is large

    def __repr__(self) -> str:
        return (
            f"<Plan {len(self.trainers)} -> {len(self.targets)}, {len(self.params)} parameters, "
            f"{len(self.tasks)} tasks, {len(self.writes)} writes, {int(self.writes['nbytes'].sum())} bytes>"
        )


def _check_rows(wire: _Wire, tables: Mapping[str, Rows]) -> None:
    """UsageError for a row that points to nothing, or does not follow the order of what it belongs to."""
    for role, ranks in (("trainers", wire.trainers), ("targets", wire.targets)):
        if list(ranks) != sorted(set(ranks)) or (ranks and not 0 <= ranks[0] <= ranks[-1] <= _RANK_MAX):
            raise UsageError(f"{role} of a plan are no ranks, ascending")
    for param in wire.params:
        dtype_code(param.dtype)
        if len(param.shape) > DIMS:
            raise UsageError(f"{param.name!r} of a plan has the shape {param.shape}, of more than {DIMS} dimensions")
    ends = {"task": len(tables["tasks"]), "part": len(tables["parts"]), "param": len(wire.params)}
    ends |= {"mesh": len(wire.meshes), "dtype": len(DTYPES)}
    ranks_of_field = {"trainer": wire.trainers, "target": wire.targets}
    for name, rows in tables.items():
        for field in rows.dtype.names or ():
            values = rows[field]
            if field in ends:
                right = (values >= 0) & (values < ends[field])
            elif field in ranks_of_field:
                right = np.isin(values, ranks_of_field[field])
            elif field == "nbytes":
                right = (values >= 0) & (values <= REGION_BYTES_MAX)
            else:
                continue
            if field in ("task", "part"):
                right[1:] &= values[1:] >= values[:-1]
            for row in np.flatnonzero(~right)[:1]:
                raise UsageError(f"table {name} of a plan: row {row} has {field} {values[row]}, which cannot be")


def _starts(owners: Ints, count: int) -> Ints:
    return np.searchsorted(owners, np.arange(count + 1))


def _follow(rows: Rows, field: str, starts: Ints, owners: Ints) -> tuple[Ints, Rows]:
    """The rows of these owners, renumbered; first, which rows these are."""
    counts = starts[owners + 1] - starts[owners]
    number = np.repeat(np.arange(len(owners)), counts)
    which = starts[owners][number] + ranges(counts)
    chosen = rows[which]
    chosen[field] = number
    return which, chosen


def ranks_of(items: Sequence[Any]) -> tuple[int, ...]:
    """Ascending ranks of inventories; UsageError when one occurs twice."""
    ranks = sorted(item.rank for item in items)
    if twice := {rank for rank in ranks if ranks.count(rank) > 1} if len(set(ranks)) < len(ranks) else None:
        raise UsageError(f"rank {min(twice)} occurs twice among the {items[0].role}s")
    return tuple(ranks)
