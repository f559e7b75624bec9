"""The result of a check: what was examined, what was found, what it costs, and the command that changes it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Severity(enum.Enum):
    """How bad it is. The values are part of the JSON format."""

    OK = "ok"  # examined, nothing to do
    NOTE = "note"  # worth knowing; nothing is wrong
    WARNING = "warning"  # transfers will be slow, or fail under load
    ERROR = "error"  # something this machine is meant for does not work, or could not be examined

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return _RANKS[self]


_RANKS = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.NOTE: 2, Severity.OK: 3}


@dataclass(frozen=True)
class Fix:
    """A way to change it. command: to be typed as it is; empty if no command does it, and `where` says it all.

    where: the situation or place that the command is for, may be empty.
    """

    command: str
    where: str = ""


@dataclass(frozen=True)
class Finding:
    """One line of the report, and the text below it.

    check: stable name, "topic.check". title: what is the case, in one line. seen: where it was looked and what stood
    there. cost: what it does to transfers, with figures where they are known; empty when there is nothing to pay.
    """

    check: str
    severity: Severity
    title: str
    seen: str = ""
    cost: str = ""
    fixes: tuple[Fix, ...] = ()

    @property
    def topic(self) -> str:
        """The group in which it is shown."""
        return self.check.partition(".")[0]


def ok(check: str, title: str, seen: str = "") -> Finding:
    """Looked at, and fine."""
    return Finding(check, Severity.OK, title, seen)


def note(check: str, title: str, seen: str, cost: str = "", *fixes: Fix) -> Finding:
    """Worth knowing."""
    return Finding(check, Severity.NOTE, title, seen, cost, fixes)


def warning(check: str, title: str, seen: str, cost: str, *fixes: Fix) -> Finding:
    """Will be slow, or fail under load."""
    return Finding(check, Severity.WARNING, title, seen, cost, fixes)


def error(check: str, title: str, seen: str, cost: str, *fixes: Fix) -> Finding:
    """Does not work."""
    return Finding(check, Severity.ERROR, title, seen, cost, fixes)
