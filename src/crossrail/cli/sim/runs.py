"""`crossrail sim`: runs scenarios in simulated worlds, with many seeds if wanted, and says how to replay a failure."""

from __future__ import annotations

import os
import secrets
import shlex
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from crossrail.cli.console import count_progress, in_one_piece, open_console, text_column
from crossrail.cli.json_output import is_alone, write_json
from crossrail.cli.sim.players import Task, play_each, play_one
from crossrail.cli.tables import Fitted
from crossrail.cli.text import format_bytes, format_count, naming, said_of
from crossrail.errors import CrossrailError, UsageError
from crossrail.sim import timeline
from crossrail.sim.scenarios import SCENARIOS, Outcome, Scenario, find

_JSON_FORMAT = 1
_SEED_BITS = 31
_FAILURES_TOLD_MAX = 8
_REPLAYS_TOLD_MAX = 5
_TRACE_LINES_MAX = 200_000  # more is slow to draw, and the end is what matters


def _choose(names: Sequence[str]) -> list[Scenario]:
    if not names:
        raise UsageError(f"--scenario is missing; there are {', '.join(SCENARIOS)}, all, and MODULE:FUNCTION")
    return list({scenario.name: scenario for name in names for scenario in find(name)}.values())


def _play_all(tasks: Sequence[Task], jobs: int, console: Console) -> list[Outcome]:
    """All outcomes in the order of the tasks; with a progress bar on a terminal."""
    if len(tasks) == 1:
        return [play_one(tasks[0])]
    outcomes, failed = [], 0
    with (
        count_progress(console, text_column("{task.fields[failed]}")) as progress,
        closing(play_each(tasks, min(jobs, len(tasks)))) as played,
    ):
        bar = progress.add_task("", total=len(tasks), failed="")
        for outcome in played:
            outcomes.append(outcome)
            failed += not outcome.ok
            progress.update(bar, advance=1, description=outcome.scenario, failed=f"{failed} failed" if failed else "")
    places = {(task.scenario, task.seed): place for place, task in enumerate(tasks)}
    return sorted(outcomes, key=lambda outcome: places[outcome.scenario, outcome.seed])


# --- what people see ---


@in_one_piece()  # the files of --trace and --log are still to be written
def _tell(outcomes: Sequence[Outcome], seeds: str) -> None:
    console = open_console()
    console.print(Fitted(_table(outcomes)))
    for name, runs in _by_scenario(outcomes):
        if figures := _figures(runs):
            click.echo(f"{name}: {'; '.join(figures)}{'' if len(runs) == 1 else ' (medians)'}")
    click.echo(f"{format_count(sum(outcome.checks for outcome in outcomes), 'check')}, {seeds}")
    failed = [outcome for outcome in outcomes if not outcome.ok]
    for outcome in failed[:_REPLAYS_TOLD_MAX]:
        _tell_failure(outcome, console, in_full=len(failed) == 1)
    if len(failed) > _REPLAYS_TOLD_MAX:
        click.echo(f"\nand {len(failed) - _REPLAYS_TOLD_MAX} more runs failed; --json has all")


def _table(outcomes: Sequence[Outcome]) -> Table:
    """A line a scenario: sums over its runs."""
    table = Table(title="crossrail sim", title_justify="left")
    table.add_column("scenario", no_wrap=True)
    for title in ("runs", "virtual", "real", "works", "bytes"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, runs in _by_scenario(outcomes):
        failed = sum(not run.ok for run in runs)
        table.add_row(
            escape(name),
            str(len(runs)),
            _seconds(sum(run.virtual_s for run in runs)),
            _seconds(sum(run.real_s for run in runs)),
            f"{sum(run.stats.get('works', 0) for run in runs):,}",
            format_bytes(sum(run.stats.get("bytes", 0) for run in runs)),
            f"[red]{failed} failed[/red]" if failed else "[green]ok[/green]",
        )
    return table


def _by_scenario(outcomes: Sequence[Outcome]) -> list[tuple[str, list[Outcome]]]:
    names = dict.fromkeys(outcome.scenario for outcome in outcomes)
    return [(name, [outcome for outcome in outcomes if outcome.scenario == name]) for name in names]


def _figures(runs: Sequence[Outcome]) -> list[str]:
    """The medians, in virtual units."""
    told = []
    for name in dict.fromkeys(name for run in runs for name in run.figures):
        found = [run.figures[name] for run in runs if name in run.figures]
        value = statistics.median(figure.value for figure in found)
        told.append(f"{name} {value:.4g}{' ' if found[0].unit else ''}{found[0].unit}")
    return told


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}" if value < 1000 else f"{value:,.0f} s"
    return f"{value * 1e9:.3g} ns"


def _replay(outcome: Outcome) -> str:
    trace = f"{outcome.scenario.rpartition(':')[2]}-{outcome.seed}.json"
    return shlex.join(
        ["crossrail", "sim", "--scenario", outcome.scenario, "--seed", str(outcome.seed), "--trace", trace]
    )


def _tell_failure(outcome: Outcome, console: Console, *, in_full: bool) -> None:
    console.print(
        f"\n{outcome.scenario} with seed {outcome.seed} failed: {len(outcome.failures)} of "
        f"{format_count(outcome.checks, 'check')}",
        style="red",
        markup=False,
    )
    for failure in outcome.failures[:_FAILURES_TOLD_MAX]:
        click.echo(f"  {failure}")
    if len(outcome.failures) > _FAILURES_TOLD_MAX:
        click.echo(f"  and {len(outcome.failures) - _FAILURES_TOLD_MAX} more; --json has all")
    if in_full and outcome.traceback:
        click.echo(outcome.traceback)
    click.echo(f"  replay: {_replay(outcome)}")


def _to_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    runs = []
    for outcome in outcomes:
        run = {name: value for name, value in asdict(outcome).items() if name != "log"}
        runs.append(run | {"ok": outcome.ok, "replay": _replay(outcome)})
    return {"format": _JSON_FORMAT, "ok": all(outcome.ok for outcome in outcomes), "runs": runs}


def _write_pictures(outcomes: Sequence[Outcome], trace: Path | None, log: Path | None) -> None:
    """For the first run that failed, else for the first one: runs it once more, now keeping the log."""
    chosen = next((outcome for outcome in outcomes if not outcome.ok), outcomes[0])
    again = play_one(Task(chosen.scenario, chosen.seed, False, True if log is not None else _TRACE_LINES_MAX))
    about = f"{again.scenario}, seed {again.seed}"
    if not again.digest:  # its process ended first
        raise CrossrailError(f"no event log of {about}: {again.failures[0]}, and the log with it")
    if log is not None:
        with naming(log):
            log.write_text("".join(f"{line}\n" for line in again.log), encoding="utf-8")
        click.echo(f"event log of {about}: {log}", err=True)
    if trace is not None:
        lines = again.log[-_TRACE_LINES_MAX:]
        with naming(trace):
            timeline.write_chrome_trace(trace, lines, title=about)
        part = f" (the last {len(lines):,} events)" if len(lines) == _TRACE_LINES_MAX else ""
        click.echo(f"timeline of {about}{part}: {trace}; open it in https://ui.perfetto.dev", err=True)


def run(
    names: tuple[str, ...],
    list_only: bool,
    seed: int | None,
    runs: int,
    jobs: int | None,
    twice: bool,
    trace: Path | None,
    log: Path | None,
    json_path: Path | None,
) -> None:
    """The command; sim.py has its options and its help."""
    if list_only:
        click.echo("\n".join(f"{scenario.name:16} {scenario.title}" for scenario in SCENARIOS.values()))
        return
    scenarios = _choose(names)
    first = secrets.randbits(_SEED_BITS) if seed is None else seed
    tasks = [Task(scenario.name, number, twice) for scenario in scenarios for number in range(first, first + runs)]
    try:
        outcomes = _play_all(tasks, jobs or len(os.sched_getaffinity(0)), open_console(stderr=True))
    except KeyboardInterrupt:
        click.echo(f"\n{_seeds_text(first, runs)}", err=True)
        raise
    failed = [outcome for outcome in outcomes if not outcome.ok]
    write_json(json_path, _to_json(outcomes))
    if not is_alone(json_path):
        _tell(outcomes, _seeds_text(first, runs))
    if trace is not None or log is not None:  # last: a run that crashed may do so again
        try:
            _write_pictures(outcomes, trace, log)
        except (CrossrailError, OSError) as error:
            if not failed:
                raise
            click.echo(said_of(error), err=True)  # that checks failed is what the exit code tells
    if failed:
        raise click.exceptions.Exit(1)


def _seeds_text(first: int, runs: int) -> str:
    return f"seed {first}" if runs == 1 else f"seeds {first} to {first + runs - 1}"
