"""Runs the checks and collects their findings; the JSON form, and the exit status."""

from __future__ import annotations

import datetime
import platform
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from crossrail.doctor.finding import Finding, Fix, Severity, error
from crossrail.doctor.host import Host
from crossrail.doctor.topics import NAMES, TOPICS, Check

JSON_FORMAT = "crossrail.doctor"
JSON_VERSION = 1
_TEXT_MAX = 4000


@dataclass(frozen=True)
class Report:
    """All findings, by topic, worst first within each."""

    findings: tuple[Finding, ...]

    def count(self, severity: Severity) -> int:
        """How many of it."""
        return sum(finding.severity is severity for finding in self.findings)

    def exit_status(self, *, strict: bool) -> int:
        """0: nothing wrong. 1: an error, or a check that failed itself; with strict, also a warning."""
        bad = self.count(Severity.ERROR) + (self.count(Severity.WARNING) if strict else 0)
        return 1 if bad else 0


def run_checks(host: Host, only: Sequence[str] = (), on_topic: Callable[[str], None] = lambda _: None) -> Report:
    """Runs all checks, or those of the topics (or "topic.check" names) in `only`. Never raises for what a check does.

    on_topic: told each topic before its checks run.
    """
    findings: list[Finding] = []
    for topic, checks in TOPICS.items():
        if only and not any(name.partition(".")[0] == topic for name in only):
            continue
        on_topic(topic)
        found = [finding for check in checks for finding in _run_one(host, topic, check, only)]
        findings += sorted(found, key=lambda finding: finding.severity.rank)
    return Report(tuple(findings))


def why_unknown(name: str) -> str:
    """Why nothing can be found under this topic or "topic.check"; "" when something can.

    A name that is no check's would find nothing on any machine, and pass for one with nothing wrong.
    """
    topic = name.partition(".")[0]
    if topic not in TOPICS:
        return f"{name} is no topic; there are {', '.join(TOPICS)}"
    if not any(_selects(name, f"{topic}.{check}") for check in NAMES[topic]):
        return f"{name} is no check; of {topic} there are {', '.join(sorted(NAMES[topic]))}"
    return ""


def _selects(name: str, check: str) -> bool:
    """Whole words: "rdma" or "rdma.gids", and not "rdma.g"."""
    return check == name or check.startswith(name + ".") or ("." in name and check.startswith(name + "-"))


def _run_one(host: Host, topic: str, check: Check, only: Sequence[str]) -> list[Finding]:
    """The findings that `only` selects. A failed check is always reported, since it may have concerned them. It is an
    error: what was not examined must not pass for fine.
    """
    findings: list[Finding] = []
    try:
        for finding in check(host):
            if not only or any(_selects(name, finding.check) for name in only):
                findings.append(finding)
    except Exception:
        findings.append(
            error(
                f"{topic}.{check.__name__.replace('_', '-')}",
                "this check itself failed: please report it",
                traceback.format_exc(limit=-3),
                "what it looks for stays unknown",
                Fix("crossrail doctor --json", "what to attach to the report"),
            )
        )
    return findings


def to_json(report: Report, *, strict: bool, version: str) -> dict[str, Any]:
    """The stable form. Fields may be added within a version; none goes, and none changes its meaning."""
    return {
        "format": JSON_FORMAT,
        "version": JSON_VERSION,
        "crossrail": version,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "host": {"name": platform.node(), "kernel": platform.release(), "machine": platform.machine()},
        "summary": {severity.value: report.count(severity) for severity in Severity},
        "exit_status": report.exit_status(strict=strict),
        "findings": [finding_to_json(finding) for finding in report.findings],
    }


def as_unicode(text: str) -> str:
    """With "?" for bytes that are not UTF-8: JSON could escape them, but many of its readers refuse that."""
    return text.encode(errors="replace").decode()


def finding_to_json(finding: Finding) -> dict[str, Any]:
    """One finding as JSON values."""
    return {
        "check": finding.check,
        "topic": finding.topic,
        "severity": finding.severity.value,
        "title": as_unicode(finding.title[:_TEXT_MAX]),
        "seen": as_unicode(finding.seen[:_TEXT_MAX]),
        "cost": as_unicode(finding.cost[:_TEXT_MAX]),
        "fixes": [{"for": as_unicode(fix.where), "command": as_unicode(fix.command)} for fix in finding.fixes],
    }
