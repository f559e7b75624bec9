"""An inference rank: trainers write its memory, and it knows by counting when a version is complete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from crossrail._closing import AsyncClosing
from crossrail._options import check_seconds, check_whole
from crossrail.control.deadlines import deadline_in, loop_time_s
from crossrail.control.mailbox import Mailbox
from crossrail.errors import UsageError, WaitTimeout
from crossrail.weights.errors import UpdateFailed
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.services import messages as m
from crossrail.weights.services.buffers import Buffers
from crossrail.weights.services.changes import Changes
from crossrail.weights.services.futures import has_failed
from crossrail.weights.services.hooks import Hook, Hooks, no_hook
from crossrail.weights.services.members import Membership, check_one_engine, packed_inventory
from crossrail.weights.services.reading import Reading
from crossrail.weights.services.spare import ClosingSpare
from crossrail.weights.services.updates import FENCE_S as FENCE_S
from crossrail.weights.services.updates import Updates
from crossrail.weights.services.versions import State
from crossrail.weights.threads import in_thread


class WeightReceiver(AsyncClosing):
    """One inference rank. Threads: the event loop's. None of its code runs while weights arrive.

    memory: of role "target"; its arrays are what is written. spare: twice the memory. Updates go into the half that is
        not read, and the old version stays usable until the new one is complete. Without it updates are in place,
        between `pause` and `resume`; one that fails after trainers were told to write, or whose controller falls
        silent, leaves torn weights, which reading() refuses.
    pause(version), resume(version): of the inference engine; called before weights are written in place, and after a
        commit. Both are optional, and coroutine functions, or functions that do not block: they run on the event loop,
        one call at a time. An update that fails cancels a pause() under way. Whatever became of its pause(), resume()
        is called with the version that is here (-1: none yet) if weights are whole; torn ones are resumed by the next
        commit, so there may be several pause() before one resume(). Weights on a GPU are not written before all kernels
        have ended that torch had launched when pause() returned and the last reading() of them ended; for other
        kernels, pause() has to wait.
    Lifecycle: 1. made. 2. join(). 3. reading() whenever weights are used. 4. leave(). 5. close(). Owner of mailbox,
    engine and memory: whoever made them; they stay open until after close().
    """

    def __init__(
        self,
        mailbox: Mailbox,
        memory: WeightMemory,
        *,
        spare: bool = False,
        pause: Hook = no_hook,
        resume: Hook = no_hook,
    ) -> None:
        if memory.role != "target":
            raise UsageError(f"memory of a {memory.role} given to an inference rank")
        check_one_engine(mailbox, memory)
        self.rank = memory.rank
        self.memory = memory
        self._mailbox = mailbox
        self._engine = memory.engine
        self._hooks = Hooks(memory.rank, pause, resume)
        self._buffers = Buffers(memory, has_spare=spare)
        self._reading_tasks: list[asyncio.Task[Any] | None] = []  # once for each reading() that is open
        self._changes = Changes()
        self._has_joined = False
        self._membership = Membership(
            f"inference rank {self.rank}", mailbox, self.join, self._closed_why, self._buffers.broken_why,
            self._changes.notify,
        )  # fmt: skip
        self._updates = Updates(mailbox, self._buffers, self._hooks, self._changes, self._membership)
        self._is_closed = False
        self._spare: ClosingSpare | None = None  # from close() on
        self._freeing: asyncio.Task[None] | None = None
        self._membership.handle(
            {
                m.Await: self._updates.on_await,
                m.Commit: self._updates.on_commit,
                m.Abort: self._updates.on_abort,
                m.Evicted: self._on_evicted,
            },
            while_whole={m.Expect: self._on_expect, m.Open: self._updates.on_open},
        )

    def __repr__(self) -> str:
        return f"<WeightReceiver {self.rank}, version {self.version}{', closed' if self._is_closed else ''}>"

    @property
    def version(self) -> int:
        """The last version that was completed here; -1: none. Says nothing about torn weights: see state."""
        return self._buffers.versions.version

    @property
    def failures(self) -> int:
        """How many attempts this rank knows to have failed."""
        return self._updates.failures

    @property
    def commits(self) -> int:
        """How many updates were completed here."""
        return self._updates.commits

    @property
    def state(self) -> State:
        """The state of the weights that reading() returns."""
        return self._buffers.versions.state

    async def join(self, controller: bytes, timeout_s: float = 30.0, *, displaces: bool = True) -> None:
        """Offers this rank to the controller at this address, or to another one. Registers the memory.

        displaces: False: refused while another process that lives has joined under this rank.
        Raises MemberRefused, NoAnswer, Unreachable; WaitTimeout while a writer of a failed update has stopped in our
        memory; UsageError after close(), before the mailbox was started, and for what is no address: then nothing has
        changed.
        """
        check_seconds(timeout_s=timeout_s)
        self._check_may_join()
        self._mailbox.check_started()
        self._mailbox.wire.identity(controller)
        self._membership.begin(controller)
        async with self._membership.asking():
            await self._join_with(controller, timeout_s, displaces=displaces)

    async def _join_with(self, controller: bytes, timeout_s: float, *, displaces: bool) -> None:
        self._updates.belong_to(controller)
        await self._updates.fail("it joins again")
        inventory = await in_thread(packed_inventory, self.memory)
        await self._buffers.provide()
        self._check_may_join()
        self._buffers.check()
        is_again = self._membership.is_again or not displaces
        await self._membership.ask_to_join(
            controller, inventory, timeout_s, self._buffers.spare_descriptors(), is_again=is_again
        )
        self._has_joined = True

    @asynccontextmanager
    async def reading(self, timeout_s: float = 60.0) -> AsyncIterator[Reading]:
        """The weights of one version, which nobody writes while this is open.

        Waits while an update in place is in progress, or waits for readers to finish; but not within another reading()
        of the same task. Raises TornWeights if an update in place has failed that may have written, WaitTimeout;
        UsageError before join() and after close().
        Close it between uses: with spare memory the next update but one waits for it, in place the next one.
        """
        deadline_at_s = deadline_in(timeout_s)
        task = asyncio.current_task()
        self._check_open()
        while (buffer := self._buffers.versions.begin_reading(is_nested=task in self._reading_tasks)) is None:
            await self._changes.wait(deadline_at_s, f"no whole weights within {timeout_s:g} s: an update is under way")
            self._check_open()
        self._reading_tasks.append(task)
        try:
            yield Reading(self.version, self._buffers.regions(buffer), self.memory)
        finally:
            self._reading_tasks.remove(task)
            self._buffers.versions.end_reading(buffer)
            self._changes.notify()

    async def wait_version(self, version: int, timeout_s: float) -> None:
        """Returns once this version, or a later one, is complete here.

        Raises WaitTimeout; UsageError once this rank takes no part in updates: another has joined under it, or it could
        not join again, or is closed.
        """
        check_whole(version=version)
        deadline_at_s, failures = deadline_in(timeout_s), self.failures
        while self.version < version:
            self._check_takes_part()
            failed = f"; an update failed meanwhile: {self._updates.last_why}" if self.failures > failures else ""
            await self._changes.wait(deadline_at_s, f"version {version} not complete within {timeout_s:g} s{failed}")

    def has_come(self, version: int, commits: int) -> bool:
        """Whether an update has brought exactly this version since self.commits had this value."""
        return self.commits > commits and self.version == version

    async def receive(
        self, version: int, timeout_s: float, failures: int | None = None, commits: int | None = None
    ) -> None:
        """Returns once an update has brought exactly this version, which may be the current one, or an older one.

        Raises UpdateFailed as soon as an attempt has failed; WaitTimeout; UsageError as wait_version().
        failures, commits: the values of self.failures and self.commits before the update was requested, since it may
            end before this is called.
        """
        check_whole(version=version)
        deadline_at_s = deadline_in(timeout_s)
        known = self.failures if failures is None else failures
        before = self.commits if commits is None else commits
        while not self.has_come(version, before):
            if self.failures > known:
                raise UpdateFailed(version, self._updates.last_why)
            self._check_takes_part()
            await self._changes.wait(deadline_at_s, f"version {version} not complete within {timeout_s:g} s")

    async def leave(self, timeout_s: float = 5.0) -> None:
        """Leaves: the next update is without this rank. One in progress fails, here too: its writers are fenced off,
        which goes on after timeout_s if one is frozen. UsageError before join().
        """
        deadline_at_s = deadline_in(timeout_s)
        await self._membership.leave(self._updates.controller, timeout_s)
        # Nothing else would report it: the controller forgets members that leave.
        ending = self._mailbox.spawn(
            self._updates.fail_persistently("it has left"), "ending an update that it has left"
        )
        await asyncio.wait([ending], timeout=max(deadline_at_s - loop_time_s(), 0.0))

    async def close(self, timeout_s: float = FENCE_S) -> None:
        """Ends an update in progress and frees the spare memory; the memory that was passed in stays. Idempotent. After
        a commit it waits for resume(), and lets the controller know first.

        If the last version is in the spare memory, it is copied into the memory that was passed in, unless somebody
        still reads that one, or it was closed. The memory keeps in mind whether it is torn, for another receiver.
        Raises WaitTimeout if a trainer has stopped in the middle of a copy into this memory for timeout_s. Nothing is
        closed then: the memory must stay, and close() may be called again. So it may if it raises that spare memory is
        still in use: it tries again what is left of it.
        """
        check_seconds(timeout_s=timeout_s)
        self._membership.end()
        while self._updates.attempt is not None:  # another may have begun while that one was being fenced off
            try:
                await self._updates.fail("the inference rank is closing", timeout_s)
            except WaitTimeout as error:
                raise WaitTimeout(
                    f"inference rank {self.rank} cannot be closed yet, somebody may still write its weights: {error}. "
                    "Next: end that process, or let it go on, and close() again"
                ) from None
        if self._hooks.tasks and not self._hooks.is_within():
            await asyncio.wait(self._hooks.tasks, timeout=timeout_s)
        if not self._hooks.is_within():
            await self._membership.answered()
        if not self._is_closed:
            self._is_closed = True
            self._spare = self._buffers.release()
            self._membership.close()
            self._changes.notify()
            self._updates.close()
        if self._spare is None:
            return
        if self._freeing is None or has_failed(self._freeing):
            self._freeing = asyncio.ensure_future(in_thread(self._spare.free))
        await asyncio.shield(self._freeing)  # cancelled or not, also of a close() before

    # ---- what the controller says

    def _check_open(self) -> None:
        self._check_not_closed()
        if not self._has_joined:
            raise UsageError(f"inference rank {self.rank} has not joined yet: join() comes first")

    def _closed_why(self) -> str:
        return f"inference rank {self.rank} is closed" if self._is_closed else ""

    def _check_takes_part(self) -> None:
        self._check_not_closed()
        if self._membership.out_why:
            raise UsageError(self._membership.out_why)

    def _check_not_closed(self) -> None:
        if why := self._closed_why():
            raise UsageError(why)

    def _check_may_join(self) -> None:
        if self._is_closed:
            raise UsageError(f"{self._closed_why()}. Next: make another WeightReceiver, and join() that")

    async def _on_expect(self, sender: bytes, expect: m.Expect) -> m.Taken:
        taken = await self._updates.on_expect(sender, expect)
        self._has_joined = True  # its controller counts on it, though the answer to its join() may have been lost
        return taken

    async def _on_evicted(self, sender: bytes, evicted: m.Evicted) -> m.Taken:
        self._updates.check_controller(sender)
        if evicted.displaced is not None:
            if self._membership.displaced(evicted.reason, evicted.displaced):
                self._updates.note_failure(evicted.reason)
                self._mailbox.spawn(
                    self._updates.fail_persistently(evicted.reason), "ending an update that is not for it any more"
                )
        else:
            self._membership.left_out(evicted, sender, lambda: self._updates.fail_persistently("it joins again"))
        return m.Taken()
