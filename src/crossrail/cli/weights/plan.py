"""`crossrail weights plan`: from what everyone holds to a plan in a file."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import click

from crossrail._files import read_at_most
from crossrail._text import plain
from crossrail.cli.console import open_console
from crossrail.cli.text import OutputFile
from crossrail.cli.weights.common import check_model, cluster_options, sides_of
from crossrail.cli.weights.show import print_summary
from crossrail.errors import UsageError
from crossrail.weights import Inventory, PlanOptions, make_plan
from crossrail.weights.planning.planner import Gather

_INVENTORY_BYTES_MAX = 1 << 30


@click.command()
@click.argument("model", required=False)
@click.option(
    "--inventory",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Inventory of one process, from Inventory.to_bytes(); once per process, instead of MODEL.",
)
@cluster_options
@click.option(
    "--gather",
    type=click.Choice(["needed", "full"]),
    default="needed",
    show_default=True,
    help="needed: parameters are prepared where they are; full: every trainer gathers all of its part.",
)
@click.option("--ignore", multiple=True, help="A parameter that trainers hold and no target needs.")
@click.option("-o", "--output", type=OutputFile(), help="Where to save the plan.")
def plan(
    model: str | None,
    files: tuple[Path, ...],
    gather: Gather,
    ignore: tuple[str, ...],
    output: Path | None,
    **sizes: int | None,
) -> None:
    """Plan an update of MODEL (kimi-k2, deepseek-v3, qwen3-235b) or from inventories, and verify the plan."""
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
    print_summary(console, made)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    console.print(f"planned and proved in {took_s:.1f} s ({took_cpu_s:.1f} s of CPU), {peak / 2**30:.2f} GiB at most")
    if output is not None:
        made.save(output)
        console.print(f"saved to {plain(str(output))}", markup=False, soft_wrap=True)


def _read(file: Path) -> Inventory:
    try:
        return Inventory.from_bytes(read_at_most(file, _INVENTORY_BYTES_MAX, "inventory"))
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
