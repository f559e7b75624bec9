"""Which nodes are there: they join, send heartbeats, drain, leave, or go missing.

Membership is the interface that a router uses. Roster is the implementation inside the router; etcd/membership.py has
another.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import get_args

from crossrail.control.mailbox import Mailbox
from crossrail.errors import CrossrailError, UsageError
from crossrail.kv.errors import LayoutMismatch
from crossrail.kv.messages import Load, NodeRecord, Role, check_name
from crossrail.kv.refusal import Refuse
from crossrail.kv.transfer.layout import KvLayout, compatible

log = logging.getLogger("crossrail.kv")


@dataclass
class Member:
    """One incarnation of a node. heard_s: when it was last heard from, on the event loop's clock; moved on by excuse().
    told_s: when its load was received. ready_s: since when it accepts requests, if it does. has_left: it has said that
    it leaves. join_number: of its latest Join. rivals: other incarnations of the same name that want to join, by
    address, and how often this member was heard from since.
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
        """Tokens that fit into its pages."""
        return self.layout.pages * self.layout.page_tokens

    def tell(self, load: Load, now_s: float) -> None:
        """Records a load that it has reported."""
        if not self.load.takes_requests:
            self.ready_s = now_s
        self.load = load
        self.heard_s = self.told_s = now_s


Gone = Callable[[Member, str], None]


class NotYet(CrossrailError):
    """Whether this node may join is not decided yet; it should ask again."""


class Membership(ABC):
    """The members that a router may choose from. Threads: the event loop's.

    Lifecycle: 1. on_gone(). 2. start(). 3. close().
    """

    def start(self, router: str, mailbox: Mailbox, refuse: Refuse) -> None:  # noqa: B027  # not each has to do
        """Begins, for the router of this name; its tasks are the mailbox's. refuse: called if the router may not have
        nodes.
        """

    async def close(self) -> None:  # noqa: B027
        """Called when the router and its mailbox are closed. Idempotent."""

    @abstractmethod
    def members(self, role: Role) -> list[Member]:
        """The members of a role, sorted by name, including draining ones. Any thread. Do not modify the list: the same
        one is returned until a member joins or goes.
        """

    @abstractmethod
    def at(self, address: bytes) -> Member | None:
        """The member with this address, of either role. Any thread."""

    @abstractmethod
    def on_gone(self, fn: Gone) -> None:
        """Calls fn(member, why) for each node that stops being a member."""

    @abstractmethod
    def join(self, record: NodeRecord, load: Load, now_s: float) -> None:
        """A node registers. UsageError if it does not fit: the message describes both sides.

        Another CrossrailError: not now; the node should ask again.
        """

    @abstractmethod
    def heartbeat(self, node: str, address: bytes, load: Load, now_s: float) -> bool:
        """A node reports its load. False if this incarnation is no member: it may join."""

    @abstractmethod
    def leave(self, node: str, address: bytes) -> None:
        """A node leaves by itself. Does nothing for a node that is no member."""

    def excuse(self, frozen_s: float, now_s: float) -> None:  # noqa: B027
        """The router itself was frozen for so long: silence during that time says nothing about the nodes."""

    @abstractmethod
    def sweep(self, now_s: float, is_lost: Callable[[bytes], bool]) -> None:
        """Removes members that are gone. is_lost: whether the engine has lost the peer at an address."""


class Roster(Membership):
    """The Membership inside a router: nodes join by message, and stay by heartbeats.

    Lifecycle of a member: 1. join. 2. a heartbeat at least every lease_s, or tokens, for which the router sets heard_s;
    draining is part of its load. 3. gone: it left, was not heard from for lease_s, or is lost.

    Invariant: at most one member per name. Another incarnation of the name waits until the member is gone, as a dead
    node's successor does, or is refused because the member was heard from meanwhile.
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
        """Call this when a member joined, left, or changed its record; not on queries, which may come
        from any thread.
        """
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
        check_name(record.node, "the node's name")  # of whatever build or program that node is
        check_name(record.model, "the model's name")
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
        elif before.address == record.address:  # a repeated Join
            before.record, before.layout = record, layout
            before.tell(load, now_s)
            self._sort()
        else:
            self._refuse_rival(before, record.address)

    def _refuse_rival(self, member: Member, address: bytes) -> None:
        # The first heartbeat may have been in flight when the member died; the second is sent only after the first's
        # answer.
        if member.rivals.setdefault(address, 0) < 2:
            raise NotYet(f"another node has the name {member.name!r}: waiting to see whether it lives")
        del member.rivals[address]  # the refusal makes it give up
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

    def excuse(self, frozen_s: float, now_s: float) -> None:
        for member in self.all():
            member.heard_s = min(member.heard_s + frozen_s, now_s)

    def sweep(self, now_s: float, is_lost: Callable[[bytes], bool]) -> None:
        for member in self.all():
            if is_lost(member.address):
                self.remove(member, f"node {member.name!r} died or closed")
            elif now_s - member.heard_s > self.lease_s:
                self.remove(member, f"node {member.name!r} was not heard from for {self.lease_s:g} s")
            else:
                member.rivals = {rival: heard for rival, heard in member.rivals.items() if not is_lost(rival)}
