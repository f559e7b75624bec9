"""The work of `crossrail bench`: choose the measures, run them, show and keep the figures."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress, TaskID

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
from crossrail.cli.bench.machine import busy_share, describe_machine
from crossrail.cli.bench.outputs import Outputs
from crossrail.cli.bench.pair import Pair, Settings, check_cpus, choose_cpus
from crossrail.cli.bench.spec import Measure, Result
from crossrail.cli.console import count_progress, open_console
from crossrail.cli.json_output import is_alone
from crossrail.cli.memory import check_memory
from crossrail.errors import CrossrailError, UsageError

_QUICK_RUNS = 3
_POOLS = 3  # source and copy here, the target there; private memory takes as much again


def all_measures(transport: str) -> list[Measure]:
    """The measures that apply to this transport, in the order of the table."""
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
    """Those whose names begin with one of `names`; all if none are given. UsageError if one matches nothing."""
    known = all_measures(transport)
    for name in names:
        if not any(measure.name.startswith(name) for measure in known):
            raise UsageError(f"--only {name} fits no measure; there are {', '.join(m.name for m in known)}")
    return [m for m in known if not names or any(m.name.startswith(name) for name in names)]


def run(measures: Sequence[Measure], settings: Settings, runs: int, console: Console, results: list[Result]) -> None:
    """Runs one measure after another, appending to results. A failing one is reported and does not stop the others,
    unless the peer is gone.
    """
    with Pair(settings) as pair, count_progress(console) as progress:
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
                console.print(f"{measure.name} failed: {error}", style="red", markup=False, soft_wrap=True)
                if not pair.child.alive:
                    raise
                pair.reset()
            result.note = pair.note
            if not console.is_terminal:
                console.print(report.one_line(result), markup=False, soft_wrap=True)


def _sample(measure: Measure, pair: Pair, result: Result, runs: int, progress: Progress, task: TaskID) -> None:
    # closing: the measure's own clean-up runs now, and not when the generator happens to be collected.
    with closing(measure.samples(pair)) as samples:
        for _ in range(runs):
            result.samples.append(next(samples))
            progress.advance(task)


def measure(
    *,
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
    """The command, by its options (command.py)."""
    measures = choose(only, transport)
    if list_only:
        click.echo("\n".join(f"{measure.name:22} {measure.title}" for measure in measures))
        return
    written = Outputs.chosen(outputs, measures)
    settings = Settings(cpus or choose_cpus(), pool_bytes, transport, quick, stand_in)
    check_cpus(settings.cpus)
    check_memory("the benchmark", _POOLS * pool_bytes, "make the pools smaller with --pool-bytes")
    console = open_console(stderr=is_alone(written.json_path))
    console.print(describe_machine(), markup=False)
    if settings.cpus[0] == settings.cpus[1]:
        console.print("both processes share one core: figures of two processes mean little", style="yellow")
    busy = busy_share(settings.cpus)
    report.warn_if_busy(busy, console)
    results: list[Result] = []
    with written.of(results, settings.to_json(), busy, console):
        run(measures, settings, runs or (_QUICK_RUNS if quick else 5), console, results)
    verdicts = {result.verdict for result in results}
    if "error" in verdicts or (strict and "miss" in verdicts):
        raise click.exceptions.Exit(1)
