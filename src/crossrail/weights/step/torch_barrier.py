"""The barrier of trainers by torch.distributed, on the CPU's network, for those who have a gloo group anyway."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from crossrail._extras import needs
from crossrail.errors import WaitTimeout
from crossrail.weights.step.barrier import MakeBarrier
from crossrail.weights.threads import in_thread

_TIMEOUT_MIN_S = 0.001  # torch counts in these, and takes -1 of them for its own half hour


class TorchBarrier:
    """monitored_barrier() of a gloo group, in a thread. For WeightTrainer(make_barrier=TorchBarrier.of(group)).

    A collective cannot be taken back: a trainer whose update was aborted while it waits here waits until the time is
    up before it takes part in the next, and one that died takes the group with it. EngineBarrier has neither trouble.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    @staticmethod
    def of(group: Any) -> MakeBarrier:
        """What makes them. group: of all trainers, on gloo; None: the default group."""
        return lambda _engine, _others, _imm: TorchBarrier(group)

    async def wait(self, timeout_s: float) -> None:
        """See Barrier."""
        await in_thread(self._wait, timeout_s)

    def _wait(self, timeout_s: float) -> None:
        with needs("TorchBarrier", "'crossrail[torch]'"):
            import torch.distributed as dist

        if timeout_s < _TIMEOUT_MIN_S:
            raise WaitTimeout(f"barrier over gloo: {timeout_s:.3g} s are left, it was not entered")
        try:
            dist.monitored_barrier(self._group, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise WaitTimeout(f"barrier over gloo: {error}") from None

    def close(self) -> None:
        """Nothing: the group is the caller's."""
