"""Says which nodes a router has lost: in its log, and to requests that no node takes."""

from __future__ import annotations

import logging
from typing import NamedTuple

from crossrail._latest import Latest
from crossrail.control.deadlines import loop_time_s
from crossrail.kv import messages as m
from crossrail.kv.router.membership import Member, Membership

log = logging.getLogger("crossrail.kv")

_GONE_KEPT = 1024  # names of nodes


class _Gone(NamedTuple):
    """A node that was a member. at_s: when it left, on the event loop's clock. is_missed: it left without a word, and
    has not come back.
    """

    why: str
    at_s: float
    model: str
    is_missed: bool


class Absence:
    """A router's explanations of which nodes it lacks. Threads: the event loop's."""

    def __init__(self, router: str, membership: Membership) -> None:
        self._router = router
        self._membership = membership
        self._gone: Latest[tuple[m.Role, str], _Gone] = Latest(_GONE_KEPT)

    def note(self, member: Member, why: str) -> None:
        """Notes that the node is no longer a member. Logs a warning, unless it has said that it leaves: requests go on
        elsewhere, so nothing else may tell an operator.
        """
        key = (member.record.role, member.name)
        self._gone[key] = _Gone(why, loop_time_s(), member.record.model, not member.has_left)
        self._gone.move_to_end(key)
        self._log(member, why, logging.INFO if member.has_left else logging.WARNING)

    def note_joined(self, member: Member) -> None:
        """Logs that the node is a member now; a warning, as before, of one that was missed."""
        key = (member.record.role, member.name)
        gone = self._gone.get(key)
        is_missed = gone is not None and gone.is_missed
        if gone is not None:
            self._gone[key] = gone._replace(is_missed=False)
        what = f"node {member.name!r} is back" if is_missed else f"node {member.name!r} has joined"
        self._log(member, what, logging.WARNING if is_missed else logging.INFO)

    def _log(self, member: Member, what: str, level: int) -> None:
        role = member.record.role
        log.log(level, "router %s: %s; %ss now: %d", self._router, what, role, len(self._membership.members(role)))

    def of_decoders(self, model: str | None) -> str:
        """Why no decoder of this model takes requests. model None: any."""
        members = self._membership.members("decoder")
        if hanging := self.hanging("decoder", model, 0):
            return hanging
        of = f" for model {model!r}" if model else ""
        others = sorted({repr(member.record.model) for member in members} - {repr(model)})
        there = f"; there are some for {', '.join(others)}" if of and others else ""
        resting = [member.name for member in members if model in (None, member.record.model)]
        if resting:
            return f"no decoder{of} takes requests now, also not node {resting[0]!r}{_and_more(resting)}{there}"
        return self._none_there("decoder", of, model) + there

    def of_prefillers(self, model: str, tokens: int) -> str:
        """Why no prefiller of this model takes a prompt with this many tokens to prefill."""
        if hanging := self.hanging("prefiller", model, tokens):
            return hanging
        of = f" for model {model!r}"
        there = [member for member in self._membership.members("prefiller") if member.record.model == model]
        if not there:
            return self._none_there("prefiller", of, model)
        of += f" with pages for {tokens} tokens"
        resting = [member.name for member in there if tokens <= member.tokens_max]
        if resting:
            return f"no prefiller{of} takes requests now, also not node {resting[0]!r}{_and_more(resting)}"
        return f"no prefiller{of} has joined router {self._router!r}"

    def hanging(self, role: m.Role, model: str | None, tokens: int) -> str:
        """Names the nodes with enough pages for these tokens that hang; empty if there are none. model None: any."""
        hanging = [
            member.name
            for member in self._membership.members(role)
            if member.load.hangs and model in (None, member.record.model) and tokens <= member.tokens_max
        ]
        if not hanging:
            return ""
        return f"no {role} takes requests: the model hangs at node {hanging[0]!r}{_and_more(hanging)}"

    def _none_there(self, role: m.Role, of: str, model: str | None) -> str:
        """of: the model, in words, or empty."""
        gone = [went for (was, _), went in self._gone.items() if was == role and model in (None, went.model)]
        if not gone:
            return f"no {role}{of} has joined router {self._router!r}"
        last = gone[-1]
        which = "the only one" if len(gone) == 1 else f"the last of {len(gone)}"
        ago_s = loop_time_s() - last.at_s
        return f"no {role}{of} is left at router {self._router!r}: {last.why}, {ago_s:.1f} s ago; it was {which}"


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
