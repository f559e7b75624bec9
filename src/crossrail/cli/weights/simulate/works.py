"""The steps of each trainer's pipeline in a simulated update, and what they cost in each lane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from crossrail.cli.weights.simulate.setting import Costs
from crossrail.weights import Inventory, Plan
from crossrail.weights.dtypes import DTYPES, ITEM_BYTES
from crossrail.weights.planning.boxes import Ints, volume

PREPARE = ("gather", "fuse", "quantise")


class Work(NamedTuple):
    """One step of a trainer's pipeline: seconds in each lane, memory until its writes are done, and these.

    reads: (trainer, bytes) that its NIC fetches before. meet: who must have come for it to be prepared, "" for nobody.
    group: as the plan's.
    """

    h2d_s: float
    prepare_s: dict[str, float]
    tmp_bytes: int
    writes: slice
    meet: str
    group: int
    reads: tuple[tuple[int, int], ...] = ()


def own_works(plan: Plan, costs: Costs) -> list[Work]:
    """The works of one trainer's tasks in a plan, one after the other."""
    parts, gathers = plan.parts, plan.gathers
    item = ITEM_BYTES[[DTYPES.index(param.dtype) for param in plan.params]] if plan.params else np.zeros(0, np.int64)
    nbytes = volume(gathers["start"], gathers["stop"]) * item[parts["param"][gathers["part"]]]
    task = parts["task"][gathers["part"]]
    own = gathers["trainer"] == plan.tasks["trainer"][task]
    count = len(plan.tasks)
    loaded = np.bincount(task[own], weights=nbytes[own], minlength=count)
    made = volume(parts["start"], parts["stop"]) * item[parts["param"]]
    quantised = np.bincount(parts["task"], weights=made * parts["block"].any(axis=1), minlength=count)
    reads = _reads(task[~own], gathers["trainer"][~own], nbytes[~own])
    return [
        Work(
            loaded[i] / 1e9 / costs.h2d,
            {"quantise": quantised[i] / 1e9 / costs.quantise},
            int(plan.tasks["tmp_bytes"][i] + loaded[i]),
            slice(plan.task_writes[i], plan.task_writes[i + 1]),
            "",
            int(plan.tasks["group"][i]),
            tuple(reads.get(i, ())),
        )
        for i in range(count)
    ]


def _reads(task: Ints, holder: Ints, nbytes: Ints) -> dict[int, list[tuple[int, int]]]:
    found: dict[int, list[tuple[int, int]]] = {}
    for of, trainer, size in zip(task.tolist(), holder.tolist(), nbytes.tolist(), strict=True):
        found.setdefault(of, []).append((trainer, size))
    return found


def collective_works(
    plan: Plan, trainer: Inventory, hulls: dict[tuple[str, str], int], quantised: set[str], costs: Costs
) -> list[Work]:
    """Everything that the trainer holds, gathered by its mesh, and the part of it that its tasks in the plan send.

    hulls: bytes that a mesh holds of a parameter, by (mesh, parameter). quantised: parameters that become fp8.
    """
    tasks = {plan.params[part["param"]].name: int(part["task"]) for part in plan.parts}
    rows = trainer.rows
    loaded = volume(rows["start"], rows["stop"]) * ITEM_BYTES[rows["dtype"]]
    works = []
    for row, nbytes in zip(rows, loaded.tolist(), strict=True):
        name, mesh = trainer.names[row["name"]], trainer.meshes[row["mesh"]]
        whole = hulls[mesh, name] / 1e9
        task = tasks.get(name)
        writes = slice(plan.task_writes[task], plan.task_writes[task + 1]) if task is not None else slice(0, 0)
        prepare_s = {"gather": whole / costs.gather, "fuse": whole / costs.fuse}
        prepare_s["quantise"] = whole / costs.quantise if name in quantised else 0.0
        tmp = hulls[mesh, name] * 3 // 2
        group = int("experts" in mesh)
        works.append(Work(nbytes / 1e9 / costs.h2d, prepare_s, tmp, writes, f"{mesh} {name}", group))
    return sorted(works, key=lambda work: work.group)


def quantised_of(plan: Plan) -> set[str]:
    """Parameters that some target has as fp8 with scales."""
    parts = plan.parts[plan.parts["block"].any(axis=1)]
    return {plan.params[param].name for param in np.unique(parts["param"])}


def hulls_of(trainers: Sequence[Inventory]) -> dict[tuple[str, str], int]:
    """Bytes that each mesh holds of each parameter, once."""
    found: dict[tuple[str, str], dict[bytes, int]] = {}
    for trainer in trainers:
        rows = trainer.rows
        sizes = (volume(rows["start"], rows["stop"]) * ITEM_BYTES[rows["dtype"]]).tolist()
        for row, nbytes in zip(rows, sizes, strict=True):
            key = trainer.meshes[row["mesh"]], trainer.names[row["name"]]
            found.setdefault(key, {})[row["start"].tobytes()] = nbytes
    return {key: sum(boxes.values()) for key, boxes in found.items()}


def lanes_of(works: Sequence[Work], costs: Costs) -> dict[str, float]:
    """Seconds that each lane is busy with these, on a trainer that is not slow."""
    lanes = {"h2d": sum(work.h2d_s for work in works)}
    for work in works:
        for name, seconds in work.prepare_s.items():
            lanes[name] = lanes.get(name, 0.0) + seconds
    count = sum(work.writes.stop - work.writes.start for work in works)
    lanes["submit"] = count * costs.submit_us / 1e6
    return lanes
