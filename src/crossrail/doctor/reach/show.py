"""The matrix as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from crossrail._text import rate_text
from crossrail.doctor.finding import Finding, Severity
from crossrail.doctor.reach.measure import Matrix, Pair
from crossrail.doctor.report import Report, as_unicode, finding_to_json
from crossrail.doctor.show import printable, show_finding, summary

JSON_FORMAT = "crossrail.doctor.peer"
JSON_VERSION = 1
_TABLE_WIDTH_MIN = 100


def show_matrix(matrix: Matrix, findings: list[Finding], console: Console) -> None:
    """Table, findings, summary."""
    if matrix.pairs:
        console.print(_table(matrix.pairs), width=max(console.width, _TABLE_WIDTH_MIN), crop=False)
        console.print()
    for finding in findings:
        show_finding(finding, console)
    console.print()
    console.print(summary(findings), soft_wrap=True, highlight=False)


def _table(pairs: list[Pair]) -> Table:
    table = Table(title="one stream at a time, from Python", title_justify="left")
    table.add_column("here", no_wrap=True)
    table.add_column("there", no_wrap=True)
    for title in ("RTT us", "MTU", "out", "in"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("" if all(pair.state == "ok" for pair in pairs) else "state")
    for pair in pairs:
        bad = "" if pair.state == "ok" else f"[red]{escape(printable(pair.state))}[/red]"
        table.add_row(
            escape(printable(str(pair.here))),
            escape(printable(str(pair.there))),
            _figure(pair.rtt_us, 0),
            _figure(pair.mtu, 0),
            _rate(pair.out_gb_per_s),
            _rate(pair.in_gb_per_s),
            bad,
        )
    return table


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _rate(gb_per_s: float | None) -> str:
    return "-" if gb_per_s is None else rate_text(gb_per_s)


def to_json(matrix: Matrix, findings: list[Finding], *, strict: bool, version: str) -> dict[str, Any]:
    """The stable form; rules as in crossrail.doctor.report."""
    report = Report(tuple(findings))
    return {
        "format": JSON_FORMAT,
        "version": JSON_VERSION,
        "crossrail": version,
        "peer_crossrail": matrix.peer_version,
        "target": as_unicode(matrix.target),
        "port": matrix.port,
        "addresses": [asdict(attempt) for attempt in matrix.attempts],
        "pairs": [asdict(_in_unicode(pair)) for pair in matrix.pairs],
        "summary": {severity.value: report.count(severity) for severity in Severity},
        "exit_status": report.exit_status(strict=strict),
        "findings": [finding_to_json(finding) for finding in findings],
    }


def _in_unicode(pair: Pair) -> Pair:
    here, there = (replace(rail, interface=as_unicode(rail.interface)) for rail in (pair.here, pair.there))
    return replace(pair, here=here, there=there)
