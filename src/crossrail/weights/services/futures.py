"""Outcomes of tasks, and a future that a receiver waits for."""

from __future__ import annotations

import asyncio

from crossrail.errors import UsageError


def heard(task: asyncio.Task[None]) -> None:
    """Retrieves what the task raised: otherwise the loop complains about it if nobody waits for the task any more."""
    if not task.cancelled():
        task.exception()


def new_future() -> asyncio.Future[None]:
    """UsageError where no event loop runs."""
    try:
        return asyncio.get_running_loop().create_future()
    except RuntimeError:
        raise UsageError("WeightReceiver() outside of a coroutine: its event loop has to be running") from None


def is_true(task: asyncio.Task[bool]) -> bool:
    """Whether the task has ended with True."""
    return not task.cancelled() and task.exception() is None and task.result()


def has_failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
