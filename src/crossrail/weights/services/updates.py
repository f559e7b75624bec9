"""The updates of an inference rank: what the controller tells it, from Open to Commit or Abort."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from crossrail.control.deadlines import loop_time_s
from crossrail.control.mailbox import Mailbox
from crossrail.errors import CrossrailError, UsageError, WaitTimeout
from crossrail.weights import gpu
from crossrail.weights.services import messages as m
from crossrail.weights.services.attempt import Attempt
from crossrail.weights.services.buffers import Buffers
from crossrail.weights.services.changes import Changes
from crossrail.weights.services.fencing import fence
from crossrail.weights.services.futures import is_true, retrieve_exception
from crossrail.weights.services.hooks import Hooks
from crossrail.weights.services.kernels import Kernels
from crossrail.weights.services.members import Membership
from crossrail.weights.services.versions import State
from crossrail.weights.threads import in_thread

log = logging.getLogger("crossrail.weights")

_GRACE_S = 5.0  # beyond an update's deadline, for the controller's own word that it failed
_SILENT = "its time was up, and the controller is silent"
FENCE_S = 30.0  # for how long a writer may be frozen in a copy before fence() reports that
_FENCE_TURN_S = 1.0  # part of that after which another caller gets its turn to fence
_FENCE_AGAIN_S, _FENCE_AGAIN_MAX_S = 1.0, 30.0


class Updates:
    """The updates of one inference rank, one attempt at a time. Threads: the event loop's.

    Lifecycle of an attempt: 1. on_open(): the weights are paused and unread, then trainers write. 2. on_await(): all
    has been counted. 3. on_commit(); or fail(), which fences off all writers first, and resumes whole weights.
    controller: the address of the one that may begin attempts; b"": none yet.
    failures: how many attempts this rank knows to have failed; last_why: why the last of them did. commits: how many
    were completed.
    Invariant: an attempt remains the current one until nothing of it can land any more, so that no other begins before.
    """

    def __init__(
        self, mailbox: Mailbox, buffers: Buffers, hooks: Hooks, changes: Changes, membership: Membership
    ) -> None:
        self.controller = b""
        self.attempt: Attempt | None = None
        self.failures = 0
        self.last_why = ""
        self.commits = 0
        self._mailbox = mailbox
        self._rank = buffers.memory.rank
        self._buffers = buffers
        self._hooks = hooks
        self._changes = changes
        self._membership = membership
        self._expected: tuple[str, int] | None = None
        self._attempt_max = 0  # attempts up to this one are over, even if their Open is still in flight
        self._kernels = Kernels(changes)
        self._fencing = asyncio.Lock()

    def close(self) -> None:
        """No attempt is under way, and none begins any more."""
        self._kernels.cancel()

    def belong_to(self, controller: bytes) -> None:
        """Attempts are this controller's from here on, which counts them from 1 if it is another one."""
        if controller != self.controller:
            self.controller, self._attempt_max = controller, 0

    def check_controller(self, sender: bytes) -> None:
        if sender != self.controller:
            raise UsageError(f"inference rank {self._rank} belongs to another controller")

    # ---- what the controller says

    async def on_expect(self, sender: bytes, expect: m.Expect) -> m.Taken:
        self.check_controller(sender)
        if self.attempt is not None:
            raise UsageError(f"inference rank {self._rank} is in the middle of an update")
        self._expected = expect.plan, expect.count
        return m.Taken()

    async def on_open(self, sender: bytes, opened: m.Open) -> m.Opened:
        self.check_controller(sender)
        if opened.attempt <= self._attempt_max:
            raise UsageError(f"attempt {opened.attempt} is over")
        if self.attempt is not None:
            raise UsageError(
                f"inference rank {self._rank} is in the middle of version {self.attempt.version}: one update at a time"
            )
        if self._expected is None or self._expected[0] != opened.plan:
            raise UsageError(f"inference rank {self._rank} does not know plan {opened.plan}")
        loop = asyncio.get_running_loop()
        counter = self._buffers.memory.engine.imm_counter(opened.imm)
        if counter.poll():
            raise UsageError(f"immediate {opened.imm} has counts already: something else uses it on this engine")
        self._attempt_max = opened.attempt
        deadline_at_s = loop_time_s() + opened.timeout_s
        attempt = self.attempt = Attempt(
            opened.attempt, opened.version, sender, counter, self._expected[1], deadline_at_s
        )
        attempt.watching = self._membership.watch(sender, lambda why: self._end_alone(attempt, why))
        try:
            self._buffers.memory.check_in_place()  # before the pause, which a refused update does not end
            open_by_s = deadline_at_s - opened.say_why_s
            if not self._buffers.has_spare:
                await self._pause_by(attempt, open_by_s)
            self._check_current(attempt)
            with self._buffers.versions.opening():
                await self._wait_unread(attempt, open_by_s)
            self._check_current(attempt)
            self._buffers.memory.check_in_place()
        except BaseException:
            if self.attempt is attempt:
                self._end_failed(attempt)
            self._changes.notify()  # readers may come again
            raise
        buffer = self._buffers.open()
        attempt.timer = loop.call_at(deadline_at_s + _GRACE_S, self._end_alone, attempt, _SILENT)
        self._changes.notify()
        return m.Opened(buffer)

    def _check_current(self, attempt: Attempt) -> None:
        if self.attempt is not attempt:
            raise UsageError(f"attempt {attempt.number} is over")

    async def _pause_by(self, attempt: Attempt, deadline_at_s: float) -> None:
        pausing = attempt.pausing = asyncio.ensure_future(self._hooks.call_pause(attempt.version, attempt.note_paused))
        pausing.add_done_callback(retrieve_exception)
        self._hooks.keep(pausing)
        try:
            await asyncio.wait([pausing], timeout=max(deadline_at_s - loop_time_s(), 0.0))
            is_late, hook = not pausing.done(), self._hooks.running or f"pause({attempt.version})"
        finally:
            if self.attempt is attempt:  # otherwise it was cancelled already, and may be cleaning up
                pausing.cancel()  # not waited for: whatever hook comes next does that
        self._check_current(attempt)
        if is_late:
            raise WaitTimeout(f"inference rank {self._rank}: {hook} has not returned")
        pausing.result()

    async def _resumed_with_what_is_here(self) -> None:
        with suppress(CrossrailError):  # it is logged, and nobody waits for it
            await self._hooks.call_resume(self._buffers.versions.version)

    async def _wait_unread(self, attempt: Attempt, deadline_at_s: float) -> None:
        """Waits until neither a reader nor a kernel uses the memory to be written, and keeps new readers out.

        UsageError as soon as the attempt is over.
        """
        while not self._buffers.versions.may_open:
            await self._changes.wait(deadline_at_s, f"inference rank {self._rank}: somebody still reads the weights")
            self._check_current(attempt)  # close() has taken the buffers else
        if devices := gpu.gpus_of(self._buffers.back):
            why = f"inference rank {self._rank}: kernels on {devices[0]} still run"
            await self._kernels.wait_ended(devices, deadline_at_s, why, lambda: self._check_current(attempt))

    async def on_await(self, sender: bytes, question: m.Await) -> m.Whole:
        attempt = self._current(sender, question.attempt)
        if attempt.expected and not attempt.is_whole:
            left_s = attempt.deadline_at_s - loop_time_s()
            await attempt.counter.wait_async(attempt.expected, max(left_s, 0.0))
        if attempt.counter.poll():
            more = f"{attempt.counter.poll()} more writes than the {attempt.expected} expected"
            raise CrossrailError(f"inference rank {self._rank}: {more}")
        attempt.is_whole = True
        return m.Whole()

    async def on_commit(self, sender: bytes, commit: m.Commit) -> m.Taken:
        attempt = self._current(sender, commit.attempt)
        if not attempt.is_whole:
            raise UsageError(f"inference rank {self._rank} has not counted all of version {attempt.version}")
        self._membership.answer_before_close()
        self._end(attempt)
        self._buffers.commit(attempt.version)
        self.commits += 1
        self._changes.notify()
        resuming = asyncio.ensure_future(self._hooks.call_resume(attempt.version))
        self._hooks.keep(resuming)
        await resuming
        return m.Taken()

    async def on_abort(self, sender: bytes, abort: m.Abort) -> m.Aborted:
        self.check_controller(sender)
        is_late = abort.attempt < self._attempt_max  # another has begun since
        self._attempt_max = max(self._attempt_max, abort.attempt)
        attempt = self.attempt
        if attempt is not None and attempt.number <= abort.attempt:
            # An attempt with another number or controller may be writing.
            if (attempt.number, attempt.controller) == (abort.attempt, sender) and not abort.has_begun:
                attempt.is_unwritten = True
            await self.fail(abort.reason)
        elif not is_late:
            self.note_failure(abort.reason)
        async with self._fencing:  # our own deadline may have begun it
            self._buffers.check()
            return m.Aborted(self._buffers.descriptors())

    def _current(self, sender: bytes, number: int) -> Attempt:
        self.check_controller(sender)
        if self.attempt is None or self.attempt.number != number or self.attempt.is_failed:
            raise UsageError(f"inference rank {self._rank}: attempt {number} is not under way")
        return self.attempt

    # ---- ending

    def _end_alone(self, attempt: Attempt, why: str) -> None:
        if self.attempt is attempt:
            self._mailbox.spawn(self.fail_persistently(why), "ending an update whose controller does not")

    async def fail_persistently(self, why: str) -> None:
        """Like fail(), but keeps trying while a writer is frozen, which may thaw or be killed, or while a NIC refuses
        to register memory again.
        """
        attempt, pause_s = self.attempt, _FENCE_AGAIN_S
        while attempt is not None and self.attempt is attempt:
            try:
                await self.fail(why)
            except CrossrailError as error:
                log.warning("inference rank %d is not fenced off, and takes no updates: %s", self._rank, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _FENCE_AGAIN_MAX_S)

    async def fail(self, why: str, timeout_s: float = FENCE_S) -> None:
        """Fences off all writers: returns when nothing of this attempt can land any more.

        Raises WaitTimeout if one is frozen in the middle of a copy; the attempt then remains the current one. timeout_s
        begins now, even while another fail() is trying: they take turns.
        """
        attempt, left_s = self.attempt, timeout_s
        if attempt is None:
            return
        log.warning("inference rank %d: version %d failed: %s", self._rank, attempt.version, why)
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
                    self.note_failure(why)  # here: who hears of it runs after close(), which waits for us, has gone on
                return
            except asyncio.CancelledError:
                turn.add_done_callback(lambda ended: self.note_failure(why) if is_true(ended) else None)
                raise
            except WaitTimeout:
                left_s -= turn_s
                if left_s <= 0:
                    raise

    async def _fence_and_release(self, attempt: Attempt, timeout_s: float) -> bool:
        """One turn of fail(), holding _fencing. Returns whether it has ended the attempt; another turn may have."""
        try:
            if self.attempt is not attempt:
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

    def note_failure(self, why: str) -> None:
        self.failures += 1
        self.last_why = why
        self._changes.notify()

    def _end(self, attempt: Attempt) -> None:
        self.attempt = None
        attempt.end()

    def _end_failed(self, attempt: Attempt) -> None:
        """Resumes the user of the weights, if they are whole. Not awaited: that may take a while."""
        self._end(attempt)
        if attempt.pausing is not None:
            attempt.pausing.cancel()
        if attempt.is_paused and self._buffers.versions.state is State.WHOLE:
            resuming = self._mailbox.spawn(self._resumed_with_what_is_here(), "resuming after a failed update")
            self._hooks.keep(resuming)
