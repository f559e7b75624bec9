"""Our lines in an inference engine's log begin with our name, because its format does not show the logger."""

from __future__ import annotations

import logging

# All loggers that an engine's process may use: a logger's filters do not apply to the loggers below it.
LOGGERS = (
    "crossrail",
    "crossrail.control",
    "crossrail.integrations",
    "crossrail.kv",
    "crossrail.kv.http",
    "crossrail.sglang",
    "crossrail.sglang.http",
)


def say_who(record: logging.LogRecord) -> bool:
    """A filter, for loggers or handlers, that lets all pass."""
    record.msg = f"crossrail: {record.msg}"
    return True


def mark_loggers() -> None:
    """For an engine that logs through the root logger. Idempotent."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(say_who)


def log_as(name: str) -> None:
    """For an engine with a logger of its own: our messages go where its messages go, at its level. Idempotent.

    Does nothing if our loggers are configured already, or the engine logs nowhere.
    """
    ours, theirs = logging.getLogger("crossrail"), logging.getLogger(name)
    streams = [handler for handler in theirs.handlers if isinstance(handler, logging.StreamHandler)]
    if ours.hasHandlers() or not streams:
        return
    for handler in streams:
        mine = logging.StreamHandler(handler.stream)
        mine.setFormatter(handler.formatter)
        mine.setLevel(handler.level)
        mine.addFilter(say_who)
        ours.addHandler(mine)
    ours.setLevel(theirs.level)
