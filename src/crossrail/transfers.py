"""Transfers, the result of every submit. The class is native; what needs an event loop or a thread is here."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from crossrail import _raise, errors
from crossrail._core import Transfer
from crossrail._notify import LoopNotifier, callbacks_of

__all__ = ["Transfer"]


def await_transfer(transfer: Transfer) -> Generator[Any, None, None]:
    """`await transfer`. Cancelling the task that awaits it does not cancel the transfer."""
    if not transfer.done:
        loop = LoopNotifier.running(transfer._engine)
        cookie, completed = loop.expect()
        try:
            if transfer._notify(loop.notifier, cookie):
                yield from completed.__await__()
        finally:
            loop.forget(cookie)
    transfer.wait(0)


def add_done_callback(transfer: Transfer, fn: Callable[[Transfer], object]) -> None:
    """`transfer.add_done_callback(fn)`."""
    _raise.check_callable(fn, "fn")
    if getattr(fn, "__module__", None) == "asyncio.tasks":
        # asyncio.wait() takes any object with this method for a future, and waits for a callback on its loop's own
        # thread. Ours never run there: it would hang.
        raise errors.UsageError(
            "asyncio.wait takes tasks, not transfers: give it asyncio.ensure_future(transfer). "
            "asyncio.gather, wait_for, shield and as_completed take transfers"
        )
    callbacks = callbacks_of(transfer._engine)
    callbacks.start()
    cookie = callbacks.register(partial(fn, transfer))
    if not transfer._notify(callbacks.notifier, cookie):
        callbacks.notifier.post(cookie)
    callbacks.start()
