"""The members of updates: as the controller knows them, what it tells trainers of a plan, and each one's own side."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossrail.control.deadlines import loop_time_s
from crossrail.control.mailbox import Handler, Mailbox, NoAnswer
from crossrail.control.messages import clipped
from crossrail.control.wire import Unreachable, Wire
from crossrail.errors import CrossrailError, UsageError
from crossrail.weights.errors import MemberRefused
from crossrail.weights.inventory.holdings import Inventory, Role, called
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.planning.plan import Plan
from crossrail.weights.services import messages as m

log = logging.getLogger("crossrail.weights")

_AGAIN_S, _AGAIN_MAX_S = 1.0, 30.0
_JOIN_AGAIN_S = 600.0
_ANSWERED_S = 1.0  # a controller that lives takes an answer in less

CONTROLLER_GONE = "the controller is gone: it died, closed, or was silent for too long"

# By mailbox, for all of its members: a controller knows them by its address.
_words: weakref.WeakKeyDictionary[Mailbox, int] = weakref.WeakKeyDictionary()


# Open memberships, one per mailbox, since another one would take over its messages. By the mailbox's id, which is
# unique while the membership keeps it alive. Any thread.
_memberships: weakref.WeakValueDictionary[int, Membership] = weakref.WeakValueDictionary()


async def _nothing() -> None:
    return


@dataclass(eq=False)
class Member:
    """One incarnation of a trainer or inference rank. buffers: descriptors of each of its memories.

    number: of its Join.
    """

    role: Role
    rank: int
    address: bytes
    inventory: Inventory
    buffers: list[list[bytes]]
    number: int = 0

    def __str__(self) -> str:
        return called(self.role, self.rank)


def assigns_of(
    plan: Plan, attempt: int, trainers: Sequence[Member], targets: Sequence[Member], gone: list[bytes]
) -> dict[int, list[m.Assign]]:
    """Assigns by trainer's rank, in the order in which they are to be sent. gone: ranks that they need not wait for.

    Blocks: it compresses all of the plan. UsageError, which names the trainer, for a part that is too long to be sent.
    """
    groups = sorted(set(plan.tasks["group"].tolist()))
    addresses = [m.Member(member.rank, member.address) for member in trainers]
    peers = {
        (member.rank, index): m.PeerRegion(member.rank, index, descriptor)
        for member in trainers
        for index, descriptor in enumerate(member.buffers[0])
    }
    senders = plan.tasks["trainer"][plan.parts["task"][plan.gathers["part"]]]
    meets_first = bool((plan.gathers["trainer"] != senders).any())
    regions = {
        (member.rank, index): [
            m.TargetRegion(member.rank, buffer, index, descriptors[index])
            for buffer, descriptors in enumerate(member.buffers)
        ]
        for member in targets
        for index in range(len(member.buffers[0]))
    }

    def assign(rank: int) -> list[m.Assign]:
        part = plan.of_trainer(rank)
        gathered = np.unique(part.gathers[["trainer", "region"]]).tolist()
        written = np.unique(part.writes[["target", "region"]]).tolist()
        assignment = m.Assignment(
            part.to_bytes(),
            groups,
            addresses,
            [peers[key] for key in gathered if key[0] != rank],
            [each for key in written for each in regions[key]],
            list(gone),
            meets_first,
        )
        try:
            pieces = m.in_pieces(m.packed(assignment.to_bytes()))
        except UsageError as error:
            raise UsageError(
                f"trainer {rank}: its part of the plan, {len(assignment.targets)} regions of inference ranks: {error}. "
                "Next: more trainers, or fewer and larger allocations at the inference ranks"
            ) from None
        return [m.Assign(plan.digest, attempt, at, len(pieces), piece) for at, piece in enumerate(pieces)]

    return {member.rank: assign(member.rank) for member in trainers}


def packed_inventory(memory: WeightMemory) -> bytes:
    """The inventory for Join. Registers memory that is not registered yet. Blocks: a second or more for tens of
    thousands of arrays.
    """
    return m.packed(memory.inventory().to_bytes())


def check_one_engine(mailbox: Mailbox, memory: WeightMemory) -> None:
    """UsageError for a mailbox of another engine than the memory's: peers know a member by one address."""
    if mailbox.wire.identity(mailbox.address) != bytes.fromhex(memory.engine.address.incarnation):
        raise UsageError(
            f"this mailbox is not of {memory.engine.name!r}, the engine of the memory. Next: a mailbox and a "
            "WeightMemory of the same engine"
        )


def next_word(mailbox: Mailbox) -> int:
    """The number of a Join or Leave."""
    number = _words[mailbox] = _words.get(mailbox, 0) + 1
    return number


async def until_reached(
    work: Callable[[float], Awaitable[object]],
    wire: Wire,
    address: bytes,
    for_s: float,
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Runs it, with the seconds that are left, again while it raises Unreachable and is wanted, ever more seldom.

    Each time our engine looks again for who is at this address: it may have been frozen or cut off, and a try may only
    end what is left here of a connection that it has given up. Raises Unreachable when the time is over, and what else
    it does.
    """
    deadline_at_s = loop_time_s() + for_s
    pause_s = _AGAIN_S
    while True:
        try:
            await work(deadline_at_s - loop_time_s())
            return
        except Unreachable:
            if loop_time_s() + pause_s >= deadline_at_s:
                raise
        await asyncio.sleep(pause_s)
        if not is_wanted():
            return
        wire.revive(address)
        pause_s = min(2 * pause_s, _AGAIN_MAX_S)


class Membership:
    """Whether a trainer or inference rank takes part, as far as it knows; if it was left out, it joins again.

    join: joins the controller at an address, within so many seconds. closed_why: why it no longer takes part, "" while
    it does; broken_why: why its memory cannot be used any more. on_out: called once out_why says why joining has
    failed. Threads: the event loop's. UsageError for a mailbox of another membership, which keeps it until close().
    """

    def __init__(
        self,
        who: str,
        mailbox: Mailbox,
        join: Callable[[bytes, float], Awaitable[None]],
        closed_why: Callable[[], str],
        broken_why: Callable[[], str],
        on_out: Callable[[], object],
    ) -> None:
        self._who = who
        self._closed_why, self._broken_why, self._on_out = closed_why, broken_why, on_out
        self._mailbox = mailbox
        self._join = join
        self._takes_part = False
        self._controller = b""
        self.out_why = ""  # why it takes no part in updates, where it was not the one to end that
        self._join_number = 0
        self._joining: asyncio.Task[None] | None = None  # joins again after being left out
        self._asking: set[asyncio.Future[None]] = set()  # each join() under way that somebody has called
        self._answering: set[asyncio.Task[Any]] = set()
        other = _memberships.setdefault(id(mailbox), self)
        if other is not self:
            raise UsageError(
                f"this mailbox is {other._who}'s. Next: an engine and a mailbox for each trainer and inference rank, "
                "or close() that one first"
            )

    def begin(self, controller: bytes) -> None:
        """Called by join() to this controller: it replaces an attempt to join again that is in progress."""
        self._takes_part, self._controller = True, controller
        if self._joining is not asyncio.current_task():
            self._stop()

    def end(self) -> None:
        """Ends the membership: the rank leaves, or closes."""
        self._takes_part = False
        self._stop()

    async def leave(self, controller: bytes, timeout_s: float) -> None:
        """Ends the membership, and tells the controller, unless that cannot be reached. UsageError without one: b""."""
        if not controller:
            raise UsageError(f"{self._who} has joined no controller that it could leave")
        self.end()
        try:
            await self._mailbox.ask(controller, m.Leave(next_word(self._mailbox)), m.Taken, timeout_s)
        except (NoAnswer, Unreachable) as error:
            log.info("%s left without a word: %s", self._who, error)

    def handle(self, handlers: Mapping[type, Handler], while_whole: dict[type, Handler]) -> None:
        """Handles these questions, and RollCall unless it is among them. Once closed, the member answers Closed to all
        of them. If it has lost its memory, or has left, it answers Closed to RollCall and to those in while_whole, but
        still ends what it has begun.
        """

        def unless(handler: Handler, why: Callable[[], str]) -> Handler:
            async def answer(sender: bytes, question: object) -> object:
                return m.Closed(clipped(reason)) if (reason := why()) else await handler(sender, question)

            return answer

        for kind, handler in handlers.items():
            self._mailbox.handle(kind, unless(handler, self._closed_why))
        for kind, handler in ({m.RollCall: self.on_roll_call} | while_whole).items():
            self._mailbox.handle(
                kind, unless(handler, lambda: self._closed_why() or self._broken_why() or self._left_why())
            )

    async def on_roll_call(self, sender: bytes, _: m.RollCall) -> m.Taken | m.Closed:
        """A member that has joined another controller is gone for this one, which leaves it out before
        anybody opens.
        """
        return m.Taken() if sender == self._controller else m.Closed(f"{self._who} has joined another controller")

    def watch(self, controller: bytes, lost: Callable[[str], object]) -> asyncio.Task[None]:
        """Called as a controller begins something here that only its word would end. Calls lost(why) as soon as our
        engine gives it up; cancel the task when that is of no interest any more.
        """

        async def until_lost() -> None:
            await self._mailbox.wire.until_lost(controller)
            lost(CONTROLLER_GONE)

        # It has just spoken, so if our engine had given it up, that is outdated.
        self._mailbox.wire.revive(controller)
        return self._mailbox.spawn(until_lost(), "waiting for the loss of a controller")

    def answer_before_close(self) -> None:
        """Makes answered() wait for this task's answer. Whoever hears of a commit may close everything at once, and
        without this answer the controller would consider the version lost here.
        """
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def answered(self) -> None:
        """Returns when those answers have gone out, but not their own caller's; or after a while."""
        if others := self._answering - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=_ANSWERED_S)

    def close(self) -> None:
        """Like end(); afterwards another member may use the mailbox."""
        self.end()
        # Close() may be called again when another membership has the mailbox.
        if _memberships.get(id(self._mailbox)) is self:
            del _memberships[id(self._mailbox)]

    @property
    def is_again(self) -> bool:
        """Whether the join() in progress is an automatic one."""
        return self._joining is not None and self._joining is asyncio.current_task()

    async def ask_to_join(
        self, controller: bytes, inventory: bytes, timeout_s: float, spare: list[bytes] | None = None, *, is_again: bool
    ) -> None:
        """Asks to join; answers to earlier joins no longer count. If our engine has given up the controller, it is
        tried again: it may have been frozen or cut off.

        is_again: as in Join. Raises MemberRefused, NoAnswer, Unreachable.
        """
        self._takes_part, self.out_why = True, ""
        self._join_number = next_word(self._mailbox)
        self._mailbox.wire.revive(controller)
        question = m.Join(self._join_number, inventory, spare or [], is_again)
        answer: m.Joined | m.JoinRefused
        try:
            answer = await self._mailbox.ask(controller, question, (m.Joined, m.JoinRefused), timeout_s)
        except NoAnswer as error:
            if not error.is_silence:
                raise
            raise NoAnswer(
                f"{self._who}: {error}. Next: see that the controller's process runs, that its mailbox was started and "
                "its event loop is not blocked, and that both have the same secret: its log says what it drops",
                is_silence=True,
            ) from None
        except Unreachable as error:
            raise Unreachable(
                f"{self._who}: its controller cannot be reached: {error}. Next: see that its process runs, and join() "
                "the address that it has now: one that was restarted has another"
            ) from None
        if isinstance(answer, m.JoinRefused):
            self._takes_part = False
            self.out_why = f"{self._who} takes no part in updates: it was refused: {answer.reason}. Next: join()"
            self._on_out()
            raise MemberRefused(f"{self._who} was refused: {answer.reason}")

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        """Wraps a join() of the user's: an automatic one has to wait for it. Otherwise the controller would accept only
        that one, and the caller would be told that it has joined again.
        """
        if self.is_again:
            yield
            return
        answered = asyncio.get_running_loop().create_future()
        self._asking.add(answered)
        try:
            yield
        finally:
            self._asking.discard(answered)
            answered.set_result(None)

    def displaced(self, why: str, number: int) -> bool:
        """The controller says that another process has joined under this rank since our Join of this number. We do not
        join again automatically. Returns whether that is news: we may have joined again since.
        """
        if not self._takes_part or number < self._join_number:
            return False
        self.end()
        self.out_why = f"{self._who} takes no part in updates any more: {why}"
        log.warning("%s takes no part in updates any more: %s", self._who, why)
        return True

    def left_out(self, told: m.Evicted, controller: bytes, before: Callable[[], Awaitable[None]] = _nothing) -> None:
        """The controller says that we were left out. before: runs before we join again."""
        if not self._takes_part:
            return
        log.warning("%s was left out: %s; it joins again", self._who, told.reason)
        is_joining = self._joining is not None and not self._joining.done()
        if is_joining and told.number == self._join_number:
            # That Join was accepted, and has already proved useless: its answer, if still in flight, would end this.
            self._stop()
            is_joining = False
        if not is_joining:
            self._joining = self._mailbox.spawn(self._join_again(controller, before), "joining again")

    def _left_why(self) -> str:
        return "" if self._takes_part else self.out_why or f"{self._who} has left"

    def _stop(self) -> None:
        if self._joining is not None:
            self._joining.cancel()

    async def _join_again(self, controller: bytes, before: Callable[[], Awaitable[None]]) -> None:
        await before()
        while self._asking:
            await asyncio.wait(self._asking)
        if not self._takes_part:
            return
        wire = self._mailbox.wire
        try:
            await until_reached(lambda left_s: self._join(controller, left_s), wire, controller, _JOIN_AGAIN_S)
        except CrossrailError as error:
            why = str(error).partition(". Next: ")[0]
            self.out_why = f"{self._who} takes no part in updates: it could not join again: {why}. Next: join()"
            log.warning("%s", self.out_why)
            self._on_out()
