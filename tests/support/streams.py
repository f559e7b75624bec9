"""A steady stream of operations, for tests that pull something away in the middle of it."""

import threading
import time
from collections import Counter, deque

import crossrail as xr
from tests.support.limits import WAIT_S, eventually
from tests.support.operations import Operations


class Stream:
    """Keeps `window` operations of one kind in flight on a thread of its own, until stopped or one fails.

    Invariant: `completions[i]` is how often transfer i's callback ran; more than 1 is a bug in the engine.
    """

    def __init__(self, operations: Operations, kind: str, window: int = 8) -> None:
        self.kind = kind
        self.transfers: list[xr.Transfer] = []
        self.completions: Counter[int] = Counter()
        self.failed_at: float | None = None  # time.monotonic() of the first failure seen
        self.refused: BaseException | None = None  # what a submit raised, if one did
        self._operations = operations
        self._window = window
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"stream-{kind}", daemon=True)
        self._thread.start()

    def wait_until_flowing(self, count: int = 3) -> None:
        """Returns when a few operations are done, so that what follows hits the middle."""
        eventually(
            lambda: len(self.transfers) > count + self._window or self.ended,
            f"a stream of {self.kind} that flows",
        )
        assert not self.ended, f"the stream of {self.kind} ended by itself: {self.refused or self.outcomes()}"

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        self._stop.set()

    def finish(self, timeout_s: float = WAIT_S) -> list[Exception | None]:
        """Stops, waits for every transfer and for its callback; returns how each ended (None: done)."""
        self._stop.set()
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"stream of {self.kind}: a transfer did not complete in {timeout_s} s"
        eventually(lambda: all(t.done for t in self.transfers), f"every {self.kind} complete", timeout_s)
        eventually(
            lambda: len(self.completions) == len(self.transfers), f"every callback of {self.kind} ran", timeout_s
        )
        return self.outcomes()

    def outcomes(self) -> list[Exception | None]:
        return [transfer.exception() for transfer in self.transfers if transfer.done]

    def _run(self) -> None:
        inflight: deque[xr.Transfer] = deque()
        try:
            while not self._stop.is_set() and self.failed_at is None:
                while len(inflight) < self._window:
                    inflight.append(self._submit())
                self._retire(inflight.popleft())
        except (xr.EngineClosed, xr.UsageError) as error:
            self.refused = error
        for transfer in inflight:
            self._retire(transfer)

    def _submit(self) -> xr.Transfer:
        transfer = self._operations.submit(self.kind)
        index = len(self.transfers)
        self.transfers.append(transfer)
        transfer.add_done_callback(lambda _: self.completions.update([index]))
        return transfer

    def _retire(self, transfer: xr.Transfer) -> None:
        try:
            transfer.wait(WAIT_S)
        except (xr.TransferError, xr.EngineClosed):
            if self.failed_at is None:
                self.failed_at = time.monotonic()
