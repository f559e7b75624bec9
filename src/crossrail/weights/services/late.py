"""Says who kept an update waiting, once it has failed for that reason."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from crossrail.control.mailbox import Mailbox, NoAnswer
from crossrail.control.wire import Unreachable
from crossrail.weights.services import messages as m
from crossrail.weights.services.members import Member

_WHO_S = 0.5  # for members to say why an update is late
_NAMED = 8
_BLOCKED_S = 1.0  # more than what is slow of a busy loop


class Late:
    """Which members an update is still waiting for; one update after the other. Threads: the event loop's.

    own: what the controller itself has not done yet, in words; "" while it waits for others. over_s: for how long the
    update's time had been up when the controller's event loop noticed.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self.own = ""
        self.over_s = 0.0
        self._mailbox = mailbox
        self._asked: dict[Member, type] = {}  # and what that is
        self._failed: Member | None = None  # the first that could not do what it was asked

    def clear(self) -> None:
        """Another update begins."""
        self._asked.clear()
        self._failed, self.own, self.over_s = None, "", 0.0

    def asked(self, member: Member, question: object) -> None:
        self._asked[member] = type(question)

    def answered(self, member: Member) -> None:
        del self._asked[member]

    def failed(self, member: Member) -> None:
        self._failed = self._failed or member

    async def who(self, version: int, others: Sequence[Member]) -> str:
        """For an update whose time is up: ": trainer 1 has not ..". Members that merely wait for others are named only
        if there is nobody else to name.

        others: inference ranks, which may keep trainers waiting that write to them.
        """
        if self.over_s > _BLOCKED_S:  # nobody else is to blame
            return (
                f": the controller's event loop did not run until {self.over_s:.1f} s after that: its process was "
                "stopped, or something blocks the loop"
            )
        trainers = [member for member, kind in self._asked.items() if kind is m.Go]
        missing = dict(zip(trainers, await self._missing(trainers, version), strict=True))
        found = [
            missing.get(member, f"{member} has not answered {kind.__name__}") for member, kind in self._asked.items()
        ]
        words = [each for each in found if each]
        if not words and trainers:
            silent = await asyncio.gather(*(self._is_silent(member) for member in others))
            words = [f"{member} does not answer" for member, is_so in zip(others, silent, strict=True) if is_so]
        words = words or await self._not_done() or [self.own] * bool(self.own)
        return f": {_listed(words)}" if words else ""

    async def who_else(self, version: int) -> str:
        """When a trainer's step has failed: "; trainer 1 has not ..", if it had no more time to wait for others."""
        failed = self._failed
        if failed is None or self._asked[failed] is not m.Go:
            return ""
        far = await self._progress_of(failed)
        if far is None or far.withdrawn != version:
            return ""
        others = [member for member, kind in self._asked.items() if kind is m.Go and member is not failed]
        words = [each for each in await self._missing(others, version) if each]
        return f"; {_listed(words)}" if words else ""

    async def _missing(self, trainers: Sequence[Member], version: int) -> list[str]:
        """Why each trainer does not take part; "" for one whose publish() is in progress."""

        async def why(member: Member) -> str:
            far = await self._progress_of(member)
            if far is None:
                return f"{member} does not answer"
            if far.withdrawn == version:
                return f"{member} has called publish(), and that was cancelled or out of time"
            return "" if far.is_offered else f"{member} has not called publish()"

        return await asyncio.gather(*map(why, trainers))

    async def _not_done(self) -> list[str]:
        """Everybody who was asked, and what each trainer waits for: whom its writes or reads are held up by."""

        async def why(member: Member, kind: type) -> str:
            far = await self._progress_of(member) if kind is m.Go else None
            waits_for = f" ({far.waits_for} under way)" if far is not None and far.waits_for else ""
            return f"{member} is not done{waits_for}"

        return await asyncio.gather(*(why(member, kind) for member, kind in self._asked.items()))

    async def _is_silent(self, member: Member) -> bool:
        try:
            await self._mailbox.ask(member.address, m.RollCall(), (m.Taken, m.Closed), _WHO_S)
        except NoAnswer as error:
            return error.is_silence
        except Unreachable:
            return True
        return False

    async def _progress_of(self, member: Member) -> m.Progress | None:
        """The member's progress; None if it does not answer."""
        try:
            return await self._mailbox.ask(member.address, m.AskProgress(), m.Progress, _WHO_S)
        except (NoAnswer, Unreachable):
            return None


def _listed(words: Sequence[str]) -> str:
    """Some of them."""
    more = f", and {len(words) - _NAMED} more like these" if len(words) > _NAMED else ""
    return ", ".join(words[:_NAMED]) + more
