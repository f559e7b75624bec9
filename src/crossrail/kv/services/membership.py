"""Which nodes are there: they join, send heartbeats, drain, leave, or go missing.

Membership is what a router asks. Roster is the one that lives in the router itself; etcd/membership.py has another.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import get_args

from crossrail.control.mailbox import Mailbox
from crossrail.errors import CrossrailError, UsageError
from crossrail.kv.errors import LayoutMismatch
from crossrail.kv.messages import Load, NodeRecord, Role
from crossrail.kv.transfer.layout import KvLayout, compatible

log = logging.getLogger("crossrail.kv")


@dataclass
class Member:
    """One incarnation of a node. heard_s: when it was last heard of, on the event loop's clock; later by what was
    excused since. told_s: when its load came. ready_s: since when it takes requests, if it does. has_left: it has said
    that it goes. join_number: of its latest Join. rivals: other incarnations of its name that want to join, by address:
    how often it was heard of since.
    """

    record: NodeRecord
    layout: KvLayout
    load: Load
    heard_s: float
    told_s: float = 0.0
    ready_s: float = 0.0
    has_left: bool = False
    join_number: int = 0
    rivals: dict[bytes, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.record.node

    @property
    def address(self) -> bytes:
        return self.record.address

    @property
    def tokens_max(self) -> int:
        """Tokens that its pages can hold."""
        return self.layout.pages * self.layout.page_tokens

    def tell(self, load: Load, now_s: float) -> None:
        """It says what it has to do."""
        if not self.load.takes_requests:
            self.ready_s = now_s
        self.load = load
        self.heard_s = self.told_s = now_s


Gone = Callable[[Member, str], None]
Refuse = Callable[[CrossrailError], None]


def refuse(refused: asyncio.Future[None], why: CrossrailError) -> None:
    """Of a router's or a node's `refused`: it is not wanted, and will not be. The first such reason is raised there."""
    log.error("%s", why)
    if not refused.done():
        refused.set_exception(why)
        refused.exception()  # seen: who runs it may never look


class NotYet(CrossrailError):
    """Whether this node may join is not known yet; it asks again."""


class Membership(ABC):
    """The members that a router may choose from. Threads: the event loop's.

    Lifecycle: 1. on_gone(). 2. start(). 3. close().
    """

    def start(self, router: str, mailbox: Mailbox, refuse: Refuse) -> None:  # noqa: B027  # not each has to do
        """Begins, for the router of this name; its tasks are the mailbox's. refuse: is told if it may have no nodes."""

    async def close(self) -> None:  # noqa: B027
        """The router is no more, and its mailbox closed. Idempotent."""

    @abstractmethod
    def members(self, role: Role) -> list[Member]:
        """Those of a role, by name; draining ones too. Any thread. The list is nobody's to change; it is the same one
        until a member comes or goes.
        """

    @abstractmethod
    def at(self, address: bytes) -> Member | None:
        """The member of this address, of either role. Any thread."""

    @abstractmethod
    def on_gone(self, fn: Gone) -> None:
        """Calls fn(member, why) for each that is no member any more."""

    @abstractmethod
    def join(self, record: NodeRecord, load: Load, now_s: float) -> None:
        """A node says that it is there. UsageError when it does not fit: both sides are in the words.

        Another CrossrailError: not now; it asks again.
        """

    @abstractmethod
    def heartbeat(self, node: str, address: bytes, load: Load, now_s: float) -> bool:
        """A node says what it has to do. False when this incarnation is no member: it may join."""

    @abstractmethod
    def leave(self, node: str, address: bytes) -> None:
        """It goes by itself. One that is no member is gone already."""

    def excuse(self, stood_s: float, now_s: float) -> None:  # noqa: B027
        """The router itself stood still for so long: what it has not heard meanwhile says nothing about nodes."""

    @abstractmethod
    def sweep(self, now_s: float, is_lost: Callable[[bytes], bool]) -> None:
        """Removes those that are not there any more. is_lost: what the engine knows of an address."""


class Roster(Membership):
    """The Membership inside a router: nodes join by message, and are kept by heartbeats.

    Lifecycle of a member: 1. join. 2. heartbeat within every lease_s, or tokens, for which the router sets heard_s;
    draining is part of its load. 3. gone: it left, was missed for lease_s, or is lost.
    Invariant: at most one member of a name. Another incarnation of it waits until that one is gone, as a dead one's
    successor does, or is refused because it was heard of meanwhile.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._members: dict[str, Member] = {}
        self._by_role: dict[Role, list[Member]] = {}
        self._by_address: dict[bytes, Member] = {}
        self._gone: list[Gone] = []

    def members(self, role: Role) -> list[Member]:
        return self._by_role.get(role, [])

    def at(self, address: bytes) -> Member | None:
        return self._by_address.get(address)

    def _sort(self) -> None:
        """To be called when a member came, went, or has another record. Not when somebody asks, in whichever thread."""
        by_role: dict[Role, list[Member]] = {role: [] for role in get_args(Role)}
        for member in sorted(self.all(), key=lambda member: member.name):
            by_role[member.record.role].append(member)
        self._by_role = by_role
        self._by_address = {member.address: member for member in self.all()}

    def all(self) -> list[Member]:
        """All members, of either role."""
        return list(self._members.values())

    def on_gone(self, fn: Gone) -> None:
        self._gone.append(fn)

    def join(self, record: NodeRecord, load: Load, now_s: float) -> None:
        layout = KvLayout.from_wire(record.layout)
        for other in self.all():
            if other.record.model == record.model and other.name != record.node:
                try:
                    compatible(layout, other.layout)
                except LayoutMismatch as mismatch:
                    raise UsageError(f"node {record.node!r} does not fit {other.name!r}: {mismatch}") from None
        before = self._members.get(record.node)
        if before is None:
            self._members[record.node] = Member(record, layout, load, now_s, now_s, now_s)
            self._sort()
        elif before.address == record.address:  # the same again: whoever has it keeps a member
            before.record, before.layout = record, layout
            before.tell(load, now_s)
            self._sort()
        else:
            self._refuse_rival(before, record.address)

    def _refuse_rival(self, member: Member, address: bytes) -> None:
        # The first heartbeat may have been on its way as the member died; the second is sent when that was answered.
        if member.rivals.setdefault(address, 0) < 2:
            raise NotYet(f"another node has the name {member.name!r}: waiting to see whether it lives")
        del member.rivals[address]  # told so, it goes
        raise UsageError(f"another node has the name {member.name!r}, and lives. Next: give this one another name")

    def heartbeat(self, node: str, address: bytes, load: Load, now_s: float) -> bool:
        member = self._members.get(node)
        if member is None or member.address != address:
            return False
        member.tell(load, now_s)
        member.rivals = {rival: heard + 1 for rival, heard in member.rivals.items()}
        return True

    def leave(self, node: str, address: bytes) -> None:
        member = self._members.get(node)
        if member is not None and member.address == address:
            member.has_left = True
            self.remove(member, f"node {node!r} left")

    def remove(self, member: Member, why: str) -> None:
        """Removes a member."""
        if self._members.get(member.name) is member:
            del self._members[member.name]
            self._sort()
            for fn in self._gone:
                fn(member, why)

    def excuse(self, stood_s: float, now_s: float) -> None:
        for member in self.all():
            member.heard_s = min(member.heard_s + stood_s, now_s)

    def sweep(self, now_s: float, is_lost: Callable[[bytes], bool]) -> None:
        for member in self.all():
            if is_lost(member.address):
                self.remove(member, f"node {member.name!r} died or closed")
            elif now_s - member.heard_s > self.lease_s:
                self.remove(member, f"node {member.name!r} was not heard of for {self.lease_s:g} s")
            else:
                member.rivals = {rival: heard for rival, heard in member.rivals.items() if not is_lost(rival)}
