"""What the controller does about a trainer whose publish() was refused at the call, such as for a tensor that moved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from crossrail.control.mailbox import Mailbox, NoAnswer
from crossrail.control.messages import clipped
from crossrail.control.wire import Unreachable
from crossrail.errors import UsageError
from crossrail.weights.services import messages as m
from crossrail.weights.services.members import Member
from crossrail.weights.services.roster import Roster

_ASK_S = 1.0


class Refusals:
    """Handles Refusing from the mailbox: an update to that version fails at once, and if there is none, other trainers
    do not wait for one.

    fail: ends the update to a version, if one that this member takes part in is under way, for a reason; returns
    whether it is. Threads: the event loop's.
    """

    def __init__(self, mailbox: Mailbox, roster: Roster, fail: Callable[[Member, int, str], bool]) -> None:
        self._mailbox = mailbox
        self._roster = roster
        self._fail = fail
        mailbox.handle(m.Refusing, self._on_refusing)

    async def _on_refusing(self, sender: bytes, _: m.Refusing) -> m.Taken:
        member = next((member for member in self._roster.of("trainer") if member.address == sender), None)
        if member is None:
            raise UsageError("it is no member")
        self._mailbox.spawn(self._pass_on(member), f"asking {member} why publish() was refused")
        return m.Taken()

    async def _pass_on(self, member: Member) -> None:
        try:  # the message may have been late, and the trainer has offered its weights since
            answer = await self._mailbox.ask(member.address, m.RollCall(), (m.Refused, m.Taken, m.Closed), _ASK_S)
        except (NoAnswer, Unreachable):
            return
        if not isinstance(answer, m.Refused):
            return
        why = clipped(f"{member}: {answer.reason}")
        if member not in self._roster or self._fail(member, answer.version, why):
            return
        withdraw = m.Withdraw(answer.version, why)
        others = [other for other in self._roster.of("trainer") if other is not member]
        asked = (self._mailbox.ask(other.address, withdraw, (m.Taken, m.Closed), _ASK_S) for other in others)
        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, NoAnswer | Unreachable):
                raise outcome
