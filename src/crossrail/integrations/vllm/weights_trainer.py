"""Updates live vLLM instances from the side of the trainers' controller. Does not import vLLM."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from crossrail._closing import Closing
from crossrail.errors import UsageError
from crossrail.weights.services.controller import OnProgress, WeightController
from crossrail.weights.services.reports import UpdateReport

_REASON_S = 12.0  # for the controller to say why an update has failed: longer than it waits for members to abort


class VllmClient(Protocol):
    """What reaches one instance, over HTTP or in the same process: vLLM's own VLLMWeightSyncClient has these, and so
    has a thin wrapper of vllm.LLM. Its calls block; each runs in a thread, one at a time.
    """

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


@dataclass(frozen=True)
class VllmInstance:
    """workers: how many ranks it has (tensor times data parallel). init_info: more of CrossrailInitInfo than it needs:
    transport, rails, port, secret_file, join_s.
    """

    client: VllmClient
    workers: int = 1
    init_info: dict[str, Any] | None = None


class VllmUpdates(Closing):
    """Instances that are updated together. Threads: the event loop's, and one of its own for each instance.

    Lifecycle: 1. made. 2. join(). 3. update() for each version, while all trainers publish it. Generation must be
    paused by whoever calls, or be at rest between steps; and prefix caches reset afterwards, since what is in them was
    computed with other weights. 4. close().
    """

    def __init__(self, controller: WeightController, instances: Sequence[VllmInstance]) -> None:
        self._controller = controller
        self._instances = list(instances)
        # Not the loop's threads: the controller needs one of them to answer members whom these calls wait for.
        self._threads = [ThreadPoolExecutor(1, f"crossrail-vllm-{i}") for i in range(len(self._instances))]
        self._is_closed = False

    def close(self) -> None:
        """Ends the threads; a call that is under way, of an update that was cancelled, ends first. Returns at once.
        Idempotent. The instances stay inference ranks of the controller.
        """
        self._is_closed = True
        for thread in self._threads:
            thread.shutdown(wait=False)

    async def join(self) -> None:
        """All workers of all instances become inference ranks of the controller: 0, 1, ... in the order given.

        Raises what a client raises.
        """
        first = 0
        infos = []
        for instance in self._instances:
            infos.append(
                {"controller": self._controller.address.hex(), "first_rank": first, **(instance.init_info or {})}
            )
            first += instance.workers
        await self._each(lambda client, i: client.init_weight_transfer_engine(infos[i]))

    async def update(
        self, version: int, timeout_s: float = 60.0, on_progress: OnProgress | None = None
    ) -> UpdateReport:
        """Brings this version from the trainers, which publish it, to all instances, and tells them its number.

        Raises what WeightController.update() raises, once no instance waits for it any more; what a client raises for
        another reason ends the update, and is raised. Instances may be torn then (their logs say so) and must not
        generate until an update succeeds; the same version may be tried again.
        """
        await self._each(lambda client, _: client.start_weight_update())
        info = {"version": version, "timeout_s": timeout_s}
        receiving = self._begin(lambda client, _: client.update_weights(info))
        updating = asyncio.ensure_future(self._controller.update(version, timeout_s, on_progress))
        try:
            ends: list[asyncio.Future[Any]] = [updating, *receiving]
            await asyncio.wait(ends, return_when=asyncio.FIRST_EXCEPTION)
            # An instance that failed because the update did may have heard of it before us.
            await asyncio.wait([updating], timeout=_REASON_S)
        finally:
            updating.cancel()
            await asyncio.gather(updating, *receiving, return_exceptions=True)
        if not updating.cancelled():
            updating.result()
        for call in receiving:
            call.result()
        await self._each(lambda client, _: client.finish_weight_update(str(version)))
        return updating.result()

    async def _each(self, call: Callable[[VllmClient, int], None]) -> None:
        """With each client and its index. Returns when all have ended, also those beside one that failed: threads
        cannot be taken back.
        """
        for outcome in await asyncio.gather(*self._begin(call), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def _begin(self, call: Callable[[VllmClient, int], None]) -> list[asyncio.Future[None]]:
        if self._is_closed:
            raise UsageError("these VllmUpdates are closed")
        loop = asyncio.get_running_loop()
        return [
            loop.run_in_executor(thread, contextvars.copy_context().run, call, instance.client, i)
            for i, (thread, instance) in enumerate(zip(self._threads, self._instances, strict=True))
        ]
