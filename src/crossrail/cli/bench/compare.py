"""Compares a run with an older one, measure by measure, with intervals, so that noise is not mistaken for a change.

If both runs have the machine's limit next to a figure, ratios to the limit are compared, because the speed of machines
drifts, and the limit drifts with it; otherwise the figures themselves.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from crossrail.cli.bench.interval import Interval, of_quotient
from crossrail.cli.bench.options import share
from crossrail.cli.bench.report import ratio_text
from crossrail.cli.bench.saved import Saved, read_json
from crossrail.cli.bench.spec import Result
from crossrail.cli.console import open_console
from crossrail.errors import UsageError

_MACHINE_KEYS = ("cpu", "cores", "cores_usable", "caches", "memory", "kernel")
_STYLES = {"faster": "green", "slower": "red"}
_WIDE = 100  # of a terminal that has room for titles
_NARROW = 72  # and one that has none for more than the verdict


@dataclass(frozen=True)
class Change:
    """One measure in both runs.

    quotient: new / old of medians, above 1 always means better. interval: of it; None with a single run on either side.
    by: "ratio" (to the machine's limit) or "value".
    """

    name: str
    title: str
    unit: str
    old: float
    new: float
    by: str
    quotient: float
    interval: Interval | None

    @property
    def verdict(self) -> str:
        """ "faster" or "slower" if the whole interval is on one side."""
        if self.interval is None:
            return "one run says nothing"
        if self.interval.low > 1:
            return "faster"
        return "slower" if self.interval.high < 1 else "no difference seen"

    def is_slower_by(self, share: float) -> bool:
        """Whether it is certainly slower, and the medians differ by more than that share."""
        return self.verdict == "slower" and self.quotient < 1 - share


@dataclass(frozen=True)
class Comparison:
    """notes: what could not be compared; warnings: why the changes may not be what they seem."""

    old: Saved
    new: Saved
    changes: list[Change]
    notes: list[str]
    warnings: list[str]

    def slower_by(self, share: float) -> list[str]:
        """Names of the measures that are surely slower, by more than that share."""
        return [change.name for change in self.changes if change.is_slower_by(share)]


def compare(old: Saved, new: Saved) -> Comparison:
    """Measures that both have, in the order of the new run."""
    was = {result.measure.name: result for result in old.results}
    changes, notes = [], []
    for result in new.results:
        name = result.measure.name
        if name not in was:
            continue
        found = _change(was[name], result)
        if isinstance(found, Change):
            changes.append(found)
        else:
            notes.append(f"{name}: {found}")
    names = [result.measure.name for result in new.results]
    for run, only in ((new, [name for name in names if name not in was]), (old, [n for n in was if n not in names])):
        if only:
            notes.append(f"only in {run.name}: {', '.join(only)}")
    return Comparison(old, new, changes, notes, list(_warnings(old, new)))


def _change(old: Result, new: Result) -> Change | str:
    """The change, or why there is none."""
    for which, result in (("older", old), ("newer", new)):
        if result.error or not result.samples:
            return f"the {which} run has no figure"
    if old.measure.unit != new.measure.unit:
        return f"was in {old.measure.unit}, is in {new.measure.unit}"
    both_have_limits = all(len(r.ratios) == len(r.samples) for r in (old, new))
    by_ratio = both_have_limits and old.measure.limit == new.measure.limit
    was = old.ratios if by_ratio else [sample.value for sample in old.samples]
    now = new.ratios if by_ratio else [sample.value for sample in new.samples]
    if min(*was, *now) <= 0:
        return "has figures that are not positive, and so no ratio"
    better, worse = (now, was) if new.more_is_better else (was, now)
    quotient = statistics.median(better) / statistics.median(worse)
    return Change(
        new.measure.name, new.measure.title, new.measure.unit, statistics.median(was), statistics.median(now),
        "ratio" if by_ratio else "value", quotient, of_quotient(better, worse),
    )  # fmt: skip


def _warnings(old: Saved, new: Saved) -> Iterator[str]:
    for run in (old, new):
        if run.only_part:
            yield f"ONLY A PART of {run.name} was measured: {_short(run.only_part)}"
    differing = [key for key in _MACHINE_KEYS if old.machine.get(key) != new.machine.get(key)]
    if differing:
        told = "; ".join(f"{key} {_short(old.machine.get(key))} -> {_short(new.machine.get(key))}" for key in differing)
        yield f"ANOTHER MACHINE: {told}. Ratios to limits may be compared, figures may not."
    keys = dict.fromkeys([*old.settings, *new.settings])
    changed = [key for key in keys if old.settings.get(key) != new.settings.get(key)]
    if changed:
        told = "; ".join(
            f"{_short(key)} {_short(old.settings.get(key))} -> {_short(new.settings.get(key))}" for key in changed
        )
        yield f"other settings: {told}"


def _short(value: object) -> str:
    """One line, not too long: anybody may have written the file."""
    text = "unknown" if value is None else str(value)
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= 60 else text[:57] + "..."


def show(comparison: Comparison, console: Console) -> None:
    """Warnings first: they say how to read the rest."""
    for warning in comparison.warnings:
        console.print(warning, style="bold yellow", markup=False, soft_wrap=True)
    if comparison.changes:
        console.print(_table(comparison, console.width))
    else:
        console.print("no measure is in both", markup=False)
    for note in comparison.notes:
        console.print(note, markup=False, soft_wrap=True)


def _table(comparison: Comparison, width: int) -> Table:
    """Less columns where width is small."""
    wide = width >= _WIDE
    since = f", {comparison.old.date}" if comparison.old.date else ""
    title = f"{comparison.new.name} beside {comparison.old.name}{since}"
    table = Table(title=escape(title), title_justify="left", box=box.HEAVY_HEAD if wide else box.SIMPLE)
    table.add_column("measure", overflow="fold", min_width=6)
    names = ("old", "new", "of", "better by", "95 %") if width >= _NARROW else ("better by",)
    for name in names:
        table.add_column(name, justify="left" if name == "of" else "right", no_wrap=width >= _NARROW, min_width=5)
    table.add_column("", overflow="fold")
    for change in comparison.changes:
        style = _STYLES.get(change.verdict, "")
        cells = {
            "old": f"{change.old:.3g}",
            "new": f"{change.new:.3g}",
            "of": "limit" if change.by == "ratio" else escape(change.unit),
            "better by": f"{change.quotient:.2f}x",
            "95 %": ""
            if change.interval is None
            else f"{ratio_text(change.interval.low)}-{ratio_text(change.interval.high)}x",
        }
        verdict = f"[{style}]{change.verdict}[/{style}]" if style else change.verdict
        label = escape(change.title if wide else change.name)
        table.add_row(label, *(cells[name] for name in names), verdict)
    return table


def fail_if_slower(comparison: Comparison, allowed: float | None) -> None:
    """Exit code 1, after naming them, if measures are certainly slower and by more than `allowed`; None: never.

    A comparison in which nothing could be compared fails too: a check without data has not passed.
    """
    if allowed is None:
        return
    if not comparison.changes:
        raise UsageError(f"--fail-slower: {comparison.old.name} has no measure of {comparison.new.name}")
    if names := comparison.slower_by(allowed):
        click.echo(f"slower by more than {allowed:.0%}: {', '.join(names)}", err=True)
        raise click.exceptions.Exit(1)


@click.command("compare")
@click.argument("old", type=click.Path(dir_okay=False, exists=True, readable=True, path_type=Path))
@click.argument("new", type=click.Path(dir_okay=False, exists=True, readable=True, path_type=Path))
@click.option(
    "--fail-slower", type=share, metavar="SHARE", help="Exit code 1 if a measure is slower by more than this, e.g. 10%."
)
def compare_command(old: Path, new: Path, fail_slower: float | None) -> None:
    """Compare two files of `crossrail bench --json`: what is faster, slower, or not distinguishable.

    "better by" is above 1 where NEW is better, for throughput and latency alike. A measure is "faster" or "slower" if
    the whole 95 % interval (Welch's t test on the runs' logarithms) is on one side of 1. "of limit" compares ratios to
    the machine's limit where both runs have it; unlike the figures themselves, these do not drift with the machine.
    """
    comparison = compare(read_json(old), read_json(new))
    show(comparison, open_console())
    fail_if_slower(comparison, fail_slower)
