"""`crossrail bench peers`: which libraries to measure next to crossrail, how often, and where the figures go."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click
from rich.console import Console

from crossrail.cli.bench import machine
from crossrail.cli.bench.pair import check_cpus, choose_cpus
from crossrail.cli.bench.peers import offers, report
from crossrail.cli.bench.peers.base import Offer
from crossrail.cli.bench.peers.pair import Settings
from crossrail.cli.bench.peers.turn import Outcome, Turn, take_turns
from crossrail.cli.bench.peers.work import shapes
from crossrail.cli.bench.report import warn_if_busy
from crossrail.cli.console import open_console
from crossrail.cli.json_output import is_alone, json_option, saved_first
from crossrail.cli.memory import check_memory
from crossrail.cli.option_types import FloatRange, IntRange, OutputFile, cpu_pair, size
from crossrail.cli.tables import Fitted

_POOL_BYTES_MIN = 64 << 20


@click.command("peers")
@click.option(
    "--only",
    metavar="NAME,...",
    default="",
    help="Only these, or all whose names begin with this. [default: all installed]",
)
@click.option(
    "--list", "list_only", is_flag=True, help="List which are installed and how to install the others, and exit."
)
@click.option("--runs", type=IntRange(1, 1000), default=5, show_default=True, help="Turns of each.")
@click.option("--quick", is_flag=True, help="A quarter of the work: for a first look, not for figures to quote.")
@json_option("all samples")
@click.option("--markdown", "markdown_path", type=OutputFile(), help="Write the tables of figures to this file.")
@click.option("--cpus", metavar="A,B", type=cpu_pair, help="Cores of the two processes [default: first and last].")
@click.option(
    "--pool-bytes",
    type=size(_POOL_BYTES_MIN, 1 << 38),
    default="512M",
    show_default=True,
    help="Memory of each side. 16 writes of 32 MiB need 512M to have places of their own.",
)
@click.option(
    "--timeout-s",
    type=FloatRange(1, 3600),
    default=60.0,
    show_default=True,
    help="Time limit of each measure of each library.",
)
def peers(
    only: str,
    list_only: bool,
    runs: int,
    quick: bool,
    json_path: Path | None,
    markdown_path: Path | None,
    cpus: tuple[int, int] | None,
    pool_bytes: int,
    timeout_s: float,
) -> None:
    """Measure other libraries next to crossrail: the same shapes and the same clock, in one run.

    Each library takes its turn in two processes of its own, pinned to two cores. The turns rotate, so that a change of
    the machine's speed affects all alike. Every shape is checked byte by byte in a pass that is not timed. A library
    that crashes or hangs gets a line in the tables. docs/comparison.md says what is compared, and what cannot be.
    """
    console = open_console(stderr=is_alone(json_path))
    if list_only:
        console.print(Fitted(report.listing(offers.OFFERS)))
        return
    chosen = offers.choose([name.strip() for name in only.split(",") if name.strip()])
    settings = Settings(cpus or choose_cpus(), pool_bytes, timeout_s)
    check_cpus(settings.cpus)
    check_memory("the benchmark", 2 * pool_bytes, "make the pools smaller with --pool-bytes")
    console.print(machine.describe_machine(), markup=False)
    if settings.cpus[0] == settings.cpus[1]:
        console.print("both processes share one core: figures of two processes mean little", style="yellow")
    busy = machine.busy_share(settings.cpus)
    warn_if_busy(busy, console)
    outcomes = []
    for offer in chosen:
        if missing := offers.missing(offer):
            console.print(f"{offer.name}: left out, no {missing}", markup=False)
        else:
            outcomes.append(Outcome(offer))
    work = shapes(quick=quick)
    try:
        take_turns(outcomes, settings, work, runs, partial(_tell, console))
    finally:  # also what was measured before Ctrl-C: a run is long
        described = {"cpus": list(settings.cpus), "pool_bytes": pool_bytes, "runs": runs, "quick": quick}
        with saved_first(json_path, report.to_json(outcomes, described, busy)):
            if markdown_path is not None:
                report.write_markdown(markdown_path, outcomes, work)
            for figures in report.all_figures(work):
                console.print(Fitted(figures.table(outcomes)))
            console.print(Fitted(report.about(outcomes)))
    if any(outcome.failures and outcome.offer.name.startswith("crossrail") for outcome in outcomes):
        raise click.exceptions.Exit(1)


def _tell(console: Console, offer: Offer, turn: Turn) -> None:
    line = report.one_line(offer, turn.figures, turn.failures)
    console.print(line, markup=False, soft_wrap=True)
