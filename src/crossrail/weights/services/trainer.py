"""A trainer: it keeps its weights unchanged while its part of an update is gathered, prepared and written."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import crossrail as xr
from crossrail._closing import AsyncClosing
from crossrail._options import check_seconds, check_whole
from crossrail.control.deadlines import in_time, in_words, loop_time_s, set_in_time
from crossrail.control.mailbox import Mailbox, NoAnswer
from crossrail.control.messages import clipped
from crossrail.control.wire import Unreachable
from crossrail.errors import CrossrailError, UsageError
from crossrail.weights import gpu
from crossrail.weights.errors import UpdateFailed, WatermarkTooSmall
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.services import messages as m
from crossrail.weights.services.assigned import Assigned, Pieces
from crossrail.weights.services.members import CONTROLLER_GONE, Membership, check_one_engine, packed_inventory
from crossrail.weights.services.versions import checked_version
from crossrail.weights.step.arena import Arena, aligned
from crossrail.weights.step.barrier import EngineBarrier, MakeBarrier
from crossrail.weights.step.preparer import Preparer, far_for, preparer_for
from crossrail.weights.step.step import Places, Step, StepReport
from crossrail.weights.threads import in_thread

log = logging.getLogger("crossrail.weights")

ABORT_S = 1.0  # within which a live controller has reported why an update failed
QUIET_S = 5.0  # for transfers that were cancelled: what peers have begun ends first
_KERNELS_S = 0.0005  # between looks at what the caller's stream still has to do
_CONTROLLER_GONE = f"{CONTROLLER_GONE}. Next: join() one that is there"


class WeightTrainer(AsyncClosing):
    """One trainer rank. Threads: the event loop's; two of its own convert, and copy from the host to a GPU.

    mailbox: from messages.mailbox(), started by whoever made it; one per trainer or inference rank.
    memory: of role "trainer"; join() registers it. tmp_bytes_max: the watermark, the most memory that tasks use
        together. All of it is allocated when a plan first needs any, and nothing after that except what torch takes to
        convert, or numpy: 10 MiB.
    preparer: makes what is written; None: torch on the GPU that holds most of the memory, numpy if none is on a GPU.
    Lifecycle: 1. made. 2. join(). 3. publish() for each update. 4. leave(), if others are to continue without it.
    5. close(). Owner of mailbox, engine and memory: whoever made them; they stay open until after close().
    """

    def __init__(
        self,
        mailbox: Mailbox,
        memory: WeightMemory,
        tmp_bytes_max: int = 1 << 30,
        make_barrier: MakeBarrier = EngineBarrier,
        preparer: Preparer | None = None,
    ) -> None:
        if memory.role != "trainer":
            raise UsageError(f"memory of a {memory.role} given to a trainer")
        check_one_engine(mailbox, memory)
        check_whole(tmp_bytes_max=tmp_bytes_max)
        if tmp_bytes_max < 0:
            raise UsageError(f"tmp_bytes_max is {tmp_bytes_max}, must be 0 or more")
        self.rank = memory.rank
        self.memory = memory
        self.last_report: StepReport | None = None
        self._mailbox = mailbox
        self._engine = memory.engine
        self._make_barrier = make_barrier
        self._tmp_bytes_max = tmp_bytes_max // aligned(1) * aligned(1)
        self._arena: xr.Region | None = None
        self._executor = ThreadPoolExecutor(1, f"crossrail-weights-{self.rank}")
        self._loader = ThreadPoolExecutor(1, f"crossrail-weights-load-{self.rank}")  # a thread once there is a load
        self._preparer = preparer
        self._controller = b""
        self._pieces = Pieces()
        self._assigned: Assigned | None = None
        self._offer: _Offer | None = None
        self._withdrawn: int | None = None  # as in m.Progress
        self._refused: m.Refused | None = None  # what RollCall is answered with
        self._loop: asyncio.AbstractEventLoop | None = None  # of join()
        self._offered = asyncio.Event()
        self._step: Step | None = None
        self._going: asyncio.Task[StepReport] | None = None
        self._watching: asyncio.Task[None] | None = None  # the controller that has asked for it
        self._stopped_why = ""  # of that: who else has ended it
        self._attempt_max = 0  # attempts up to this one are over, even if their Go is still in flight
        self._step_attempt = 0  # the last that a step was for
        self._lingering: list[xr.Transfer] = []
        self._membership = Membership(
            f"trainer {self.rank}", mailbox, self.join, self._closed_why, self._broken_why, self._on_out
        )
        self._barrier_imm: int | None = None  # of the last attempt
        self._is_closed = False
        self._membership.handle(
            {
                m.Commit: self._on_commit,
                m.Abort: self._on_abort,
                m.Evicted: self._on_evicted,
                m.AskProgress: self._on_progress,
                m.Withdraw: self._on_withdraw,
            },
            while_whole={m.Assign: self._on_assign, m.Go: self._on_go, m.RollCall: self._on_roll_call},
        )

    def __repr__(self) -> str:
        return f"<WeightTrainer {self.rank}{', closed' if self._is_closed else ''}>"

    async def join(self, controller: bytes, timeout_s: float = 30.0) -> None:
        """Offers this rank to the controller at this address, or to another one. Registers the memory.

        Raises MemberRefused, NoAnswer, Unreachable; UsageError after close(), before the mailbox was started, and for
        what is no address: then nothing has changed.
        """
        check_seconds(timeout_s=timeout_s)
        self._check_may_join()
        self._mailbox.check_started()
        self._mailbox.wire.identity(controller)
        self._loop = asyncio.get_running_loop()
        self._membership.begin(controller)
        async with self._membership.asking():
            await self._join_with(controller, timeout_s)

    async def _join_with(self, controller: bytes, timeout_s: float) -> None:
        await self._stop_step("it joins again")
        if controller != self._controller:
            self._controller, self._attempt_max, self._step_attempt, self._pieces = controller, 0, 0, Pieces()
            self._withdrawn = self._refused = None
            if self._offer is not None:
                self._offer.attempt = self._offer.after = 0
        inventory = await in_thread(packed_inventory, self.memory)
        self._check_may_join()
        is_again = self._membership.is_again
        await self._membership.ask_to_join(controller, inventory, timeout_s, is_again=is_again)

    def publish(self, version: int, timeout_s: float = 60.0) -> Coroutine[Any, Any, StepReport]:
        """Offers the current weights, and returns when this version is complete at all inference ranks, and each has
        switched to it, and resumed, or was left out (UpdateReport.left_out).

        It may be called before join(), and then waits for that too, within timeout_s.
        The weights must not change until it returns or raises. The update runs once all trainers offer the version that
        the controller was asked for. Raises UpdateFailed: no inference rank is known to have switched to it, unless
        this trainer alone was cut off or out of time, or the controller died as it told them to. That the controller
        is gone is raised once it has begun to update; before that this waits, for another one may be joined. Offer it
        again, or a later one; if `asked_for` of the error is a number, offer that version, or this trainer fails again.
        Cancelled, it withdraws the offer: an update that has begun with it fails at once, one that has not waits for
        another offer, until its time is up.
        Weights on GPUs: nothing is sent before everything has ended that torch had queued on the calling thread's
        current stream of each GPU. For other kernels, wait before the call. The call itself may be made on any thread;
        the coroutine runs on the event loop's. The call raises UsageError for a tensor that was moved after it was
        added, and where memory was closed. That fails an update to this version that has begun, and one that begins
        before this trainer has offered it; other trainers' offers that no update has asked for yet fail, too.
        """
        check_seconds(timeout_s=timeout_s)
        version = checked_version(version)
        try:
            if why := self._broken_why():
                raise UsageError(why)
            self.memory.check_in_place()
            kernels = gpu.launched(self.memory.gpus())
        except CrossrailError as error:
            self._tell_refused(m.Refused(version, clipped(f"its publish({version}) was refused: {error}")))
            raise
        return self._publish(version, timeout_s, kernels)

    async def _publish(self, version: int, timeout_s: float, kernels: Sequence[Any]) -> StepReport:
        if why := self._closed_why() or self._membership.out_why:
            raise UsageError(why)
        if self._offer is not None:
            raise UsageError(f"trainer {self.rank} offers version {self._offer.version} already: one update at a time")
        waits = self._going is not None and not self._going.done()  # for this offer
        after = self._step_attempt - 1 if waits else self._attempt_max
        self._offer = _Offer(version, asyncio.get_running_loop().create_future(), kernels, after)
        self._withdrawn = self._refused = None
        self._offered.set()
        ended = "its publish() has ended"
        try:
            return await in_time(self._offer.done, timeout_s)
        except asyncio.CancelledError:
            self._withdrawn, ended = version, "its publish() was cancelled"
            raise
        except asyncio.TimeoutError:
            self._withdrawn, ended = version, f"its publish() was out of time, which was {timeout_s:g} s"
            why = f"trainer {self.rank}: not complete within {timeout_s:g} s: {self._why_late()}"
            raise UpdateFailed(version, why) from None
        finally:
            self._offer = None
            self._offered.clear()
            await self._stop_step(ended)

    def _why_late(self) -> str:
        assert self._offer is not None
        if not self._controller:
            return "it has joined no controller. Next: join()"
        if self._mailbox.wire.is_lost(self._controller):
            return _CONTROLLER_GONE
        if self._membership.out_why:
            return self._membership.out_why
        if not self._offer.attempt:
            return "the controller has not asked this trainer for it"
        return "the controller has asked for it, and has not said that all inference ranks have it"

    async def leave(self, timeout_s: float = 5.0) -> None:
        """Leaves: the next update is without this rank. One in progress fails, and a pending publish() raises
        UpdateFailed. Not needed if the process has ended.

        UsageError before join().
        """
        check_seconds(timeout_s=timeout_s)
        await self._membership.leave(self._controller, timeout_s)
        # Nothing else would report it: the controller forgets members that leave.
        self._fail(f"trainer {self.rank} has left")
        await self._stop_step("it has left")

    async def close(self) -> None:
        """Ends a step in progress and frees its memory; a pending publish() raises UpdateFailed. Idempotent. After a
        publish() that succeeded it lets the controller know first.
        """
        self._is_closed = True
        self._membership.close()
        self._fail(f"trainer {self.rank} is closing")
        self._stop_watching()
        self._drop_assigned()
        await self._stop_step("it is closing")
        await self._membership.answered()
        await self._quiet(QUIET_S)
        self._executor.shutdown()
        self._loader.shutdown()
        if self._preparer is not None:
            self._preparer.close()
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()

    # ---- what the controller says

    def _closed_why(self) -> str:
        return f"trainer {self.rank} is closed" if self._is_closed else ""

    def _check_may_join(self) -> None:
        if self._is_closed:
            raise UsageError(f"{self._closed_why()}. Next: make another WeightTrainer, and join() that")

    def _broken_why(self) -> str:
        if not self.memory.closed:
            return ""
        return f"trainer {self.rank}: memory of its weights was closed, it takes part in no more updates"

    def _check_controller(self, sender: bytes) -> None:
        if sender != self._controller:
            raise UsageError(f"trainer {self.rank} belongs to another controller")

    async def _on_assign(self, sender: bytes, assign: m.Assign) -> m.Taken:
        self._check_controller(sender)
        if assign.attempt <= self._attempt_max:
            raise UsageError(f"attempt {assign.attempt} is over")
        if self._going is not None:
            raise UsageError(f"trainer {self.rank} is in the middle of an update")
        data = self._pieces.add(assign)
        if data is None:
            return m.Taken()
        self._drop_assigned()
        assigned = self._assigned = Assigned(assign.plan, assign.attempt, data, self.rank)
        # In the thread of conversions: there are none now, and one that was dropped ends there first. So does a load.
        await self._run_for(assigned, assigned.open)
        await asyncio.get_running_loop().run_in_executor(self._loader, _nothing)
        for address in assigned.gone:  # transfers to them end now
            self._engine.forget_peer(address)
        far = far_for(self._preparer, self.memory.regions)
        await self._run_for(assigned, lambda: assigned.make(far))
        self._revive(assigned)
        if (largest := assigned.largest) is not None:
            if largest.piece_bytes > self._tmp_bytes_max:
                raise WatermarkTooSmall(largest.name, largest.piece_bytes, self._tmp_bytes_max)
            await self._run_for(assigned, self._make_arena)
        return m.Taken()

    async def _run_for(self, assigned: Assigned, work: Callable[[], None]) -> None:
        """In the executor's thread. UsageError when meanwhile this assignment is not wanted any more."""
        await asyncio.get_running_loop().run_in_executor(self._executor, work)
        if self._assigned is not assigned:
            raise UsageError(f"plan {assigned.plan} is not wanted any more")

    def _revive(self, assigned: Assigned) -> None:
        """Members of a plan are alive: one that our engine gave up was frozen or cut off, and would otherwise stay lost
        to us.
        """
        descriptors = (*assigned.peers.values(), *assigned.targets.values())
        for address in dict.fromkeys([*assigned.trainers.values(), *(each.owner for each in descriptors)]):
            if self._engine.peer_state(address) == "lost":
                self._engine.forget_peer(address)

    def _make_arena(self) -> None:
        """On the executor's thread: a GPU's memory is waited for, and takes long to register."""
        if self._arena is None:
            self._preparer = self._preparer or preparer_for(self.memory.regions)
            try:
                self._arena = self._preparer.alloc(self._engine, self._tmp_bytes_max)
            except CrossrailError as error:
                raise CrossrailError(f"tmp_bytes_max={self._tmp_bytes_max}: {error}") from error

    def _drop_assigned(self) -> None:
        assigned, self._assigned = self._assigned, None
        if assigned is not None:
            assigned.drop()

    async def _on_go(self, sender: bytes, go: m.Go) -> m.Sent:
        self._check_controller(sender)
        if go.attempt <= self._attempt_max:
            raise UsageError(f"attempt {go.attempt} is over")
        if self._going is not None:
            raise UsageError(f"trainer {self.rank} is in the middle of another update")
        if self._assigned is None or not self._assigned.is_ready or self._assigned.plan != go.plan:
            raise UsageError(f"trainer {self.rank} does not know plan {go.plan}")
        self._attempt_max = self._step_attempt = go.attempt
        self._step, self._stopped_why = None, ""
        if self._barrier_imm is not None:  # others may have come to that barrier when we did not
            self._engine.imm_counter(self._barrier_imm).release(force=True)
        self._barrier_imm = go.barrier_imm
        going = self._going = asyncio.ensure_future(self._go(self._assigned, go))
        self._stop_watching()
        self._watching = self._membership.watch(sender, lambda why: self._controller_gone(sender, go.attempt, why))
        try:
            self.last_report = await asyncio.shield(going)
        except asyncio.CancelledError:
            if not going.cancelled():  # we are, not the step
                raise
            raise CrossrailError(f"its step was stopped: {self._stopped_why}") from None
        except CrossrailError as error:
            self._fail_soon(go.attempt, f"trainer {self.rank}: {error}")
            raise
        finally:
            if going.done():
                self._going = None
        return m.Sent(asdict(self.last_report))

    async def _go(self, assigned: Assigned, go: m.Go) -> StepReport:
        deadline_at_s = loop_time_s() + go.timeout_s
        if self._refused is not None and self._refused.version == go.version:
            raise CrossrailError(self._refused.reason)
        if not await set_in_time(self._offered, go.timeout_s):
            raise CrossrailError(f"version {go.version} was not offered in {in_words(go.timeout_s)}")
        offer = self._offer
        if offer is None:
            raise CrossrailError(self._refused.reason if self._refused is not None else "its publish() was refused")
        offer.attempt = go.attempt
        if offer.version != go.version:
            offer.asked_for = go.version
            raise UsageError(f"trainer {self.rank} offers version {offer.version}, asked for is {go.version}")
        while not gpu.have_ended(offer.kernels):
            if loop_time_s() > deadline_at_s:
                raise CrossrailError(f"its GPU has not made version {go.version} in {in_words(go.timeout_s)}")
            await asyncio.sleep(_KERNELS_S)
        await self._quiet(deadline_at_s - loop_time_s())
        buffers = dict(go.buffers)
        targets = {
            (rank, region): descriptor
            for (rank, buffer, region), descriptor in assigned.targets.items()
            if buffers.get(rank) == buffer
        }
        arena = Arena(self._tmp_bytes_max if self._arena is not None else 0)
        places = Places(self._arena, self.memory.regions, assigned.peers, targets, go.imm)
        others = [address for rank, address in assigned.trainers.items() if rank != self.rank]
        barrier = self._make_barrier(self._engine, others, go.barrier_imm)
        try:
            step = self._step = Step(
                self._engine, assigned.tasks, assigned.groups, arena, places, barrier, self._executor, self._preparer,
                meets_first=assigned.meets_first, loader=self._loader,
            )  # fmt: skip
            return await in_time(step.run(deadline_at_s - loop_time_s()), deadline_at_s - loop_time_s())
        except asyncio.TimeoutError:
            waits_for = f": {step.waits_for} under way" if step.waits_for else ""
            raise CrossrailError(f"not done in {in_words(go.timeout_s)}{waits_for}") from None
        finally:
            barrier.close()
            self._lingering = self._step.pending if self._step is not None else []

    async def _on_commit(self, sender: bytes, commit: m.Commit) -> m.Taken:
        self._check_controller(sender)
        offer, report = self._offer, self.last_report
        # An offer made since then has not been sent, though it may have the same version.
        if offer is not None and offer.attempt == commit.attempt and report is not None:
            self._membership.answer_before_close()
            offer.succeed(report)
        return m.Taken()

    async def _on_abort(self, sender: bytes, abort: m.Abort) -> m.Aborted:
        self._check_controller(sender)
        # It may be late: do not touch an attempt that has begun since, nor an offer made since.
        self._attempt_max = max(self._attempt_max, abort.attempt)
        self._pieces.clear(abort.attempt)
        if self._assigned is not None and not self._assigned.is_ready and self._assigned.attempt <= abort.attempt:
            self._drop_assigned()
        offer, withdrawn, refused = self._offer, self._withdrawn, self._refused
        if self._step_attempt <= abort.attempt:
            await self._stop_step(abort.reason)
        if offer is not None and offer.after < abort.attempt and offer.attempt <= abort.attempt:
            offer.fail(abort.reason)
        if self._withdrawn == withdrawn:
            self._withdrawn = None
        if self._refused is refused:
            self._refused = None
        return m.Aborted()

    async def _on_withdraw(self, sender: bytes, withdraw: m.Withdraw) -> m.Taken:
        self._check_controller(sender)
        if self._offer is not None and not self._offer.attempt and self._offer.version == withdraw.version:
            self._offer.fail(withdraw.reason)
        return m.Taken()

    async def _on_roll_call(self, sender: bytes, question: m.RollCall) -> m.Taken | m.Closed | m.Refused:
        answer = await self._membership.on_roll_call(sender, question)
        return self._refused if isinstance(answer, m.Taken) and self._refused is not None else answer

    async def _on_evicted(self, sender: bytes, evicted: m.Evicted) -> m.Taken:
        self._check_controller(sender)
        if evicted.displaced is not None:
            if self._membership.displaced(evicted.reason, evicted.displaced):
                self._fail(f"trainer {self.rank}: {evicted.reason}")
                await self._stop_step(evicted.reason)
        else:
            self._membership.left_out(evicted, sender)
        return m.Taken()

    async def _on_progress(self, sender: bytes, _: m.AskProgress) -> m.Progress:
        report = StepReport() if self._step is None else self._step.report
        ready = 0 if self._assigned is None else len(self._assigned.tasks)
        waits_for = "" if self._step is None else clipped(self._step.waits_for)
        return m.Progress(ready, report.written_bytes, self._offer is not None, self._withdrawn, waits_for)

    # ---- a publish() that was refused at the call

    def _tell_refused(self, refused: m.Refused) -> None:
        """Any thread. Before join() there is nobody to tell."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._note_refused, refused)

    def _note_refused(self, refused: m.Refused) -> None:
        if self._offer is not None or self._closed_why() or not self._controller:  # that offer goes on
            return
        self._refused = refused
        self._offered.set()  # a step that waits for it goes on, and fails with the reason
        self._offered.clear()
        self._mailbox.spawn(self._say_refusing(self._controller), "telling that publish() was refused")

    async def _say_refusing(self, controller: bytes) -> None:
        try:
            await self._mailbox.ask(controller, m.Refusing(), m.Taken, ABORT_S)
        except (NoAnswer, Unreachable) as error:
            log.info("trainer %d: the controller does not know that publish() was refused: %s", self.rank, error)

    # ---- ending

    def _controller_gone(self, controller: bytes, attempt: int, why: str) -> None:
        """In the middle of its attempt: nobody will say how that ended."""
        if (controller, attempt) != (self._controller, self._step_attempt):
            return
        if self._offer is not None and self._offer.attempt == attempt:
            self._offer.fail(f"trainer {self.rank}: {_CONTROLLER_GONE}")
        self._cancel_step(why)

    def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def _on_out(self) -> None:
        self._fail(self._membership.out_why)

    def _fail(self, why: str) -> None:
        if self._offer is not None:
            self._offer.fail(why)

    def _fail_soon(self, attempt: int, why: str) -> None:
        """The controller's abort comes before, and names what ended the update; this says only what it did here."""
        offer = self._offer
        if offer is not None and offer.attempt == attempt:
            asyncio.get_running_loop().call_later(ABORT_S, offer.fail, why)

    async def _stop_step(self, why: str) -> None:
        if (going := self._cancel_step(why)) is not None:
            await asyncio.wait([going])

    def _cancel_step(self, why: str) -> asyncio.Task[StepReport] | None:
        """Returns the step that ends then, if one is going."""
        going = self._going
        if going is None or going.done():
            return None
        self._stopped_why = self._stopped_why or why
        going.cancel()
        return going

    async def _quiet(self, timeout_s: float) -> None:
        """Waits for transfers of a failed attempt, which use the arena and sources. UpdateFailed if they do not end."""
        deadline_at_s = loop_time_s() + timeout_s
        while self._lingering:
            transfer = self._lingering[-1]
            if not transfer.done:
                waiting = asyncio.ensure_future(_until_done(transfer))
                await asyncio.wait([waiting], timeout=max(deadline_at_s - loop_time_s(), 0.0))
                waiting.cancel()
            if not transfer.done:
                raise CrossrailError(f"a {transfer.kind} to or from {transfer.peer} of a failed update goes on")
            self._lingering.pop()


class _Offer:
    """What publish() waits for. attempt: the one that sends it, 0: none yet. after: attempts up to this one were over
    when the offer was made. asked_for: the version that the controller wants, if it is another one.
    """

    def __init__(self, version: int, done: asyncio.Future[StepReport], kernels: Sequence[Any], after: int) -> None:
        self.version = version
        self.attempt = 0
        self.after = after
        self.asked_for: int | None = None
        self.done = done
        self.kernels = kernels

    def succeed(self, report: StepReport) -> None:
        if not self.done.done():
            self.done.set_result(report)

    def fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(UpdateFailed(self.version, why, self.asked_for))


async def _until_done(transfer: xr.Transfer) -> None:
    try:
        await transfer
    except CrossrailError:
        return


def _nothing() -> None:
    """Done once a thread has done what it was given before."""
