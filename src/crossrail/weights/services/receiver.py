"""An inference rank: trainers write its memory, and it knows by counting when a version is complete."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from crossrail._closing import AsyncClosing
from crossrail._options import check_seconds, check_whole
from crossrail.control.deadlines import deadline_in, loop_time_s
from crossrail.control.mailbox import Mailbox, NoAnswer
from crossrail.control.wire import Unreachable
from crossrail.errors import CrossrailError, UsageError, WaitTimeout
from crossrail.weights import gpu
from crossrail.weights.errors import UpdateFailed
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.services import messages as m
from crossrail.weights.services.attempt import Attempt
from crossrail.weights.services.buffers import Buffers
from crossrail.weights.services.changes import Changes
from crossrail.weights.services.fencing import fence
from crossrail.weights.services.futures import has_failed, is_true, retrieve_exception
from crossrail.weights.services.hooks import Hook, Hooks, no_hook
from crossrail.weights.services.kernels import Kernels
from crossrail.weights.services.members import Membership, check_one_engine, next_word, packed_inventory
from crossrail.weights.services.reading import Reading
from crossrail.weights.services.spare import ClosingSpare
from crossrail.weights.services.versions import State
from crossrail.weights.threads import in_thread

log = logging.getLogger("crossrail.weights")

_GRACE_S = 5.0  # beyond an update's deadline, for the controller's own word that it failed
FENCE_S = 30.0  # for how long a writer may be frozen in a copy before fence() reports that
_FENCE_TURN_S = 1.0  # part of that after which another caller gets its turn to fence
_FENCE_AGAIN_S, _FENCE_AGAIN_MAX_S = 1.0, 30.0


class WeightReceiver(AsyncClosing):
    """One inference rank. Threads: the event loop's. None of its code runs while weights arrive.

    memory: of role "target"; its arrays are what is written. spare: twice the memory. Updates go into the half that is
        not read, and the old version stays usable until the new one is complete. Without it updates are in place,
        between `pause` and `resume`, and one that fails once trainers write, or of whose end nothing was heard, leaves
        torn weights, which reading() refuses.
    pause(version), resume(version): of the inference engine; called before weights are written in place, and after a
        commit. Both are optional, and coroutine functions, or functions that do not block: they run on the event loop,
        one call at a time. An update that fails cancels a pause() under way. Whatever became of its pause(), resume()
        is called with the version that is here (-1: none yet) if weights are whole; torn ones are resumed by the next
        commit, so there may be several pause() before one resume(). Weights on a GPU are not written before all kernels
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
        self._controller = b""
        self._has_joined = False
        self._expected: tuple[str, int] | None = None
        self._attempt: Attempt | None = None
        self._attempt_max = 0  # attempts up to this one are over, even if their Open is still in flight
        self._kernels = Kernels(self._changes)
        self._fencing = asyncio.Lock()
        self._membership = Membership(
            f"inference rank {self.rank}", mailbox, self.join, self._closed_why, self._broken_why, self._changes.notify
        )
        self._is_closed = False
        self._spare: ClosingSpare | None = None  # from close() on
        self._freeing: asyncio.Task[None] | None = None
        self.failures = 0
        self.commits = 0
        self._why = ""
        self._membership.handle(
            {
                m.Await: self._on_await,
                m.Commit: self._on_commit,
                m.Abort: self._on_abort,
                m.Evicted: self._on_evicted,
            },
            while_whole={m.Expect: self._on_expect, m.Open: self._on_open},
        )

    def __repr__(self) -> str:
        return f"<WeightReceiver {self.rank}, version {self.version}{', closed' if self._is_closed else ''}>"

    @property
    def version(self) -> int:
        """The last version that was completed here; -1: none. Says nothing about torn weights: see state."""
        return self._buffers.versions.version

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
        if controller != self._controller:
            self._controller, self._attempt_max = controller, 0
        await self._fail("it joins anew")
        inventory = await in_thread(packed_inventory, self.memory)
        await self._buffers.provide()
        self._check_may_join()
        self._check_memory()
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
        deadline_at_s = deadline_in(timeout_s)
        while self.version < version:
            self._check_takes_part()
            await self._changes.wait(deadline_at_s, f"version {version} not complete within {timeout_s:g} s")

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
                raise UpdateFailed(version, self._why)
            self._check_takes_part()
            await self._changes.wait(deadline_at_s, f"version {version} not complete within {timeout_s:g} s")

    async def leave(self, timeout_s: float = 5.0) -> None:
        """Leaves: the next update is without this rank. One in progress fails, here too: its writers are fenced off,
        which goes on after timeout_s if one stands still. UsageError before join().
        """
        deadline_at_s = deadline_in(timeout_s)
        if not self._controller:
            raise UsageError(f"inference rank {self.rank} has joined no controller that it could leave")
        self._membership.end()
        try:
            await self._mailbox.ask(self._controller, m.Leave(next_word(self._mailbox)), m.Taken, timeout_s)
        except (NoAnswer, Unreachable) as error:
            log.info("inference rank %d left without a word: %s", self.rank, error)
        # Nothing else would report it: the controller forgets members that leave.
        ending = self._mailbox.spawn(self._fail_at_last("it has left"), "ending an update that it has left")
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
        while self._attempt is not None:  # another may have begun while that one was being fenced off
            try:
                await self._fail("the inference rank is closing", timeout_s)
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
            self._kernels.cancel()
        if self._spare is None:
            return
        if self._freeing is None or has_failed(self._freeing):
            self._freeing = asyncio.ensure_future(in_thread(self._spare.free))
        await asyncio.shield(self._freeing)  # cancelled or not, also of a close() before

    # ---- what the controller says

    def _check_controller(self, sender: bytes) -> None:
        if sender != self._controller:
            raise UsageError(f"inference rank {self.rank} belongs to another controller")

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

    def _broken_why(self) -> str:
        why = self._buffers.broken_why()
        return f"inference rank {self.rank}: {why}, it takes no more updates" if why else ""

    def _check_memory(self) -> None:
        if why := self._broken_why():
            raise UsageError(why)

    async def _on_expect(self, sender: bytes, expect: m.Expect) -> m.Taken:
        self._check_controller(sender)
        if self._attempt is not None:
            raise UsageError(f"inference rank {self.rank} is in the middle of an update")
        self._expected = expect.plan, expect.count
        self._has_joined = True  # its controller counts on it, though the answer to its join() may have been lost
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
        deadline_at_s = loop_time_s() + opened.timeout_s
        attempt = self._attempt = Attempt(
            opened.attempt, opened.version, sender, counter, self._expected[1], deadline_at_s
        )
        try:
            self.memory.check_in_place()  # before the pause, which a refused update does not end
            open_by_s = deadline_at_s - opened.say_why_s
            if not self._buffers.has_spare:
                await self._pause_by(attempt, open_by_s)
            self._check_current(attempt)
            with self._buffers.versions.opening():
                await self._wait_unread(attempt, open_by_s)
            self._check_current(attempt)
            self.memory.check_in_place()
        except BaseException:
            if self._attempt is attempt:
                self._end_failed(attempt)
            self._changes.notify()  # readers may come again
            raise
        buffer = self._buffers.open()
        attempt.timer = loop.call_at(deadline_at_s + _GRACE_S, self._overdue, attempt)
        self._changes.notify()
        return m.Opened(buffer)

    def _check_current(self, attempt: Attempt) -> None:
        if self._attempt is not attempt:
            raise UsageError(f"attempt {attempt.number} is over")

    async def _pause_by(self, attempt: Attempt, deadline_at_s: float) -> None:
        pausing = attempt.pausing = asyncio.ensure_future(self._paused(attempt))
        pausing.add_done_callback(retrieve_exception)
        self._hooks.keep(pausing)
        try:
            await asyncio.wait([pausing], timeout=max(deadline_at_s - loop_time_s(), 0.0))
            is_late, hook = not pausing.done(), self._hooks.running or f"pause({attempt.version})"
        finally:
            if self._attempt is attempt:  # otherwise it was cancelled already, and may be cleaning up
                pausing.cancel()  # not waited for: whatever hook comes next does that
        self._check_current(attempt)
        if is_late:
            raise WaitTimeout(f"inference rank {self.rank}: {hook} has not returned")
        pausing.result()

    async def _paused(self, attempt: Attempt) -> None:
        await self._hooks.call_pause(attempt.version, attempt.note_paused)

    async def _resumed_with_what_is_here(self) -> None:
        with suppress(CrossrailError):  # it is logged, and nobody waits for it
            await self._hooks.call_resume(self.version)

    async def _wait_unread(self, attempt: Attempt, deadline_at_s: float) -> None:
        """Waits until neither a reader nor a kernel uses the memory to be written, and keeps new readers out.

        UsageError as soon as the attempt is over.
        """
        while not self._buffers.versions.may_open:
            await self._changes.wait(deadline_at_s, f"inference rank {self.rank}: somebody still reads the weights")
            self._check_current(attempt)  # close() has taken the buffers else
        if devices := gpu.gpus_of(self._buffers.back):
            why = f"inference rank {self.rank}: kernels on {devices[0]} still run"
            await self._kernels.wait_ended(devices, deadline_at_s, why, lambda: self._check_current(attempt))

    async def _on_await(self, sender: bytes, question: m.Await) -> m.Whole:
        attempt = self._current(sender, question.attempt)
        if attempt.expected and not attempt.is_whole:
            left_s = attempt.deadline_at_s - loop_time_s()
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
        self._membership.answer_before_close()
        self._end(attempt)
        self._buffers.commit(attempt.version)
        self.commits += 1
        self._changes.notify()
        resuming = asyncio.ensure_future(self._hooks.call_resume(attempt.version))
        self._hooks.keep(resuming)
        await resuming
        return m.Taken()

    async def _on_abort(self, sender: bytes, abort: m.Abort) -> m.Aborted:
        self._check_controller(sender)
        is_late = abort.attempt < self._attempt_max  # another has begun since
        self._attempt_max = max(self._attempt_max, abort.attempt)
        attempt = self._attempt
        if attempt is not None and attempt.number <= abort.attempt:
            # An attempt with another number or controller may be writing.
            if (attempt.number, attempt.controller) == (abort.attempt, sender) and not abort.has_begun:
                attempt.is_unwritten = True
            await self._fail(abort.reason)
        elif not is_late:
            self._note_failure(abort.reason)
        async with self._fencing:  # our own deadline may have begun it
            self._check_memory()
            return m.Aborted(self._buffers.descriptors())

    async def _on_evicted(self, sender: bytes, evicted: m.Evicted) -> m.Taken:
        self._check_controller(sender)
        if evicted.displaced is not None:
            if self._membership.displaced(evicted.reason, evicted.displaced):
                self._note_failure(evicted.reason)
                self._mailbox.spawn(self._fail_at_last(evicted.reason), "ending an update that is not for it any more")
        else:
            self._membership.left_out(evicted, sender, lambda: self._fail_at_last("it joins anew"))
        return m.Taken()

    def _current(self, sender: bytes, number: int) -> Attempt:
        self._check_controller(sender)
        if self._attempt is None or self._attempt.number != number or self._attempt.is_failed:
            raise UsageError(f"inference rank {self.rank}: attempt {number} is not under way")
        return self._attempt

    # ---- ending

    def _overdue(self, attempt: Attempt) -> None:
        if self._attempt is attempt:
            why = "its time was up, and the controller is silent"
            self._mailbox.spawn(self._fail_at_last(why), "an overdue update")

    async def _fail_at_last(self, why: str) -> None:
        """Like _fail(), but keeps trying while a writer is frozen, which may thaw or be killed, or while a NIC refuses
        to register memory anew.
        """
        attempt, pause_s = self._attempt, _FENCE_AGAIN_S
        while attempt is not None and self._attempt is attempt:
            try:
                await self._fail(why)
            except CrossrailError as error:
                log.warning("inference rank %d is not fenced off, and takes no updates: %s", self.rank, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _FENCE_AGAIN_MAX_S)

    async def _fail(self, why: str, timeout_s: float = FENCE_S) -> None:
        """Fences off all writers: returns when nothing of this attempt can land any more.

        Raises WaitTimeout if one is frozen in the middle of a copy; the attempt then remains the current one. timeout_s
        begins now, even while another _fail() is trying: they take turns.
        """
        attempt, left_s = self._attempt, timeout_s
        if attempt is None:
            return
        log.warning("inference rank %d: version %d failed: %s", self.rank, attempt.version, why)
        if attempt.is_paused and self._hooks.is_within():
            attempt.pausing = None  # for example, pause() itself has called close(), and goes on
        while True:
            asked_at_s = loop_time_s()
            await self._fencing.acquire()
            left_s = max(left_s - (loop_time_s() - asked_at_s), 0.0)
            turn_s = min(left_s, _FENCE_TURN_S)
            # It continues if we are cancelled: nobody else may revoke and renew while our thread does.
            turn = asyncio.ensure_future(self._fence_and_release(attempt, turn_s))
            try:
                if await asyncio.shield(turn):
                    self._note_failure(why)  # here: who hears of it runs after close(), which waits for us, has gone on
                return
            except asyncio.CancelledError:
                turn.add_done_callback(lambda ended: self._note_failure(why) if is_true(ended) else None)
                raise
            except WaitTimeout:
                left_s -= turn_s
                if left_s <= 0:
                    raise

    async def _fence_and_release(self, attempt: Attempt, timeout_s: float) -> bool:
        """One turn of _fail(), holding _fencing. Returns whether it has ended the attempt; another turn may have."""
        try:
            if self._attempt is not attempt:
                return False
            attempt.is_failed = True  # and stays the current one, so that no other begins, until all writers are out
            if self._buffers.versions.is_receiving:
                if attempt.unfenced is None and not attempt.is_unwritten:
                    attempt.unfenced = list(self._buffers.back)
                if attempt.unfenced is not None:  # what was begun ends: a region that was revoked is renewed
                    await in_thread(fence, attempt.unfenced, timeout_s)
                self._buffers.fail(is_unwritten=attempt.is_unwritten)
            self._end_failed(attempt)
            return True
        finally:
            self._fencing.release()

    def _note_failure(self, why: str) -> None:
        self.failures += 1
        self._why = why
        self._changes.notify()

    def _end(self, attempt: Attempt) -> None:
        self._attempt = None
        if attempt.timer is not None:
            attempt.timer.cancel()
        attempt.counter.release(force=True)

    def _end_failed(self, attempt: Attempt) -> None:
        """Resumes the user of the weights, if they are whole. Not awaited: that may take a while."""
        self._end(attempt)
        if attempt.pausing is not None:
            attempt.pausing.cancel()
        if attempt.is_paused and self._buffers.versions.state is State.WHOLE:
            resuming = self._mailbox.spawn(self._resumed_with_what_is_here(), "resuming after a failed update")
            self._hooks.keep(resuming)
