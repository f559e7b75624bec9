"""Findings as text for people: grouped, worst first, commands in one piece so that they can be copied."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from crossrail._text import plain
from crossrail.doctor.finding import Finding, Fix, Severity
from crossrail.doctor.report import Report

_STYLES = {Severity.OK: "green", Severity.NOTE: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "bold red"}
_LABEL_WIDTH = 9
_WIDTH_MIN, _WIDTH_MAX = 32, 120


def printable(text: str) -> str:
    """Removes control characters except line ends: files and peers may contain anything, and terminals obey it."""
    return plain(text.replace("\t", " "), keep="\n")


def show_report(report: Report, console: Console) -> None:
    """Shows all findings, and the summary line."""
    topic = ""
    for finding in report.findings:
        if finding.topic != topic:
            topic = finding.topic
            _line(console, Text(("\n" if finding is not report.findings[0] else "") + topic, style="bold"))
        show_finding(finding, console)
    console.print()
    _line(console, summary(report.findings))


def show_finding(finding: Finding, console: Console) -> None:
    """One line if it is fine; otherwise what was seen, what it costs and what to type."""
    width = min(max(console.width, _WIDTH_MIN), _WIDTH_MAX)
    style = _STYLES[finding.severity]
    indent = " " * (_LABEL_WIDTH + 2)
    title = Text("  ").append(finding.severity.value.ljust(_LABEL_WIDTH), style=style)
    wrapped = textwrap.wrap(
        printable(finding.title), width - len(indent), break_long_words=False, break_on_hyphens=False
    )
    title.append(("\n" + indent).join(wrapped), style="" if finding.severity is Severity.OK else "bold")
    if finding.severity is not Severity.OK:
        tag = f"[{finding.check}]"
        fits = len(indent) + len(wrapped[-1] if wrapped else "") + 2 + len(tag) <= width
        title.append(f"  {tag}" if fits else f"\n{indent}{tag}", style="dim")
    _line(console, title)
    if finding.severity is Severity.OK:
        return
    for label, text in (("seen", finding.seen), ("cost", finding.cost)):
        for index, line in enumerate(_wrap(text, width - len(indent) - 5)):
            _line(console, Text(indent).append((label if index == 0 else "").ljust(5), style="dim").append(line))
    for index, fix in enumerate(finding.fixes):
        _line(console, Text(indent).append(("fix" if index == 0 else "").ljust(5), style="dim").append(_fix(fix)))


def _wrap(text: str, width: int) -> Iterable[str]:
    """Paths and words stay whole; lines that were there stay lines."""
    for line in printable(text).splitlines():
        yield from textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)


def _fix(fix: Fix) -> Text:
    if not fix.command:
        return Text(printable(fix.where))
    # The place as a shell comment: what is copied with it still runs.
    return Text(printable(fix.command), style="bold").append(
        f"  # {printable(fix.where)}" if fix.where else "", style="dim"
    )


def _line(console: Console, text: Text) -> None:
    # soft_wrap: never broken into lines by us, so that what is copied is what runs.
    console.print(text, soft_wrap=True, highlight=False)


def summary(findings: Iterable[Finding]) -> Text:
    """ "2 errors, 1 warning, 3 notes, 25 ok"."""
    severities = [finding.severity for finding in findings]
    text = Text()
    for severity in sorted(Severity, key=lambda severity: severity.rank):
        count = severities.count(severity)
        word = severity.value if severity is Severity.OK or count == 1 else severity.value + "s"
        if count or severity is Severity.ERROR:
            text.append(", " if text else "")
            text.append(f"{count} {word}", style=_STYLES[severity] if count else "")
    return text
