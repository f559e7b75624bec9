"""The trainers' barrier over the store of a torch.distributed group, for programs that have one anyway."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import crossrail as xr
from crossrail._extras import needs
from crossrail.errors import CrossrailError, WaitTimeout
from crossrail.weights.step.barrier import MakeBarrier
from crossrail.weights.threads import in_thread

_PAUSE_S = (0.0005, 0.02)  # between looks at whether all have come: the first, and the longest


class TorchBarrier:
    """Counts trainers in the store of their group, in a thread. For WeightTrainer(make_barrier=TorchBarrier.of(group)).

    Each attempt has its own keys: leftovers of a failed attempt do not affect the next. gloo's monitored_barrier()
    pairs calls by their number instead, which differs between trainers once an attempt has failed. Like the group it
    depends on the process that keeps the store, mostly rank 0; EngineBarrier needs none. A call of the store may last
    longer than timeout_s: while that process is frozen, or another thread of ours waits in the store.
    """

    def __init__(self, open_store: Callable[[], Any], trainers: int, imm: int, used: list[str]) -> None:
        """open_store: a torch.distributed.Store of these trainers; called in the thread. imm: unique to this attempt.

        used: keys that this trainer has in the store. Those of earlier attempts, which are over, are deleted.
        """
        self._open_store = open_store
        self._trainers = trainers
        self._keys = f"crossrail/barrier/{imm}/"
        self._used = used
        self._waits = 0
        self._is_closed = threading.Event()

    @staticmethod
    def of(group: Any) -> MakeBarrier:
        """A factory of barriers. group: of all trainers, of any backend; None: the default group."""
        used_by: WeakKeyDictionary[xr.Engine, list[str]] = WeakKeyDictionary()  # a trainer each

        def make(engine: xr.Engine, others: Sequence[xr.Address], imm: int) -> TorchBarrier:
            used = used_by.setdefault(engine, [])
            return TorchBarrier(lambda: _store_of(group), len(others) + 1, imm, used)

        return make

    async def wait(self, timeout_s: float) -> None:
        """See Barrier."""
        self._waits += 1
        came = f"{self._keys}{self._waits}"
        all_came = f"{came}/all"
        over = [key for key in self._used if not key.startswith(self._keys)]
        self._used[:] = [*(key for key in self._used if key.startswith(self._keys)), came, all_came]
        await in_thread(self._wait, came, all_came, over, timeout_s)

    def _wait(self, came: str, all_came: str, over: list[str], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        store = self._open_store()
        try:
            for key in over:
                store.delete_key(key)
            if store.add(came, 1) == self._trainers:
                store.set(all_came, "")
            pause_s, longest_s = _PAUSE_S
            while not store.check([all_came]):
                if time.monotonic() >= deadline_s:
                    there = f"{store.add(came, 0)} of {self._trainers} trainers"
                    raise WaitTimeout(f"barrier over torch's store: {there} have come in {timeout_s:.3g} s")
                if self._is_closed.wait(pause_s):
                    raise WaitTimeout("barrier over torch's store: it was closed")
                pause_s = min(2 * pause_s, longest_s)
        except RuntimeError as error:
            raise CrossrailError(f"barrier over torch's store: {str(error).partition(chr(10))[0]}") from error

    def close(self) -> None:
        """Whoever waits here stops. The group is the caller's."""
        self._is_closed.set()


def _store_of(group: Any) -> Any:
    with needs("TorchBarrier", "'crossrail[torch]'"):
        import torch.distributed.distributed_c10d as c10d

    return c10d._get_process_group_store(c10d._get_default_group() if group is None else group)
