"""The options of `crossrail sim`; what it does is in runs.py, imported when it runs."""

from __future__ import annotations

from typing import Any

import click

from crossrail.cli.group import body
from crossrail.cli.json_output import json_option
from crossrail.cli.option_types import IntRange, OutputFile


@click.command("sim")
@click.option(
    "--scenario",
    "names",
    multiple=True,
    metavar="NAME",
    help="Name of a scenario, `all`, or your own as MODULE:FUNCTION.",
)
@click.option("--list", "list_only", is_flag=True, help="List the scenarios and exit.")
@click.option("--seed", type=IntRange(0, (1 << 63) - 1), help="Seed of the first run [default: a new one].")
@click.option(
    "--runs",
    type=IntRange(1, 1_000_000),
    default=1,
    show_default=True,
    help="Number of runs, with the seeds SEED, SEED+1, ...",
)
@click.option(
    "--jobs", type=IntRange(1, 1024), help="Runs at the same time, each in a process [default: one per core]."
)
@click.option("--twice", is_flag=True, help="Run each seed twice: both must give the same event log.")
@click.option(
    "--trace",
    type=OutputFile(),
    metavar="FILE",
    help="Write the timeline of the first run that failed, else of the first, for chrome://tracing or Perfetto.",
)
@click.option(
    "--log",
    type=OutputFile(),
    metavar="FILE",
    help="Write the event log of that run; the same seed gives the same bytes.",
)
@json_option("the outcomes, `format` 1,")
def command(**options: Any) -> None:
    """Run whole systems on simulated NICs, hosts and faults, with a virtual clock.

    Every run can be replayed from its seed, and is checked: transfers complete exactly once, counts match the
    operations, the bytes are those that were sent, and nothing is written after a completion. docs/simulator.md has the
    details, and shows how to test your own code this way.

    Exit code: 0 all checks passed, 1 some failed (the command that replays the run is printed), 2 wrong usage.
    """
    body("sim", "crossrail.cli.sim.runs", "run")(**options)
