"""`crossrail weights plan`: computes a plan from what everyone holds, and writes it to a file."""

from __future__ import annotations

import resource
import time
from pathlib import Path

from crossrail._files import read_at_most
from crossrail._text import plain
from crossrail.cli.console import open_console
from crossrail.cli.weights.common import check_model, sides_of
from crossrail.cli.weights.show import print_summary
from crossrail.errors import UsageError
from crossrail.weights import Inventory, PlanOptions, make_plan
from crossrail.weights.planning.planner import Gather

_INVENTORY_BYTES_MAX = 1 << 30


def plan(
    model: str | None,
    files: tuple[Path, ...],
    gather: Gather,
    ignore: tuple[str, ...],
    output: Path | None,
    **sizes: int | None,
) -> None:
    """The command; commands.py has its options and its help."""
    if (model is None) == (not files):
        raise UsageError("either a MODEL or --inventory is needed")
    if model is None:
        found = [_read(file) for file in files]
    else:
        check_model(model)
        found = [one for side in sides_of(model, **sizes) for one in side]
    console = open_console()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    trainers = [one for one in found if one.role == "trainer"]
    targets = [one for one in found if one.role == "target"]
    made = make_plan(trainers, targets, PlanOptions(gather=gather, ignore=ignore))
    took_s, took_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    if output is not None:
        made.save(output)  # first: who reads one line of what follows, as by `| head -1`, wants the plan all the same
    print_summary(console, made)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    console.print(f"planned and proved in {took_s:.1f} s ({took_cpu_s:.1f} s of CPU), {peak / 2**30:.2f} GiB at most")
    if output is not None:
        console.print(f"saved to {plain(str(output))}", markup=False, soft_wrap=True)


def _read(file: Path) -> Inventory:
    try:
        return Inventory.from_bytes(read_at_most(file, _INVENTORY_BYTES_MAX, "inventory"))
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
