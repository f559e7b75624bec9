"""Waits for GPU kernels: on a GPU, vLLM reports that it has launched them, not that they are done.

Caches on the host need none of this: there, whatever vLLM has called is done.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from crossrail.errors import WaitTimeout

log = logging.getLogger("crossrail.vllm")


class Event(Protocol):
    """The parts of a recorded torch.cuda.Event that are used."""

    def synchronize(self) -> None:
        """Blocks until the kernels before it have ended, without the GIL. Raises when the GPU has failed."""


class _Item(NamedTuple):
    """trouble: of recording the event. event None, and no trouble: nothing to wait for but the items before."""

    event: Event | None
    trouble: str
    action: Callable[[str], None]


class Kernels:
    """Does things once kernels have ended, in the order in which they were asked for. Any thread asks.

    Threads: actions are called on one of its own, which waits for events. Waiting has no deadline of its own: it ends
    with the kernels, or with an error once the GPU has failed. Whoever waits for it has one.
    Invariant: an action is called after all those that were asked for before it, and none after close().
    """

    def __init__(self, record: Callable[[], Event]) -> None:
        """record: an event behind all kernels that the calling thread has launched so far."""
        self._record = record
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._calling = threading.Lock()
        self._is_closed = False  # guarded by it
        self._thread = threading.Thread(target=self._run, name="crossrail-kernels", daemon=True)
        self._thread.start()

    def mark(self) -> Event | str:
        """An event behind what is launched now, for then(); or what the driver says against it."""
        try:
            return self._record()
        except Exception as error:  # of the driver: the GPU has failed, and each step hears of it where it waits
            return _text_of(error)

    def then(self, action: Callable[[str], None], mark: Event | str | None) -> None:
        """Calls action("") when the kernels before the mark have ended, or with the driver's error. Returns at once.

        mark None: when the actions before have been called.
        """
        trouble = mark if isinstance(mark, str) else ""
        self._items.put(_Item(None if isinstance(mark, str) else mark, trouble, action))

    def drain(self, timeout_s: float) -> None:
        """Returns when all actions asked for so far have been called. Raises WaitTimeout."""
        passed = threading.Event()
        self.then(lambda _why: passed.set(), None)
        if not passed.wait(timeout_s):
            raise WaitTimeout(f"kernels of the GPU did not end within {timeout_s:g} s")

    def close(self, timeout_s: float) -> None:
        """No action is called any more when it returns; those asked for are, within timeout_s. Idempotent."""
        self._items.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("kernels of the GPU did not end within %g s: what waited for them is not done", timeout_s)
        with self._calling:
            self._is_closed = True

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            why = item.trouble
            if item.event is not None:
                try:
                    item.event.synchronize()
                except Exception as error:  # of the driver, likewise
                    why = _text_of(error)
            with self._calling:
                if self._is_closed:
                    return
                try:
                    item.action(why)
                except Exception:  # the other actions still run
                    log.exception("a mistake of ours, after kernels had ended")


def record_on(device: Any) -> Callable[[], Event]:
    """For Kernels: events on the stream of that device that is current where they are recorded."""
    import torch

    def record() -> Event:
        blocking = torch.cuda.Event(blocking=True)  # waiting threads sleep instead of spinning
        blocking.record(torch.cuda.current_stream(device))
        event: Event = blocking
        return event

    return record


def _text_of(error: Exception) -> str:
    first_line = str(error).strip().partition("\n")[0]
    return f"the GPU failed: {type(error).__name__}: {first_line}"
