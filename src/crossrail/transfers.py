"""Transfers, the result of every submit. The class is native; what needs an event loop or a thread is here."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from crossrail import _raise
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
    callbacks = callbacks_of(transfer._engine)
    callbacks.start()
    cookie = callbacks.register(partial(fn, transfer))
    if not transfer._notify(callbacks.notifier, cookie):
        callbacks.notifier.post(cookie)
    callbacks.start()
