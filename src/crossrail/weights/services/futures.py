"""Outcomes of tasks."""

from __future__ import annotations

import asyncio


def retrieve_exception(task: asyncio.Task[None]) -> None:
    """Retrieves what the task raised: otherwise the loop complains about it if nobody waits for the task any more."""
    if not task.cancelled():
        task.exception()


def is_true(task: asyncio.Task[bool]) -> bool:
    """Whether the task has ended with True."""
    return not task.cancelled() and task.exception() is None and task.result()


def has_failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
