"""What routers and nodes keep in etcd: a sealed record each, under a lease, below a prefix of the cluster's.

    /crossrail/kv/CLUSTER/nodes/NAME      the NodeRecord of the node that has this name
    /crossrail/kv/CLUSTER/routers/NAME    the address of the router's engine

Who can write to etcd cannot make anybody believe in a node: records carry an HMAC under the cluster's secret, over
their key too. Loads are not here: nodes tell them to routers, several times a second if need be; etcd is spared that.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from crossrail.control.deadlines import loop_time_s
from crossrail.errors import UsageError
from crossrail.kv.errors import Superseded
from crossrail.kv.etcd.client import Etcd, EtcdError

log = logging.getLogger("crossrail.kv")

_MAC_BYTES = 32
_RETRY_S = 0.5
_LIST_EVERY_S = 30.0  # whatever a watch may have missed is seen by then
_LOOK_EVERY_S = 30.0  # that our own record is gone is seen by then
_ALIVE_PER_LEASE = 3  # so that two may be lost
_ASKED_PER_LEASE = 4  # members: two of them may be silent, and the third still keeps the lease alive
_ASK_S_MAX = 3.0
_LEASE_LATE_S = 2.0  # etcd rounds what is left of a lease down to seconds, and ends it up to half of one late


@dataclass(frozen=True)
class Place:
    """Where a cluster's records are. Made from "etcd://HOST:PORT,HOST:PORT/CLUSTER"; the cluster is "default"."""

    endpoints: tuple[str, ...]
    cluster: str

    @classmethod
    def from_url(cls, url: str) -> Place:
        parts = urlsplit(url)
        endpoints = tuple(parts.netloc.split(","))
        cluster = parts.path.strip("/") or "default"
        ports = [endpoint.rpartition(":")[2] for endpoint in endpoints]
        if parts.scheme != "etcd" or not all(port.isdigit() for port in ports) or "/" in cluster or parts.query:
            raise UsageError(f"membership {url!r} must be etcd://HOST:PORT,HOST:PORT/CLUSTER")
        return cls(endpoints, cluster)

    def open(self, lease_s: float) -> Etcd:
        """A client of it for who has such a lease."""
        return Etcd(self.endpoints, min(lease_s / _ASKED_PER_LEASE, _ASK_S_MAX))

    @property
    def nodes(self) -> str:
        return f"/crossrail/kv/{self.cluster}/nodes/"

    @property
    def routers(self) -> str:
        return f"/crossrail/kv/{self.cluster}/routers/"


class Seal:
    """Puts an HMAC before what is written, and takes it off what is read."""

    def __init__(self, secret: bytes) -> None:
        self._key = hmac.digest(secret, b"crossrail kv etcd", "sha256")

    def close(self, key: str, data: bytes) -> bytes:
        return self._mac(key, data) + data

    def open(self, key: str, value: bytes) -> bytes:
        """UsageError for what nobody with our secret has written under this key."""
        mac, data = value[:_MAC_BYTES], value[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(key, data)):
            raise UsageError(f"what etcd has under {key!r} is sealed with another secret, or not at all")
        return data

    def _mac(self, key: str, data: bytes) -> bytes:
        name = key.encode()
        return hmac.new(self._key, len(name).to_bytes(4, "little") + name + data, hashlib.sha256).digest()


class _Absence:
    """Tells that etcd is away, once for each reason: it may be for days. And that it is back."""

    def __init__(self, subject: str, state: str) -> None:
        self._subject = subject
        self._state = state
        self._told = ""

    def tell(self, error: EtcdError) -> None:
        if str(error) != self._told:
            self._told = str(error)
            log.warning("%s is not %s, and is tried again: %s", self._subject, self._state, error)

    def end(self) -> None:
        if self._told:
            self._told = ""
            log.warning("%s is %s again: etcd answers", self._subject, self._state)


class Registration:
    """Keeps a record in etcd for as long as run() runs. Threads: the event loop's.

    Whoever has the name keeps it: the first time it is waited whether that one's lease ends, as a dead one's does. When
    ours is lost later - we stood still, or etcd lost it - the record comes back under a new one, unless somebody else
    has the name by then. So does a record that somebody removed although its lease lives: that is looked for about
    every half minute, or, where a third of the lease is longer, as often as the lease is kept alive. While etcd does
    not answer it tries on.
    there: set while the record is in etcd, as far as we know. lease: its lease then.
    """

    def __init__(self, etcd: Etcd, key: str, value: bytes, lease_s: float) -> None:
        self._etcd = etcd
        self._key = key
        self._value = value
        self._lease_s = lease_s
        self.lease: int | None = None
        self._was_there = False
        self.there = asyncio.Event()

    async def run(self) -> None:
        """Runs until it is cancelled. Raises Superseded."""
        absence = _Absence(self._key, "kept alive")
        seen_s = 0.0
        while True:
            try:
                if self.lease is None:
                    await self._write()
                    seen_s = loop_time_s()
                    absence.end()
                await asyncio.sleep(self._lease_s / _ALIVE_PER_LEASE)
                assert self.lease is not None
                if not await self._etcd.keep_alive(self.lease):
                    log.warning("the lease of %s has ended; it is registered again", self._key)
                    self._forget_lease()
                elif loop_time_s() - seen_s > _LOOK_EVERY_S:
                    if not await self._etcd.has(self._key, self._value, self.lease):
                        log.warning("%s was removed from etcd, or replaced; it is registered again", self._key)
                        self._forget_lease()
                    seen_s = loop_time_s()
                absence.end()
            except EtcdError as error:
                absence.tell(error)
                await asyncio.sleep(_RETRY_S)

    async def end(self) -> None:
        """Removes the record and closes the client, once run() was cancelled. Idempotent.

        When etcd does not answer, the record goes with its lease.
        """
        if self.lease is not None:
            lease = self.lease
            self._forget_lease()
            try:
                await self._etcd.revoke(lease)
            except EtcdError as error:
                log.info("%s stays until its lease ends: %s", self._key, error)
        await self._etcd.close()

    async def _write(self) -> None:
        if not await self._put() and (self._was_there or not await self._outlive()):
            raise Superseded(f"another process has {self._key} in etcd, and keeps it. Next: give this one another name")
        self._was_there = True
        self.there.set()

    async def _put(self) -> bool:
        lease = await self._etcd.grant(self._lease_s)
        if await self._etcd.put_if_ours(self._key, self._value, lease):
            self.lease = lease
            return True
        await self._etcd.revoke(lease)
        return False

    async def _outlive(self) -> bool:
        """Waits for the lease of whoever has the name to end. False: it is kept alive."""
        give_up_s = loop_time_s() + await self._etcd.left_s(self._key) + _LEASE_LATE_S
        log.warning("another process has %s in etcd: waiting to see whether it lives", self._key)
        while loop_time_s() < give_up_s:
            await asyncio.sleep(_RETRY_S)
            if await self._put():
                return True
        return False

    def _forget_lease(self) -> None:
        self.lease = None
        self.there.clear()


async def follow(
    etcd: Etcd,
    prefix: str,
    on_all: Callable[[Mapping[str, bytes]], None],
    on_change: Callable[[str, bytes | None], None],
) -> None:
    """Tells what is below a prefix, and then each change of it, until cancelled. Keys come without the prefix.

    on_all comes at the beginning, after each time that etcd was away, and every half minute: it has all there is.
    etcd: a client that a Registration uses too; by that it is noticed when the member that is watched falls silent.
    """
    absence = _Absence(f"what is below {prefix}", "known")
    while True:
        try:
            found, revision = await etcd.list(prefix)
            absence.end()
            on_all({key.removeprefix(prefix): value for key, value in found.items()})
            async for change in etcd.watch(prefix, revision, _LIST_EVERY_S):
                on_change(change.key.removeprefix(prefix), change.value)
        except EtcdError as error:
            absence.tell(error)
            await asyncio.sleep(_RETRY_S)
