"""`crossrail bench`: choose the measures, run them, show and keep the figures."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID

from crossrail.cli.bench import (
    api,
    copies,
    deaths,
    footprint,
    kv,
    posting,
    rdma,
    report,
    simulator,
    small,
    tcp_copies,
    tcp_small,
    tcp_tls,
)
from crossrail.cli.bench.compare import compare_command
from crossrail.cli.bench.hosts.run import run_command
from crossrail.cli.bench.hosts.serve import serve_command
from crossrail.cli.bench.moe.command import moe
from crossrail.cli.bench.outputs import Outputs, output_options
from crossrail.cli.bench.pair import Pair, Settings, check_cpus, choose_cpus
from crossrail.cli.bench.peers.command import peers
from crossrail.cli.bench.spec import Measure, Result
from crossrail.cli.console import open_console, text_column
from crossrail.cli.memory import check_memory
from crossrail.cli.text import cpu_pair, size
from crossrail.errors import CrossrailError, UsageError

_QUICK_RUNS = 3
_POOLS = 3  # source and copy here, the target there; private memory takes as much again


def all_measures(transport: str) -> list[Measure]:
    """In the order of the table: those that say something about this transport."""
    if transport == "tcp":
        return [*tcp_copies.measures(), *tcp_small.measures(), *api.tcp_measures(), *tcp_tls.measures()]
    if transport != "shm":
        return rdma.measures(transport)
    return [
        *copies.measures(),
        *small.measures(),
        *posting.measures(),
        *api.measures(),
        *deaths.measures(),
        *kv.measures(),
        *footprint.measures(),
        *simulator.measures(),
    ]


def choose(names: Sequence[str], transport: str) -> list[Measure]:
    """Those whose names begin with one of `names`; all when there are none. UsageError when one fits nothing."""
    known = all_measures(transport)
    for name in names:
        if not any(measure.name.startswith(name) for measure in known):
            raise UsageError(f"--only {name} fits no measure; there are {', '.join(m.name for m in known)}")
    return [m for m in known if not names or any(m.name.startswith(name) for name in names)]


def run(measures: Sequence[Measure], settings: Settings, runs: int, console: Console, results: list[Result]) -> None:
    """Measure after measure, into results. One that fails is reported and does not stop the others, unless the peer is
    gone.
    """
    columns = (text_column("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        Pair(settings) as pair,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("", total=len(measures) * runs)
        for measure in measures:
            progress.update(task, description=measure.title)
            result = Result(measure)
            results.append(result)
            pair.note = ""
            try:
                _sample(measure, pair, result, runs, progress, task)
            except CrossrailError as error:
                result.error = str(error)
                console.print(f"{measure.name} failed: {error}", style="red", markup=False)
                if not pair.child.alive:
                    raise
                pair.reset()
            result.note = pair.note
            if not console.is_terminal:
                console.print(report.one_line(result), markup=False, soft_wrap=True)


def _refuse_options(ctx: click.Context) -> None:
    """Before a subcommand they would do nothing."""
    for option in ctx.command.params:
        if ctx.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE:
            what = ctx.invoked_subcommand
            raise UsageError(
                f"{option.opts[0]} before `{what}` is of `crossrail bench` itself; what `bench {what}` takes comes "
                f"after it: crossrail bench {what} --help"
            )


def _sample(measure: Measure, pair: Pair, result: Result, runs: int, progress: Progress, task: TaskID) -> None:
    # closing: the measure's own clean-up runs now, and not when the generator happens to be collected.
    with closing(measure.samples(pair)) as samples:
        for _ in range(runs):
            result.samples.append(next(samples))
            progress.advance(task)


@click.group("bench", invoke_without_command=True)
@output_options
@click.option(
    "--only", multiple=True, metavar="NAME", help="Only measures whose names begin with this; may be repeated."
)
@click.option("--list", "list_only", is_flag=True, help="List the measures and exit.")
@click.option("--runs", type=click.IntRange(1, 1000), help="Samples of each measure [default: 5, quick 3].")
@click.option("--quick", is_flag=True, help="A tenth of the work: for a first look, not for figures to quote.")
@click.option("--cpus", metavar="A,B", type=cpu_pair, help="Cores of the two processes [default: first and last].")
@click.option(
    "--pool-bytes",
    type=size(64 << 20, 1 << 40),
    default="256M",
    show_default=True,
    help="Memory that copies cycle through on each side. Must be much larger than the caches.",
)
@click.option(
    "--transport",
    type=click.Choice(["shm", "tcp", "verbs", "ofi", "ofi:tcp"]),
    default="shm",
    show_default=True,
    help="Transport of the engines: tcp over 127.0.0.1, against bare sockets; verbs and ofi from a NIC to itself; "
    "ofi:tcp over libfabric's own tcp provider.",
)
@click.option("--stand-in", type=click.Choice(["shm"]), hidden=True, help="Engines use this one; tests the bench.")
@click.option("--strict", is_flag=True, help="Exit code 1 if a target is missed.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    only: tuple[str, ...],
    list_only: bool,
    runs: int | None,
    quick: bool,
    cpus: tuple[int, int] | None,
    pool_bytes: int,
    transport: str,
    stand_in: str | None,
    strict: bool,
    **outputs: Any,
) -> None:
    """Measure the engine against the limits of this machine.

    Two processes run, pinned to different cores. Each sample of a measure is taken right after a sample of the
    machine's limit for it (one thread's memcpy, a bare flag or socket, ...), and the ratio is between these two,
    because the speed of machines drifts. Data is verified in a pass that is not timed. benchmarks/README.md describes
    each measure.
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    measures = choose(only, transport)
    if list_only:
        click.echo("\n".join(f"{measure.name:22} {measure.title}" for measure in measures))
        return
    written = Outputs.chosen(outputs, measures)
    settings = Settings(cpus or choose_cpus(), pool_bytes, transport, quick, stand_in)
    check_cpus(settings.cpus)
    check_memory("the benchmark", _POOLS * pool_bytes, "make the pools smaller with --pool-bytes")
    console = open_console()
    console.print(report.describe_machine(), markup=False)
    if settings.cpus[0] == settings.cpus[1]:
        console.print("both processes share one core: figures of two processes mean little", style="yellow")
    busy = report.busy_share(settings.cpus)
    report.warn_if_busy(busy, console)
    results: list[Result] = []
    with written.of(results, settings.to_json(), busy, console):
        run(measures, settings, runs or (_QUICK_RUNS if quick else 5), console, results)
    verdicts = {result.verdict for result in results}
    if "error" in verdicts or (strict and "miss" in verdicts):
        raise click.exceptions.Exit(1)


for subcommand in (moe, peers, serve_command, run_command, compare_command):
    command.add_command(subcommand)
