"""Cluster membership kept in etcd, the same for all routers.

A node puts its record into etcd under a lease and keeps the lease alive; routers consider it a member as long as the
record exists. Routers register too, so nodes find them without a URL as they come and go. Nodes and routers exchange
the same messages as without etcd, above all the node's load; only what silence means is decided by etcd first. A router
that nevertheless hears nothing from a member is cut off from it, and does without it until it hears from it again.

While etcd is unavailable everything stays as it is: nobody joins, and no member that is heard from is removed.
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
from crossrail.kv.nodes.node import Node
from crossrail.kv.nodes.router_link import FindRouter, RouterLink
from crossrail.kv.refusal import Refuse
from crossrail.kv.router.membership import Roster

log = logging.getLogger("crossrail.kv")

# Of a router: by then etcd knows which nodes died or froze, so one that is still silent is cut off from this router.
_SILENT_LEASES = 2
_SILENT_REPORTS = 3  # so that two may be late
# A router of that name may return and ask for the requests that it began; after that it is forgotten.
_ROUTER_GONE_S = 60.0
_record_encoder = msgspec.msgpack.Encoder()
_record_decoder = msgspec.msgpack.Decoder(NodeRecord)


class NotRegistered(CrossrailError):
    """etcd does not know this node, or not yet."""


class _Untaken:
    """Logs records that are rejected, once each: etcd lists all of them every half minute."""

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
        """Called when the record is gone, or was replaced by an accepted one."""
        self._values.pop(name, None)


class EtcdRoster(Roster):
    """The members with a record in etcd. Threads: the event loop's.

    lease_s: of this router's own record; also how long a record may be missing after an outage of etcd, because its
    owner may not have noticed yet that it has to write it again. heartbeat_s: how often members report, as the router
    tells them.

    Invariant: a member's record is in `_records`; in etcd it may be missing for lease_s. Every node with a record is a
    member, unless it died, left, does not match the others, or was silent for long; then it becomes one again when it
    joins, or has another record.
    """

    def __init__(self, lease_s: float, place: Place, secret: bytes, heartbeat_s: float) -> None:
        super().__init__(lease_s)
        self._silent_s = max(_SILENT_LEASES * lease_s, _SILENT_REPORTS * heartbeat_s)
        self._place = place
        self._seal = Seal(secret)
        self._records: dict[str, NodeRecord] = {}
        self._missing_s: dict[str, float] = {}  # by name: since when, on the loop's clock
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

    def excuse(self, frozen_s: float, now_s: float) -> None:
        super().excuse(frozen_s, now_s)
        for name, since_s in self._missing_s.items():
            self._missing_s[name] = min(since_s + frozen_s, now_s)

    def sweep(self, now_s: float, is_lost: Callable[[bytes], bool]) -> None:
        for name, since_s in list(self._missing_s.items()):
            if now_s - since_s > self.lease_s:
                self._forget(name, f"node {name!r} is not in etcd any more")
        for member in self.all():
            if is_lost(member.address):
                self.remove(member, f"node {member.name!r} died or closed")
            elif (silent_s := now_s - member.heard_s) > self._silent_s:
                self.remove(
                    member, f"node {member.name!r} is in etcd, but was not heard from here for {silent_s:.1f} s"
                )

    # --- changes in etcd ---

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
            # Until it reports its load, assume that it has no work and accepts none.
            super().join(record, Load(draining=True), loop_time_s())
        except Exception as error:  # one bad record must not stop us from following the others
            self._untaken.tell(name, value, error)


class EtcdPresence:
    """A node's record in etcd, and its links with all routers registered there. Threads: the event loop's.

    Lifecycle: 1. made, in a running loop. 2. start(), after the node's. 3. close(), after the node's. If another
    process takes the node's name, the node's `refused` says so.
    """

    def __init__(self, node: Node, place: Place, secret: bytes) -> None:
        self._node = node
        self._place = place
        self._seal = Seal(secret)
        self._routers: dict[str, bytes] = {}
        self._links: dict[str, RouterLink] = {}
        self._gone_s: dict[str, float] = {}  # by router that we have a link with: since when it is missing in etcd
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
        """Deletes the record from etcd, so that routers notice at once that the node is gone. Idempotent."""
        await self.registration.end()

    def _on_all(self, found: Mapping[str, bytes]) -> None:
        for name in self._routers.keys() - found.keys():
            del self._routers[name]
        for name, value in found.items():
            self._on_change(name, value)
        self._unlink()
        self._tell_if_alone()

    def _tell_if_alone(self) -> None:
        """Logs that no router is registered, once, and when that is over: the cluster's name may be wrong."""
        if self._misses_routers == bool(self._links):
            self._misses_routers = not self._links
            state = "has no router yet, and waits for one" if self._misses_routers else "has a router now"
            log.warning("node %s: etcd %s: below %s", self._node.name, state, self._place.routers)

    def _unlink(self) -> None:
        """Drops links with routers that do not return: with a new name at each restart, we would look for old ones for
        ever.
        """
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
        except Exception as error:  # as above
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
