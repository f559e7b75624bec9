"""What routers and nodes keep in etcd: a sealed record each, under a lease, below a prefix of the cluster's.

    /crossrail/kv/CLUSTER/nodes/NAME      the NodeRecord of the node that has this name
    /crossrail/kv/CLUSTER/routers/NAME    the address of the router's engine

Nobody can make routers believe in a node merely by writing to etcd: each record carries an HMAC under the cluster's
secret, which covers its key too. Loads are not kept here: nodes send them to routers, up to several times a second,
which would be too much for etcd.
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
_LIST_EVERY_S = 30.0  # by then whatever a watch has missed is noticed
_LOOK_EVERY_S = 30.0  # by then the loss of our own record is noticed
_ALIVE_PER_LEASE = 3  # so that two may be lost
_ASKED_PER_LEASE = 4  # members asked per lease: two may be silent, and the third still renews the lease in time
_ASK_S_MAX = 3.0
_LEASE_LATE_S = 2.0  # etcd rounds a lease's remaining time down to seconds, and expires it up to half a second late


@dataclass(frozen=True)
class Place:
    """Where a cluster's records are. Parsed from "etcd://HOST:PORT,HOST:PORT/CLUSTER"; the default cluster is
    "default".
    """

    endpoints: tuple[str, ...]
    cluster: str

    @classmethod
    def from_url(cls, url: str) -> Place:
        try:
            parts = urlsplit(url)
            endpoints, cluster = tuple(parts.netloc.split(",")), parts.path.strip("/") or "default"
            members = [urlsplit(f"//{endpoint}") for endpoint in endpoints]
            is_whole = parts.scheme == "etcd" and all(member.hostname and member.port for member in members)
            is_whole = is_whole and not ("/" in cluster or parts.query or parts.fragment)
        except ValueError:  # no port number, or half an IPv6 address
            is_whole = False
        if not is_whole:
            raise UsageError(f"membership {url!r} must be etcd://HOST:PORT,HOST:PORT/CLUSTER")
        return cls(endpoints, cluster)

    def open(self, lease_s: float) -> Etcd:
        """A client for it, with timeouts that suit such a lease."""
        return Etcd(self.endpoints, min(lease_s / _ASKED_PER_LEASE, _ASK_S_MAX))

    @property
    def nodes(self) -> str:
        return f"/crossrail/kv/{self.cluster}/nodes/"

    @property
    def routers(self) -> str:
        return f"/crossrail/kv/{self.cluster}/routers/"


class Seal:
    """Prepends an HMAC to what is written, and checks and removes it when reading."""

    def __init__(self, secret: bytes) -> None:
        self._key = hmac.digest(secret, b"crossrail kv etcd", "sha256")

    def close(self, key: str, data: bytes) -> bytes:
        return self._mac(key, data) + data

    def open(self, key: str, value: bytes) -> bytes:
        """UsageError unless the value was written under this key by somebody with our secret."""
        mac, data = value[:_MAC_BYTES], value[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(key, data)):
            raise UsageError(f"what etcd has under {key!r} is sealed with another secret, or not at all")
        return data

    def _mac(self, key: str, data: bytes) -> bytes:
        name = key.encode()
        return hmac.new(self._key, len(name).to_bytes(4, "little") + name + data, hashlib.sha256).digest()


class _Absence:
    """Logs that etcd is unavailable, once per reason, since it may last for days; and that it is back."""

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

    The first holder of a name keeps it: initially we wait for that holder's lease to expire, as a dead one's does. If
    our record is lost later - we froze, or etcd lost it - we write it again under a new lease, unless somebody else has
    taken the name by then. The same if somebody deleted the record while its lease is alive: this is checked about
    every half minute, or at each keep-alive if a third of the lease is longer than that. While etcd does not answer we
    keep trying.

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
        """Deletes the record and closes the client, after run() was cancelled. Idempotent.

        If etcd does not answer, the record expires with its lease.
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
        """Waits for the lease of the name's present holder to expire. False: it is being kept alive."""
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
    """Reports the keys below a prefix, and then each change, until cancelled. Keys come without the prefix.

    on_all comes first, after each outage of etcd, and every half minute, with all there is. etcd: a client that a
    Registration uses too: its requests reveal that the watched member has fallen silent.
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
