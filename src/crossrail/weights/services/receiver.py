"""An inference rank: its memory is written by trainers, and it knows by counting when a version is all there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import crossrail as xr
from crossrail._closing import AsyncClosing
from crossrail.control.deadlines import in_time
from crossrail.control.mailbox import Mailbox, NoAnswer
from crossrail.control.wire import Unreachable
from crossrail.errors import CrossrailError, UsageError, WaitTimeout
from crossrail.weights import gpu
from crossrail.weights.errors import Refused, UpdateFailed
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.services import messages as m
from crossrail.weights.services.members import Membership, next_word, packed_inventory
from crossrail.weights.services.versions import State, Versions

log = logging.getLogger("crossrail.weights")

_GRACE_S = 5.0  # beyond an update's deadline, for the controller's own word that it failed
FENCE_S = 30.0  # how long a writer may stand still in a copy until whoever fences it off hears of that
_FENCE_AGAIN_S = 1.0

Hook = Callable[[int], Awaitable[None]]


async def _nothing(_version: int) -> None:
    return


@dataclass
class _Attempt:
    """An update under way at this rank."""

    number: int
    version: int
    counter: xr.ImmCounter
    expected: int
    deadline_s: float  # on the loop's clock
    timer: asyncio.TimerHandle | None = None
    is_whole: bool = False
    is_failed: bool = False


class WeightReceiver(AsyncClosing):
    """One inference rank. Threads: the event loop's. None of its code runs while weights arrive.

    memory: of role "target"; its arrays are what is written. spare: twice the memory. Updates go into the half that is
        not read, and the old version stays usable until the new one is complete. Without it updates are in place,
        between `pause` and `resume`, and a failed one leaves torn weights, which reading() refuses.
    pause(version), resume(version): of the inference engine; called before weights are written in place, and after a
        commit. Both are optional. A failed update does not resume. Weights on a GPU are not written before all kernels
        have ended that torch had launched when pause() returned and the last reading() of them ended; for other
        kernels, pause() has to wait.
    failures: how many attempts this rank knows to have failed; commits: how many were completed here.
    Lifecycle: 1. made. 2. join(). 3. reading() whenever weights are used. 4. leave(). 5. close(). Owner of mailbox,
    engine and memory: whoever made them; they stay open until after close().
    """

    def __init__(
        self,
        mailbox: Mailbox,
        memory: WeightMemory,
        *,
        spare: bool = False,
        pause: Hook = _nothing,
        resume: Hook = _nothing,
    ) -> None:
        if memory.role != "target":
            raise UsageError(f"memory of a {memory.role} given to an inference rank")
        self.rank = memory.rank
        self.memory = memory
        self._mailbox = mailbox
        self._engine = memory.engine
        self._has_spare = spare
        self._pause, self._resume = pause, resume
        self._buffers: list[list[xr.Region]] = []
        self._versions = Versions(2 if spare else 1)
        self._reading_tasks: list[asyncio.Task[Any] | None] = []  # once for each reading() that is open
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._controller = b""
        self._expected: tuple[str, int] | None = None
        self._attempt: _Attempt | None = None
        self._attempt_max = 0  # attempts up to this one are over, also those whose Open is still on its way
        self._fencing = asyncio.Lock()
        self._membership = Membership(f"inference rank {self.rank}", mailbox, self.join)
        self._is_closed = False
        self.failures = 0
        self.commits = 0
        self._why = ""
        for kind, handler in (
            (m.RollCall, self._on_roll_call),
            (m.Expect, self._on_expect),
            (m.Open, self._on_open),
            (m.Await, self._on_await),
            (m.Commit, self._on_commit),
            (m.Abort, self._on_abort),
            (m.Evicted, self._on_evicted),
        ):
            mailbox.handle(kind, handler)

    def __repr__(self) -> str:
        return f"<WeightReceiver {self.rank}, version {self.version}{', closed' if self._is_closed else ''}>"

    @property
    def version(self) -> int:
        """The last version that was completed here; -1: none. Says nothing about torn weights: see state."""
        return self._versions.version

    @property
    def state(self) -> State:
        """Of the weights that reading() gives."""
        return self._versions.state

    async def join(self, controller: bytes, timeout_s: float = 30.0) -> None:
        """Offers this rank to the controller at this address, or to another one. Registers the memory.

        Raises Refused, NoAnswer, Unreachable; WaitTimeout while a writer of a failed update has stopped in our memory.
        """
        self._membership.begin()
        if controller != self._controller:
            self._controller, self._attempt_max = controller, 0
        await self._fail("it joins anew")
        inventory = await asyncio.to_thread(packed_inventory, self.memory)
        if not self._buffers:
            buffers = [self.memory.regions]
            if self._has_spare:
                buffers.append(await asyncio.to_thread(self._alloc_spare))
            self._buffers = self._buffers or buffers
        self._is_closed = False
        self._check_memory()
        spare = [bytes(region.descriptor) for region in self._buffers[-1]] if self._has_spare else []
        question = m.Join(next_word(self._mailbox), inventory, spare)
        answer: m.Joined | m.JoinRefused
        answer = await self._mailbox.ask(controller, question, (m.Joined, m.JoinRefused), timeout_s)
        if isinstance(answer, m.JoinRefused):
            raise Refused(f"inference rank {self.rank} was refused: {answer.reason}")

    @asynccontextmanager
    async def reading(self, timeout_s: float = 60.0) -> AsyncIterator[Reading]:
        """The weights of one version, which nobody writes while this is open.

        Waits while an update in place is in progress, or waits for readers to finish; but not within another reading()
        of the same task. Raises TornWeights if an update in place has failed, WaitTimeout; UsageError before join() and
        after close().
        Close it between uses: with spare memory the next update but one waits for it, in place the next one.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        task = asyncio.current_task()
        self._check_open()
        while (buffer := self._versions.begin_reading(is_nested=task in self._reading_tasks)) is None:
            await self._wait_changed(deadline, f"no whole weights within {timeout_s:g} s: an update is under way")
            self._check_open()
        self._reading_tasks.append(task)
        try:
            yield Reading(self._versions.version, self._buffers[buffer], self.memory)
        finally:
            self._reading_tasks.remove(task)
            self._versions.end_reading(buffer)
            self._notify()

    async def wait_version(self, version: int, timeout_s: float) -> None:
        """Returns once this version, or a later one, is complete here.

        Raises WaitTimeout; UsageError if close() is called meanwhile.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.version < version:
            self._check_not_closed()
            await self._wait_changed(deadline, f"version {version} not complete within {timeout_s:g} s")

    def has_come(self, version: int, commits: int) -> bool:
        """Whether an update has brought exactly this version since self.commits had this value."""
        return self.commits > commits and self.version == version

    async def receive(
        self, version: int, timeout_s: float, failures: int | None = None, commits: int | None = None
    ) -> None:
        """Returns once an update has brought exactly this version, which may be the current one, or an older one.

        Raises UpdateFailed as soon as an attempt has failed; WaitTimeout; UsageError if close() is called meanwhile.
        failures, commits: the values of self.failures and self.commits before the update was requested, since it may
            end before this is called.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        known = self.failures if failures is None else failures
        before = self.commits if commits is None else commits
        while not self.has_come(version, before):
            if self.failures > known:
                raise UpdateFailed(version, self._why)
            self._check_not_closed()
            await self._wait_changed(deadline, f"version {version} not complete within {timeout_s:g} s")

    async def leave(self, timeout_s: float = 5.0) -> None:
        """Leaves: the next update is without this rank."""
        self._membership.end()
        try:
            await self._mailbox.ask(self._controller, m.Leave(next_word(self._mailbox)), m.Taken, timeout_s)
        except (NoAnswer, Unreachable) as error:
            log.info("inference rank %d left without a word: %s", self.rank, error)

    async def close(self, timeout_s: float = FENCE_S) -> None:
        """Ends an update in progress and frees the spare memory; the memory that was passed in stays. Idempotent.

        Raises WaitTimeout if a trainer has stopped in the middle of a copy into this memory for timeout_s. Nothing is
        closed then: the memory must stay, and close() may be called again.
        """
        self._membership.end()
        if self._attempt is not None:
            try:
                await self._fail("the inference rank is closing", timeout_s)
            except WaitTimeout as error:
                raise WaitTimeout(
                    f"inference rank {self.rank} cannot be closed yet, somebody may still write its weights: {error}. "
                    "Next: end that process, or let it go on, and close() again"
                ) from None
        for regions in self._buffers[1:]:
            for region in regions:
                region.close()
        self._buffers.clear()
        self._is_closed = True
        self._membership.close()
        self._notify()

    # ---- what the controller says

    def _check_controller(self, sender: bytes) -> None:
        if sender != self._controller:
            raise UsageError(f"inference rank {self.rank} belongs to another controller")

    def _alloc_spare(self) -> list[xr.Region]:
        return [gpu.alloc(self._engine, region.device, region.nbytes) for region in self.memory.regions]

    def _check_open(self) -> None:
        self._check_not_closed()
        if not self._buffers:
            raise UsageError(f"inference rank {self.rank} has not joined yet: join() comes first")

    def _check_not_closed(self) -> None:
        if self._is_closed:
            raise UsageError(f"inference rank {self.rank} is closed")

    def _check_memory(self) -> None:
        if any(region.closed for regions in self._buffers for region in regions):
            raise UsageError(f"inference rank {self.rank}: memory of its weights was closed, it takes no more updates")

    async def _on_roll_call(self, _sender: bytes, _: m.RollCall) -> m.Taken:
        return m.Taken()

    async def _on_expect(self, sender: bytes, expect: m.Expect) -> m.Taken:
        self._check_controller(sender)
        if self._attempt is not None:
            raise UsageError(f"inference rank {self.rank} is in the middle of an update")
        self._expected = expect.plan, expect.count
        return m.Taken()

    async def _on_open(self, sender: bytes, opened: m.Open) -> m.Opened:
        self._check_controller(sender)
        if opened.attempt <= self._attempt_max:
            raise UsageError(f"attempt {opened.attempt} is over")
        if self._attempt is not None:
            raise UsageError(
                f"inference rank {self.rank} is in the middle of version {self._attempt.version}: one update at a time"
            )
        if self._expected is None or self._expected[0] != opened.plan:
            raise UsageError(f"inference rank {self.rank} does not know plan {opened.plan}")
        loop = asyncio.get_running_loop()
        counter = self._engine.imm_counter(opened.imm)
        if counter.poll():
            raise UsageError(f"immediate {opened.imm} has counts already: something else uses it on this engine")
        self._attempt_max = opened.attempt
        deadline = loop.time() + opened.deadline_s
        attempt = self._attempt = _Attempt(opened.attempt, opened.version, counter, self._expected[1], deadline)
        try:
            self.memory.check_in_place()  # before the pause, which a refused update does not end
            if not self._has_spare:
                await in_time(self._pause(opened.version), opened.deadline_s)
            with self._versions.opening():
                await self._wait_unread(deadline)
            if self._attempt is not attempt:
                raise UsageError(f"attempt {opened.attempt} is over")
            self.memory.check_in_place()
        except BaseException:
            if self._attempt is attempt:
                self._end(attempt)
            self._notify()  # readers may come again
            raise
        buffer = self._versions.open()
        attempt.timer = loop.call_at(deadline + _GRACE_S, self._overdue, attempt)
        self._notify()
        return m.Opened(buffer)

    async def _wait_unread(self, deadline: float) -> None:
        """Until neither a reader nor a kernel is at the memory that is to be written. No reader comes meanwhile."""
        loop = asyncio.get_running_loop()
        devices = gpu.gpus_of(self._buffers[self._versions.back])
        while not self._versions.may_open:
            await self._wait_changed(deadline, f"inference rank {self.rank}: somebody still reads the weights")
        if not devices:
            return
        try:
            await in_time(asyncio.to_thread(gpu.wait_for_kernels, devices), deadline - loop.time())
        except asyncio.TimeoutError:
            raise WaitTimeout(f"inference rank {self.rank}: kernels on {devices[0]} still run") from None

    async def _on_await(self, sender: bytes, question: m.Await) -> m.Whole:
        attempt = self._current(sender, question.attempt)
        if attempt.expected and not attempt.is_whole:
            left_s = attempt.deadline_s - asyncio.get_running_loop().time()
            await attempt.counter.wait_async(attempt.expected, max(left_s, 0.0))
        if attempt.counter.poll():
            raise CrossrailError(
                f"inference rank {self.rank}: {attempt.counter.poll()} more writes than the {attempt.expected} expected"
            )
        attempt.is_whole = True
        return m.Whole()

    async def _on_commit(self, sender: bytes, commit: m.Commit) -> m.Taken:
        attempt = self._current(sender, commit.attempt)
        if not attempt.is_whole:
            raise UsageError(f"inference rank {self.rank} has not counted all of version {attempt.version}")
        self._end(attempt)
        self._versions.commit(attempt.version)
        self.commits += 1
        self._notify()
        await self._resume(attempt.version)
        return m.Taken()

    async def _on_abort(self, sender: bytes, abort: m.Abort) -> m.Aborted:
        self._check_controller(sender)
        self._attempt_max = max(self._attempt_max, abort.attempt)
        if self._attempt is not None and self._attempt.number <= abort.attempt:
            await self._fail(abort.reason)
        else:
            self._note_failure(abort.reason)
        async with self._fencing:  # our own deadline may have begun it
            self._check_memory()
            return m.Aborted([[bytes(region.descriptor) for region in regions] for regions in self._buffers])

    async def _on_evicted(self, sender: bytes, evicted: m.Evicted) -> m.Taken:
        self._check_controller(sender)
        self._membership.left_out(evicted.reason, sender, lambda: self._fail_at_last("it joins anew"))
        return m.Taken()

    def _current(self, sender: bytes, number: int) -> _Attempt:
        self._check_controller(sender)
        if self._attempt is None or self._attempt.number != number or self._attempt.is_failed:
            raise UsageError(f"inference rank {self.rank}: attempt {number} is not under way")
        return self._attempt

    # ---- ending

    def _overdue(self, attempt: _Attempt) -> None:
        if self._attempt is attempt:
            why = "its time was up, and the controller is silent"
            self._mailbox.spawn(self._fail_at_last(why), "an overdue update")

    async def _fail_at_last(self, why: str) -> None:
        """As _fail(), but tries again for as long as a writer stands still: it may thaw, or be killed."""
        attempt = self._attempt
        while attempt is not None and self._attempt is attempt:
            try:
                await self._fail(why)
            except WaitTimeout as error:
                log.warning("inference rank %d is not fenced off, and takes no updates: %s", self.rank, error)
                await asyncio.sleep(_FENCE_AGAIN_S)

    async def _fail(self, why: str, timeout_s: float = FENCE_S) -> None:
        """Fences off all writers: returns when nothing of this attempt can land any more.

        Raises WaitTimeout when one stands still in the middle of a copy; it goes on being the current attempt.
        """
        attempt = self._attempt
        if attempt is None:
            return
        log.warning("inference rank %d: version %d failed: %s", self.rank, attempt.version, why)
        async with self._fencing:
            if self._attempt is not attempt:
                return
            attempt.is_failed = True  # and stays the current one, so that no other begins, until all writers are out
            if self._versions.is_receiving:
                back = self._versions.back
                loop = asyncio.get_running_loop()
                for region in self._buffers[back]:
                    if not region.closed:  # else nobody gets in either
                        await loop.run_in_executor(None, region.revoke, timeout_s)
                        region.renew()
                self._versions.abort()
            self._end(attempt)
        self._note_failure(why)

    def _note_failure(self, why: str) -> None:
        self.failures += 1
        self._why = why
        self._notify()

    def _end(self, attempt: _Attempt) -> None:
        self._attempt = None
        if attempt.timer is not None:
            attempt.timer.cancel()
        attempt.counter.release(force=True)

    def _notify(self) -> None:
        """Something changed that tasks may wait for."""
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)

    async def _wait_changed(self, deadline: float, why: str) -> None:
        left_s = deadline - asyncio.get_running_loop().time()
        if left_s <= 0 or not (await asyncio.wait([self._changed], timeout=left_s))[0]:
            raise WaitTimeout(why)


@dataclass(frozen=True)
class Reading:
    """Weights of one version. regions: where they lie, as many and as long as those of the memory's inventory."""

    version: int
    regions: Sequence[xr.Region]
    _memory: WeightMemory

    def like(self, array: Any) -> Any:
        """The weights that are read where this array of the memory is: itself, or its place in the spare memory.

        A numpy array; on a GPU what was added, or a torch tensor. See WeightMemory.like.
        """
        return self._memory.like(array, self.regions)
