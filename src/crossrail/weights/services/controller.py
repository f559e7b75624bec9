"""Plans updates and starts them. No weight passes through it.

An update: 1. RollCall to all: those that are gone are left out. 2. plan, if a member joined or left. 3. Open: inference
ranks make a buffer ready. 4. Go: trainers write. 5. Await: inference ranks have counted all. 6. Commit to inference
ranks. 7. Commit to trainers. If anything goes wrong from 2 to 5: Abort to all; if no inference rank answers in 6: Abort
to trainers. A member that does not answer Commit or Abort is left out of the next plan, and ends the attempt by its own
deadline. An attempt that is aborted before 4 leaves no trace in any inference rank's memory.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

from crossrail._options import check_seconds
from crossrail.control.deadlines import loop_time_s
from crossrail.control.mailbox import Mailbox, NoAnswer
from crossrail.control.messages import clipped
from crossrail.control.wire import Unreachable
from crossrail.errors import CrossrailError, UsageError
from crossrail.weights.errors import UpdateFailed
from crossrail.weights.inventory.holdings import Role, check_member
from crossrail.weights.planning.plan import Plan
from crossrail.weights.planning.planner import PlanOptions
from crossrail.weights.planning.replanner import Replanner
from crossrail.weights.planning.speeds import Pace
from crossrail.weights.services import messages as m
from crossrail.weights.services.late import Late
from crossrail.weights.services.members import Member, assigns_of
from crossrail.weights.services.refusals import Refusals
from crossrail.weights.services.reports import ATTEMPTS, ControllerOptions, UpdateReport, UpdateTotals
from crossrail.weights.services.roster import Roster
from crossrail.weights.services.versions import checked_version
from crossrail.weights.step.step import StepReport
from crossrail.weights.threads import in_thread

log = logging.getLogger("crossrail.weights")

_ROLL_CALL_S = 1.0  # and at most this part of the update's time: who is slow or frozen is waited for by the update
_ROLL_CALL_PART = 0.25
_LAG_S = 5.0  # that a question outlives the update which asks it: the update's deadline ends both, and says who is late
_NAMED = 8  # of those who have not answered
_T = TypeVar("_T")

# By mailbox, for all of its controllers: members know a controller by its address, and accept no number twice.
_attempts: weakref.WeakKeyDictionary[Mailbox, int] = weakref.WeakKeyDictionary()

Stage = Literal["plan", "ready", "open", "write"]
OnProgress = Callable[[Stage, int, int], None]


class WeightController:
    """One per set of trainers and inference ranks. Threads: the event loop's; planning runs in another.

    Lifecycle: 1. made. 2. members join; ready() waits for them. 3. update() for each version.
    version: the last that was completed everywhere; -1: none. plan: the current one. totals: over all updates so far.
    Owner of the mailbox: whoever made and started it; it stays open.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        plan_options: PlanOptions | None = None,
        options: ControllerOptions | None = None,
    ) -> None:
        self.version = -1
        self.totals = UpdateTotals()
        self.plan: Plan | None = None
        self._mailbox = mailbox
        self._options = options or ControllerOptions()
        plan_options = plan_options or PlanOptions()
        self._replanner = Replanner(plan_options)
        self._pace = Pace(plan_options.speeds, self._options.straggler_ratio)
        self._speeds: dict[int, float] = {}  # that the current plan was made with
        self._roster = Roster(mailbox, self._options.evict_s, lambda: self.version, self._on_out)
        self._planned: list[Member] = []  # those whom the current plan is for
        self._attempt = _attempts.setdefault(mailbox, 0)
        self._has_begun = False  # in this attempt a trainer may have been told to write
        self._under_way: int | None = None  # the version
        self._lost: asyncio.Future[None] | None = None  # of the update under way: somebody of it went
        self._late = Late(mailbox)
        self._refusals = Refusals(mailbox, self._roster, self._on_refused)

    def __repr__(self) -> str:
        joined = f"{len(self.ranks('trainer'))} trainers, {len(self.ranks('target'))} inference ranks"
        return f"<WeightController of {joined}, version {self.version}>"

    @property
    def address(self) -> bytes:
        """The address that members join."""
        return self._mailbox.address

    def ranks(self, role: Role) -> list[int]:
        """Ranks of the members, ascending."""
        return [member.rank for member in self._roster.of(role)]

    async def ready(self, trainers: Iterable[int], targets: Iterable[int], timeout_s: float) -> None:
        """Returns when these ranks have joined. Raises WaitTimeout, which names those that have not; UsageError before
        the mailbox was started.
        """
        check_seconds(timeout_s=timeout_s)
        self._mailbox.check_started()
        wanted: list[tuple[Role, int]] = _members("trainers", "trainer", trainers)
        wanted += _members("targets", "target", targets)
        await self._roster.ready(wanted, timeout_s)

    async def update(
        self, version: int, timeout_s: float = 60.0, on_progress: OnProgress | None = None
    ) -> UpdateReport:
        """Sends this version from all trainers, which must offer it, to all inference ranks.

        on_progress: called from time to time with the stage, how much of it is done, and how much there is: "plan" (0
            of 1), "ready" (tasks that trainers have prepared; these two only if a member joined or left), "open"
            (inference ranks), "write" (bytes).
        A member that was lost before the update is left out, if possible; so is one that does not answer that the
        version is complete, if any inference rank answers. The report's left_out names them.
        Raises UpdateFailed once the update is aborted everywhere, also if nobody else holds what a lost trainer held.
        Inference ranks with spare memory then keep the version that they had; so do those without, if no trainer had
        been told to write; otherwise they report torn weights. Another update() may succeed. UsageError if the members'
        holdings do not fit together for another reason, or while another update is in progress; and whatever
        on_progress raises.
        If it is cancelled, it first aborts everywhere, which may take options.abort_s; or commits, if everything has
        arrived, which may take twice as long. Cancelled again meanwhile it returns at once, and this goes on: until
        then it is in progress. Members that join meanwhile take part in the next update.
        """
        version = checked_version(version)
        check_seconds(timeout_s=timeout_s)
        self._mailbox.check_started()
        timeout_s = min(timeout_s, m.SECONDS_MAX)
        if self._under_way is not None:
            raise UsageError(
                f"the update to version {self._under_way} is under way: one at a time, and one that was cancelled or "
                "has failed is under way until it is aborted everywhere"
            )
        self._under_way = version
        # In a task of its own, which is cancelled once: a second cancellation does not wait for its end.
        task = asyncio.ensure_future(self._update(version, timeout_s, on_progress or _unseen))
        task.add_done_callback(self._over)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            raise

    def _over(self, task: asyncio.Task[UpdateReport]) -> None:
        self._under_way = None
        lost, self._lost = self._lost, None
        for ended in (task, lost):
            if ended is not None and not ended.cancel() and not ended.cancelled():
                ended.exception()  # seen, also where nobody waits for it any more

    # ---- members

    def _on_out(self, member: Member, why: str) -> None:
        if member.role == "trainer":
            self._pace.forget(member.rank)
        if member in self._planned and self._lost is not None and not self._lost.done():
            self._lost.set_exception(CrossrailError(f"{member}: {why}"))

    def _on_refused(self, member: Member, version: int, why: str) -> bool:
        """A trainer's publish() was refused. Returns whether an update waits for it."""
        if self._under_way != version or self._lost is None or (self._planned and member not in self._planned):
            return False
        if not self._lost.done():
            self._lost.set_exception(CrossrailError(why))
        return True

    def _leave_out(self, member: Member, why: str, report: UpdateReport) -> None:
        """Like Roster.drop(), for an update that has just begun."""
        if self._roster.drop(member, why):
            log.warning("the update to version %d goes on without %s: %s", report.version, member, why)
            report.left_out.append(str(member))

    def _planned_by_role(self) -> tuple[list[Member], list[Member]]:
        """Trainers and inference ranks of the plan; others may have joined since."""
        trainers = [member for member in self._planned if member.role == "trainer"]
        return trainers, [member for member in self._planned if member.role == "target"]

    # ---- an update

    async def _update(self, version: int, timeout_s: float, on_progress: OnProgress) -> UpdateReport:
        """Like update(). Cancelled at most once."""
        report = UpdateReport(version)
        for member in self._roster.lost():  # before they count as lost in the middle of it
            self._leave_out(member, "it died, closed, or was silent for too long", report)
        self._attempt = _attempts[self._mailbox] = _attempts[self._mailbox] + 1
        self._has_begun = False
        self._lost = asyncio.get_running_loop().create_future()
        begun = loop_time_s()
        try:
            work = self._run(version, report, begun + timeout_s, on_progress)
            try:
                is_done = await self._in_time(work, begun + timeout_s)
            except CrossrailError as error:
                if others := await self._late.who_else(version):
                    raise CrossrailError(f"{error}{others}") from None
                raise
            if not is_done:
                late = await self._late.who(version, self._planned_by_role()[1])
                raise asyncio.TimeoutError(f"not complete within {timeout_s:g} s{late}")
        except asyncio.CancelledError:
            self.totals.cancelled += 1
            await _to_its_end(self._abort("the update was cancelled"))
            raise
        except Exception as error:
            self.totals.failed += 1
            is_ours = isinstance(error, CrossrailError | asyncio.TimeoutError)
            why = str(error) if is_ours else f"{type(error).__name__}: {error}"
            await _to_its_end(self._abort(why))
            if isinstance(error, UsageError) or not is_ours:
                raise
            raise UpdateFailed(version, why) from error
        await _to_its_end(self._commit(version, report, begun))
        return report

    async def _in_time(self, work: Awaitable[None], deadline_at_s: float) -> bool:
        """Whether the work was done in time. Ends early when a participant is lost."""
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)
        overdue = loop.create_future()
        # At that very instant: members have deadlines of their own, a moment later, which do not say who is late.
        timer = loop.call_at(deadline_at_s, overdue.set_result, None)
        assert self._lost is not None
        ends: list[asyncio.Future[Any]] = [task, self._lost, overdue]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            self._late.over_s = loop_time_s() - deadline_at_s
        finally:
            timer.cancel()
            if not task.done():
                task.cancel()
                await _ended(task)
        if not task.cancelled():
            task.result()
            return True
        if self._lost.done():
            self._lost.result()
        return False

    async def _roll_call(self, left_s: float, report: UpdateReport) -> None:
        """Leaves out members that are gone, if possible: our engine may not have noticed yet. CrossrailError for a
        trainer that cannot offer the version, and says so.
        """

        async def call(member: Member) -> None:
            try:
                answer = await self._ask(member, m.RollCall(), (m.Taken, m.Refused), timeout_s)
                if isinstance(answer, m.Refused) and answer.version == report.version:
                    raise CrossrailError(f"{member}: {answer.reason}")
            except Unreachable as error:
                self._leave_out(member, f"it is gone: {error}", report)
            except NoAnswer as error:
                log.info("%s may be late: %s", member, error)

        timeout_s = min(_ROLL_CALL_S, _ROLL_CALL_PART * left_s)
        planned, self._planned = self._planned, []  # nobody's going ends the update yet
        try:
            await _together(call(member) for member in self._roster.all())
        finally:
            self._planned = planned

    async def _run(self, version: int, report: UpdateReport, deadline_at_s: float, on_progress: OnProgress) -> None:
        self._late.clear()
        await self._roll_call(deadline_at_s - loop_time_s(), report)
        begun = loop_time_s()
        members = self._roster.all()
        taking_part = {str(member) for member in members}  # including those that have joined again already
        report.left_out = [name for name in report.left_out if name not in taking_part]
        speeds = self._pace.of(member.rank for member in members if member.role == "trainer")
        if self.plan is None or members != self._planned or speeds != self._speeds:
            self._planned, self._speeds = members, speeds
            on_progress("plan", 0, 1)
            self._late.own = "the plan was still being made"
            self.plan = await in_thread(self._make_plan)
            self._roster.went.clear()
            await self._distribute(self.plan, deadline_at_s, on_progress)
            report.plan_s = loop_time_s() - begun
        report.speeds = speeds
        plan, trainers, targets = self.plan, *self._planned_by_role()
        digest, attempt = plan.digest, self._attempt
        imm = self._imm_of(attempt)

        begun = loop_time_s()
        left_s = deadline_at_s - begun
        on_progress("open", 0, len(targets))
        opening = m.Open(version, attempt, digest, imm, left_s)
        opened = await self._stage(targets, lambda _: opening, m.Opened, left_s)
        report.open_s = loop_time_s() - begun

        begun = loop_time_s()
        left_s = deadline_at_s - begun
        buffers = [(member.rank, answer.buffer) for member, answer in zip(targets, opened, strict=True)]
        go = m.Go(version, attempt, digest, imm, imm + 1, buffers, left_s)
        whole = int(plan.writes["nbytes"].sum())
        async with self._watching(trainers, lambda far: on_progress("write", sum(p.written_bytes for p in far), whole)):
            self._has_begun = True
            sent = await self._stage(trainers, lambda _: go, m.Sent, left_s)
        report.steps = {
            member.rank: StepReport(**each.report)  # type: ignore[arg-type]  # ints stay ints
            for member, each in zip(trainers, sent, strict=True)
        }
        await self._stage(targets, lambda _: m.Await(version, attempt), m.Whole, deadline_at_s - loop_time_s())
        report.transfer_s = loop_time_s() - begun
        self._pace.note(plan, {rank: step.own_s for rank, step in report.steps.items()})
        on_progress("write", whole, whole)

    def _imm_of(self, attempt: int) -> int:
        """The immediate of an attempt's writes; the next number is the barrier's. Other controllers start elsewhere."""
        first = int.from_bytes(self._mailbox.wire.identity(self.address)[:8], "little")
        return self._options.imm_first + 2 * ((first + attempt) % ATTEMPTS)

    def _make_plan(self) -> Plan:
        """Like Replanner.plan()."""
        trainers, targets = ([member.inventory for member in side] for side in self._planned_by_role())
        return self._replanner.plan(trainers, targets, self._speeds, dict(self._roster.went))

    async def _ask(
        self, member: Member, question: object, answer: type[_T] | tuple[type[_T], ...], timeout_s: float
    ) -> _T:
        """The answer. Raises NoAnswer; Unreachable when it is gone, or was closed."""
        kinds: tuple[type[_T | m.Closed], ...] = (*(answer if isinstance(answer, tuple) else (answer,)), m.Closed)
        got: _T | m.Closed = await self._mailbox.ask(member.address, question, kinds, timeout_s)
        if isinstance(got, m.Closed):
            raise Unreachable(got.reason)
        return got

    async def _stage(
        self, members: list[Member], question: Callable[[Member], object], answer: type[_T], timeout_s: float
    ) -> list[_T]:
        """Like _all(), within timeout_s of the update's begin; remembers who has not answered yet."""

        def asked(member: Member) -> object:
            words = question(member)
            self._late.asked(member, words)
            return words

        late = self._late
        return await self._all(members, asked, answer, timeout_s + _LAG_S, late.answered, late.failed)

    async def _all(
        self,
        members: list[Member],
        question: Callable[[Member], object],
        answer: type[_T],
        timeout_s: float,
        answered: Callable[[Member], object] = lambda _: None,
        failed: Callable[[Member], object] = lambda _: None,
    ) -> list[_T]:
        """Everybody's answer; the first failure ends it, and is named. answered, failed: told which members have."""

        async def one(member: Member) -> _T:
            try:
                got = await self._ask(member, question(member), answer, max(timeout_s, 0.0))
                answered(member)
                return got
            except Unreachable as error:
                self._roster.drop(member, f"it is gone: {error}")
                raise CrossrailError(f"{member} is gone: {error}") from None
            except NoAnswer as error:
                failed(member)
                raise CrossrailError(f"{member}: {error}") from None

        return await _together(one(member) for member in members)

    async def _distribute(self, plan: Plan, deadline_at_s: float, on_progress: OnProgress) -> None:
        """Tells everybody their part of it, and waits until trainers have made theirs ready."""
        trainers, targets = self._planned_by_role()
        assigns = await in_thread(assigns_of, plan, self._attempt, trainers, targets, self._roster.gone)
        self._late.own = ""
        expects = {rank: m.Expect(plan.digest, count) for rank, count in plan.expectations.items()}
        left_s = deadline_at_s - loop_time_s()
        whole = len(plan.tasks)

        def piece(at: int) -> Callable[[Member], m.Assign]:
            return lambda member: assigns[member.rank][at]

        async def assign() -> None:
            for at in range(max(map(len, assigns.values()), default=0) - 1):  # mostly there is one
                longer = [member for member in trainers if at + 1 < len(assigns[member.rank])]
                await self._stage(longer, piece(at), m.Taken, deadline_at_s - loop_time_s())
            await self._stage(trainers, piece(-1), m.Taken, deadline_at_s - loop_time_s())

        async with self._watching(trainers, lambda far: on_progress("ready", sum(p.ready for p in far), whole)):
            told = await asyncio.gather(
                assign(),
                self._stage(targets, lambda member: expects[member.rank], m.Taken, left_s),
                return_exceptions=True,
            )
        for outcome in told:
            if isinstance(outcome, BaseException):
                raise outcome
        self._roster.gone = []

    async def _abort(self, why: str) -> None:
        """Ends an attempt everywhere, and leaves out members that do not confirm it."""
        self.plan = None  # descriptors of inference ranks change, and a member may be missing
        abort = m.Abort(self._attempt, clipped(why), self._has_begun)
        told = await self._tell(self._roster.all(), abort, m.Aborted, self._roster.drop)
        for member, answer in told.items():
            if member.role == "trainer":
                continue
            counts = [[len(regions) for regions in buffers if regions] for buffers in (answer.regions, member.buffers)]
            if counts[0] != counts[1]:
                self._roster.drop(member, "its answer to Abort has other regions than those that it joined with")
            else:
                member.buffers = answer.regions
        self._planned = []

    async def _commit(self, version: int, report: UpdateReport, begun_s: float) -> None:
        """Everything has arrived everywhere: members that cannot be told so do not undo it for the others. Trainers are
        told last: when publish() returns, ranks have switched. UpdateFailed, everywhere, if no rank has answered.

        Counts the update, which began at begun_s: whoever waits for this may be cancelled.
        """
        begun = loop_time_s()
        trainers, targets = self._planned_by_role()
        commit = m.Commit(version, self._attempt)
        why: dict[Member, str] = {}
        switched = await self._tell_planned(targets, commit, m.Taken, why)
        self._name_lost(version, targets, why, switched, report)
        if targets and not switched:
            self.totals.failed += 1
            named = ", ".join(f"{member}: {why[member]}" for member in targets[:_NAMED])
            failed = f"no inference rank has answered that it has it: {named}"
            await self._tell_planned(trainers, m.Abort(self._attempt, clipped(failed)), m.Aborted, why)
            raise UpdateFailed(version, failed)
        self.version = version
        told = await self._tell_planned(trainers, commit, m.Taken, why)
        self._name_lost(version, trainers, why, told, report)
        ended = loop_time_s()
        report.commit_s, report.total_s = ended - begun, ended - begun_s
        self.totals.add(report)

    async def _tell_planned(
        self, planned: list[Member], message: object, answer: type[_T], why: dict[Member, str]
    ) -> set[Member]:
        """Returns the members that have answered. why: reasons of the others. A trainer that has joined again is told
        too: its publish() goes on, while an inference rank has ended the attempt.
        """
        there: dict[Member, Member] = {}
        for member in planned:
            now = self._roster.now(member)
            if now is not None and (now is member or member.role == "trainer"):
                there[now] = member
            else:
                why[member] = "it went just before"

        def lost(now: Member, reason: str) -> None:
            self._roster.drop(now, reason)
            why[there[now]] = reason

        return {there[now] for now in await self._tell(list(there), message, answer, lost)}

    def _name_lost(
        self, version: int, members: list[Member], why: dict[Member, str], told: set[Member], report: UpdateReport
    ) -> None:
        for member in members:
            if member not in told:
                log.warning("version %d is complete, but maybe not at %s: %s", version, member, why[member])
                report.left_out.append(str(member))

    async def _tell(
        self, members: list[Member], message: object, answer: type[_T], lost: Callable[[Member, str], object]
    ) -> dict[Member, _T]:
        """The answers of those who gave one; lost(member, why) is called for each of the others."""

        async def one(member: Member) -> tuple[Member, _T] | None:
            try:
                return member, await self._ask(member, message, answer, self._options.abort_s)
            except (NoAnswer, Unreachable) as error:
                lost(member, f"it did not answer {type(message).__name__}: {error}")
                return None

        told = await asyncio.gather(*(one(member) for member in members))
        return dict(each for each in told if each is not None)

    @asynccontextmanager
    async def _watching(self, trainers: list[Member], show: Callable[[list[m.Progress]], None]) -> AsyncIterator[None]:
        """Asks trainers at intervals for their progress. Whatever `show` raises ends the update, like a lost member."""

        async def ask() -> None:
            while True:
                await asyncio.sleep(self._options.progress_s)
                try:
                    far = await self._all(trainers, lambda _: m.AskProgress(), m.Progress, self._options.abort_s)
                except CrossrailError as error:
                    log.info("how far trainers are is not known now: %s", error)
                    continue
                try:
                    show(far)
                except Exception as error:
                    if self._lost is not None and not self._lost.done():
                        self._lost.set_exception(error)
                    raise

        show([])
        asking = asyncio.ensure_future(ask())
        try:
            yield
        finally:
            asking.cancel()
            await asyncio.wait([asking])
            raised = None if asking.cancelled() else asking.exception()
        if raised is not None:  # at the very moment in which all was done
            raise raised


def _members(argument: str, role: Role, ranks: Iterable[int]) -> list[tuple[Role, int]]:
    """UsageError for a number of them instead, and for what is no rank: one would wait for it in vain."""
    if not isinstance(ranks, Iterable):
        raise UsageError(f"{argument} is {ranks!r}, must be ranks, such as range(4) or [0, 2]")
    members = [(role, rank) for rank in ranks]
    for _, rank in members:
        check_member(role, rank)
    return members


def _unseen(_stage: Stage, _done: int, _whole: int) -> None:
    return


async def _together(works: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """All of their results. The first failure cancels the others, and is raised when they have ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        # Not gather(): it raises a failure that coincides with our cancellation, and the caller may go on.
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Awaits the work even if we are cancelled, and then raises that. After a second time it goes on without us."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, also where we are cancelled
    await _ended(task)
    task.result()


async def _ended(task: asyncio.Future[Any]) -> None:
    """Like _to_its_end(), for work that has begun, however it ends."""
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
