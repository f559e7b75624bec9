"""Membership of a cluster kept in etcd, the same for all routers.

A node puts its record there under a lease and keeps that alive; a router takes it for a member as long as the record is
there. Routers are there too, so nodes find them without a URL, whichever come and go. What travels between a node and a
router is the same as without etcd, the node's load first of all; only what silence means is etcd's to say
first. A router that nevertheless hears nothing of a member is cut off from it, and does without it until it does.

While etcd is away everything stays as it is: nobody joins, and nobody is missed who is heard of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import msgspec

from crossrail.control.deadlines import loop_time_s
from crossrail.control.mailbox import Mailbox
from crossrail.errors import CrossrailError
from crossrail.kv.errors import RouterNotFound, Superseded
from crossrail.kv.etcd.records import Place, Registration, Seal, follow
from crossrail.kv.messages import Load, NodeRecord
from crossrail.kv.services.membership import Refuse, Roster
from crossrail.kv.services.node import FindRouter, Node, RouterLink

log = logging.getLogger("crossrail.kv")

_SILENT_LEASES = 2  # of a router: by then etcd knows who died or stands still, and who is silent is cut off from here
_SILENT_REPORTS = 3  # so that two may be late
_ROUTER_GONE_S = 60.0  # one of its name may come back, and ask for what it had begun; then it is forgotten
_record_encoder = msgspec.msgpack.Encoder()
_record_decoder = msgspec.msgpack.Decoder(NodeRecord)


class NotRegistered(CrossrailError):
    """etcd does not know this node, or not yet."""


class _Untaken:
    """Tells of records that are not taken, once for each: etcd shows all that is there every half minute."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._values: dict[str, bytes] = {}

    def tell(self, name: str, value: bytes, error: Exception) -> None:
        if self._values.get(name) != value:
            self._values[name] = value
            is_foreseen = isinstance(error, (CrossrailError, msgspec.MsgspecError))
            trace = None if is_foreseen else error
            log.warning("etcd's record of %s %r is not taken: %s", self._what, name, error, exc_info=trace)

    def forget(self, name: str) -> None:
        """The record is gone, or was replaced by one that is taken."""
        self._values.pop(name, None)


class EtcdRoster(Roster):
    """The members that etcd has records of. Threads: the event loop's.

    lease_s: of this router's own record, and how long a record may be missing after etcd was away: its owner may not
    have noticed yet that it has to be written again. heartbeat_s: how often members report, as the router tells them.
    Invariant: a member's record is in `_records`; in etcd it may be missing for lease_s. Who has a record is a member,
    unless he died or left, does not fit the others, or was silent for long: then he is one again when he joins, or has
    another record.
    """

    def __init__(self, lease_s: float, place: Place, secret: bytes, heartbeat_s: float) -> None:
        super().__init__(lease_s)
        self._silent_s = max(_SILENT_LEASES * lease_s, _SILENT_REPORTS * heartbeat_s)
        self._place = place
        self._seal = Seal(secret)
        self._records: dict[str, NodeRecord] = {}
        self._missing_s: dict[str, float] = {}  # by name, since when on the loop's clock
        self._untaken = _Untaken("node")
        self.registration: Registration | None = None

    def start(self, router: str, mailbox: Mailbox, refuse: Refuse) -> None:
        etcd, key = self._place.open(self.lease_s), self._place.routers + router
        self.registration = Registration(etcd, key, self._seal.close(key, mailbox.address), self.lease_s)
        mailbox.spawn(_keep(self.registration, refuse), "registration in etcd")
        mailbox.spawn(follow(etcd, self._place.nodes, self._on_all, self._on_change), "following nodes in etcd")

    async def close(self) -> None:
        if self.registration is not None:
            await self.registration.end()

    def join(self, record: NodeRecord, load: Load, now_s: float) -> None:
        known = self._records.get(record.node)
        if known is None or known.address != record.address:
            raise NotRegistered(f"etcd has no record of this incarnation of node {record.node!r}")
        super().join(record, load, now_s)

    def excuse(self, stood_s: float, now_s: float) -> None:
        super().excuse(stood_s, now_s)
        for name, since_s in self._missing_s.items():
            self._missing_s[name] = min(since_s + stood_s, now_s)

    def sweep(self, now_s: float, is_lost: Callable[[bytes], bool]) -> None:
        for name, since_s in list(self._missing_s.items()):
            if now_s - since_s > self.lease_s:
                self._forget(name, f"node {name!r} is not in etcd any more")
        for member in self.all():
            if is_lost(member.address):
                self.remove(member, f"node {member.name!r} died or closed")
            elif (silent_s := now_s - member.heard_s) > self._silent_s:
                self.remove(member, f"node {member.name!r} is in etcd, but was not heard of here for {silent_s:.1f} s")

    # --- what etcd says ---

    def _on_all(self, found: Mapping[str, bytes]) -> None:
        now_s = loop_time_s()
        for name in self._records.keys() - found.keys():
            self._missing_s.setdefault(name, now_s)
        for name, value in found.items():
            self._put(name, value)

    def _on_change(self, name: str, value: bytes | None) -> None:
        if value is not None:
            self._put(name, value)
        else:
            self._untaken.forget(name)
            self._forget(name, f"node {name!r} left, or its lease in etcd has ended")

    def _forget(self, name: str, why: str) -> None:
        self._records.pop(name, None)
        self._missing_s.pop(name, None)
        for member in self.all():
            if member.name == name:
                self.remove(member, why)

    def _put(self, name: str, value: bytes) -> None:
        try:
            record = _record_decoder.decode(self._seal.open(self._place.nodes + name, value))
            self._missing_s.pop(name, None)
            self._untaken.forget(name)
            known = self._records.get(name)
            if known == record:
                return
            if known is not None and known.address != record.address:
                self._forget(name, f"another process has the name of node {name!r} in etcd")
            self._records[name] = record
            # Until it says so itself it has nothing to do, and no room for more either.
            super().join(record, Load(draining=True), loop_time_s())
        except Exception as error:  # whatever is wrong with it, the others are followed
            self._untaken.tell(name, value, error)


class EtcdPresence:
    """A node's record in etcd, and its links with all routers there. Threads: the event loop's.

    Lifecycle: 1. made, in a running loop. 2. start(), after the node's. 3. close(), after the node's.
    When another process takes the node's name, that is the node's `refused`.
    """

    def __init__(self, node: Node, place: Place, secret: bytes) -> None:
        self._node = node
        self._place = place
        self._seal = Seal(secret)
        self._routers: dict[str, bytes] = {}
        self._links: dict[str, RouterLink] = {}
        self._gone_s: dict[str, float] = {}  # by router that we have a link with: since when it is not there
        self._untaken = _Untaken("router")
        self._misses_routers = False
        self._etcd = place.open(node.options.lease_s)
        key = place.nodes + node.name
        value = self._seal.close(key, _record_encoder.encode(node.record))
        self.registration = Registration(self._etcd, key, value, node.options.lease_s)

    def start(self) -> None:
        spawn = self._node.mailbox.spawn
        spawn(_keep(self.registration, self._node.refuse), "registration in etcd")
        spawn(follow(self._etcd, self._place.routers, self._on_all, self._on_change), "following routers in etcd")

    async def close(self) -> None:
        """Takes the record out of etcd: routers see at once that the node is gone. Idempotent."""
        await self.registration.end()

    def _on_all(self, found: Mapping[str, bytes]) -> None:
        for name in self._routers.keys() - found.keys():
            del self._routers[name]
        for name, value in found.items():
            self._on_change(name, value)
        self._unlink()
        self._tell_if_alone()

    def _tell_if_alone(self) -> None:
        """Nobody else would: it may be a cluster that does not exist. Once, and when it is over."""
        if self._misses_routers == bool(self._links):
            self._misses_routers = not self._links
            state = "has no router yet, and waits for one" if self._misses_routers else "has a router now"
            log.warning("node %s: etcd %s: below %s", self._node.name, state, self._place.routers)

    def _unlink(self) -> None:
        """From routers that do not come back: where each has a new name they would be looked for for ever."""
        now_s = loop_time_s()
        gone = self._links.keys() - self._routers.keys()
        self._gone_s = {name: self._gone_s.get(name, now_s) for name in gone}
        for name, since_s in self._gone_s.items():
            if now_s - since_s > _ROUTER_GONE_S and self._node.drop_link(self._links[name]):
                del self._links[name]

    def _on_change(self, name: str, value: bytes | None) -> None:
        if value is None:
            self._routers.pop(name, None)
            self._untaken.forget(name)
            return
        try:
            self._routers[name] = self._seal.open(self._place.routers + name, value)
        except Exception as error:  # as there
            self._untaken.tell(name, value, error)
            return
        self._untaken.forget(name)
        if name not in self._links:
            self._links[name] = self._node.add_link(self._find(name), name)
            self._tell_if_alone()

    def _find(self, name: str) -> FindRouter:
        async def find() -> bytes:
            if name not in self._routers:
                raise RouterNotFound(f"etcd has no router {name!r} now")
            return self._routers[name]

        return find


async def _keep(registration: Registration, refuse: Refuse) -> None:
    try:
        await registration.run()
    except Superseded as superseded:
        refuse(superseded)
