"""Who takes part: what an AllToAll needs of them before it has anything of its own, which is to exchange a few
bytes.
"""

from __future__ import annotations

import hashlib
import struct
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import crossrail as xr
from crossrail._closing import Closing
from crossrail._extras import needs
from crossrail.errors import CrossrailError, UsageError, WaitTimeout

if TYPE_CHECKING:
    import torch.distributed

_MAGIC = b"xrm3"
# magic, whose group, which of theirs, number of the exchange, rank of the sender, part, parts
_HEADER = struct.Struct("<4s8sIIIII")
_PART_BYTES = 16 << 10
_BUFFERS = 64
_LOOK_EVERY_S = 0.05
_EARLY_MAX = 256  # of an engine; the oldest are given up

# Packets of groups that an engine has not made yet: ranks that make another one, without one that died, say, or with
# the same ranks, do so one after another, and who is not there yet still has the pool of the group before.
_early: weakref.WeakKeyDictionary[xr.Engine, deque[tuple[xr.Address, bytes]]] = weakref.WeakKeyDictionary()
# Groups of the same ranks that an engine has had: the number of the last one, by name.
_numbers: weakref.WeakKeyDictionary[xr.Engine, dict[bytes, int]] = weakref.WeakKeyDictionary()


class Group(Protocol):
    """Ranks 0 .. size - 1, each a process (or an engine) of its own. Threads: one at a time."""

    @property
    def rank(self) -> int:
        """Our own."""

    @property
    def size(self) -> int:
        """How many there are."""

    def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        """What each rank gave, by rank; every rank calls it, in the same order of calls. Raises WaitTimeout."""


class EngineGroup(Closing):
    """Ranks that know each other's engines: by the messages of these. It opens the engine's receive pool; close() it.

    addresses: of all ranks, by rank, the engine's own among them.

    Groups of the same ranks are numbered, so that none takes what is for the next. Where a rank gave up, and made
    another one, the numbers of ranks differ: who waits in his first exchange goes on with the highest, who is further
    is told by CrossrailError, and meets the others when he begins anew, with this group or with another.
    """

    def __init__(self, engine: xr.Engine, addresses: Sequence[xr.Address | bytes]) -> None:
        self._addresses = [xr.Address.from_bytes(a) if isinstance(a, bytes) else a for a in addresses]
        own = [rank for rank, address in enumerate(self._addresses) if address == engine.address]
        if len(own) != 1:
            raise UsageError(
                f"addresses has engine {engine.name!r} {len(own)} times among {len(self._addresses)}, must have it once"
            )
        self.rank = own[0]
        self.size = len(self._addresses)
        self._engine = engine
        self._name = hashlib.blake2b(b"".join(map(bytes, self._addresses)), digest_size=8).digest()
        self._pool = engine.submit_recvs(_BUFFERS, _HEADER.size + _PART_BYTES)
        numbers = _numbers.setdefault(engine, {})
        self._number = numbers[self._name] = numbers.get(self._name, 0) + 1
        self._exchange = 0
        self._ahead: dict[int, int] = {}  # by rank: the number of a later group that it has made
        # Ranks run ahead of each other: by exchange, rank and part.
        self._arrived: dict[tuple[int, int], dict[int, bytes]] = {}
        self._parts: dict[tuple[int, int], int] = {}
        try:
            self._take_early()
        except BaseException:
            self._pool.close()
            raise

    def __repr__(self) -> str:
        return f"<EngineGroup, rank {self.rank} of {self.size}>"

    def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        """As of Group: a message to each of the others."""
        deadline_at_s = time.monotonic() + timeout_s
        exchange, self._exchange = self._exchange, self._exchange + 1
        others = [rank for rank in range(self.size) if rank != self.rank]
        sent = self._send(others, exchange, data)
        # First what comes: everybody's buffers would fill if all waited for their own to be taken.
        while missing := [rank for rank in others if not self._is_whole(exchange, rank)]:
            if self._take(missing, max(deadline_at_s - time.monotonic(), 0.0), timeout_s):
                continue
            # Whoever has made a later group, and owes us something in this one, has given this one up.
            gone = max(missing, key=lambda rank: self._ahead.get(rank, 0))
            if gone in self._ahead:
                self._begin_anew(self._ahead[gone])
                if exchange > 0:
                    raise CrossrailError(
                        f"rank {gone} ({self._addresses[gone].name!r}) gave up and started again. Next: do so "
                        "on all ranks"
                    )
                self._exchange = 1
                sent += self._send(others, exchange, data)
        for rank, transfer in sent:
            try:
                transfer.wait(max(deadline_at_s - time.monotonic(), 0.0))
            except WaitTimeout:
                transfer.cancel()
                raise WaitTimeout(
                    f"rank {rank} ({self._addresses[rank].name!r}) takes no messages: is it there?"
                ) from None
        gathered = {rank: self._whole(exchange, rank) for rank in others} | {self.rank: data}
        return [gathered[rank] for rank in range(self.size)]

    def close(self) -> None:
        """Stops receiving. Idempotent; before the engine."""
        if self._pool.closed:
            return
        self._pool.close()
        for message in [] if self._engine.closed else self._pool.poll(_BUFFERS):
            data = bytes(message.data)
            if _is_packet(data) and (not self._is_ours(data) or _HEADER.unpack_from(data)[2] > self._number):
                self._keep_early(message.peer, data)

    def _send(self, others: Sequence[int], exchange: int, data: bytes) -> list[tuple[int, xr.Transfer]]:
        packets = self._packets(exchange, data)
        return [(rank, self._engine.submit_send(self._addresses[rank], one)) for rank in others for one in packets]

    def _begin_anew(self, number: int) -> None:
        """Goes on as the group of that number, at its first exchange."""
        self._number = _numbers[self._engine][self._name] = number
        self._exchange = 0
        self._ahead.clear()
        self._arrived.clear()
        self._parts.clear()
        self._take_early()

    def _packets(self, exchange: int, data: bytes) -> list[bytes]:
        parts = max(1, -(-len(data) // _PART_BYTES))
        return [
            _HEADER.pack(_MAGIC, self._name, self._number, exchange, self.rank, part, parts)
            + data[part * _PART_BYTES : (part + 1) * _PART_BYTES]
            for part in range(parts)
        ]

    def _take(self, missing: Sequence[int], patience_s: float, timeout_s: float) -> bool:
        """One message; False: none came, and those that are missing still live."""
        try:
            message = self._pool.recv(min(patience_s, _LOOK_EVERY_S))
        except WaitTimeout:
            for rank in missing:
                if self._engine.peer_state(self._addresses[rank]) == "lost":
                    name = self._addresses[rank].name
                    raise xr.PeerLost(f"rank {rank} ({name!r}) was lost", op="all_gather", peer=name) from None
            if patience_s <= 0:
                raise WaitTimeout(f"nothing arrived from ranks {list(missing)} within {timeout_s:g} s") from None
            return False
        data = bytes(message.data)
        if not _is_packet(data):
            raise UsageError(f"a message of {message.peer.name!r} is not of a group: it sends to the wrong engine")
        if self._is_ours(data):
            self._accept(message.peer, data)
            return True
        self._keep_early(message.peer, data)
        if message.peer in [self._addresses[rank] for rank in missing]:
            raise UsageError(
                f"{message.peer.name!r} is in another group now: it was given other addresses than we were"
            )
        return True

    def _is_ours(self, packet: bytes) -> bool:
        return bool(_HEADER.unpack_from(packet)[1] == self._name)

    def _keep_early(self, peer: xr.Address, data: bytes) -> None:
        _early.setdefault(self._engine, deque(maxlen=_EARLY_MAX)).append((peer, data))

    def _take_early(self) -> None:
        kept = _early.pop(self._engine, ())
        for peer, data in kept:
            if self._is_ours(data):
                self._accept(peer, data)
            else:
                self._keep_early(peer, data)

    def _accept(self, peer: xr.Address, data: bytes) -> None:
        _, _, number, exchange, rank, part, parts = _HEADER.unpack_from(data)
        if rank >= self.size or peer != self._addresses[rank] or not part < parts:
            raise UsageError(f"{peer.name!r} says it is rank {rank}: it was given other addresses than we were")
        if number > self._number:
            self._ahead[rank] = max(number, self._ahead.get(rank, 0))
            self._keep_early(peer, data)
        elif number == self._number:  # else of one that was given up
            self._arrived.setdefault((exchange, rank), {})[part] = data[_HEADER.size :]
            self._parts[exchange, rank] = parts

    def _is_whole(self, exchange: int, rank: int) -> bool:
        return len(self._arrived.get((exchange, rank), ())) == self._parts.get((exchange, rank), -1)

    def _whole(self, exchange: int, rank: int) -> bytes:
        parts = self._arrived.pop((exchange, rank))
        return b"".join(parts[part] for part in range(self._parts.pop((exchange, rank))))


def _is_packet(data: bytes) -> bool:
    return len(data) >= _HEADER.size and data[:4] == _MAGIC


class TorchGroup:
    """The ranks of a torch.distributed process group, or of the default one. Its own timeout holds, not
    all_gather's.
    """

    def __init__(self, process_group: torch.distributed.ProcessGroup | None = None) -> None:
        with needs("TorchGroup", "'crossrail[torch]'"):
            import torch.distributed

        self._distributed: Any = torch.distributed
        self._group = process_group
        self.rank: int = self._distributed.get_rank(process_group)
        self.size: int = self._distributed.get_world_size(process_group)

    def __repr__(self) -> str:
        return f"<TorchGroup, rank {self.rank} of {self.size}>"

    def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        """As of Group, by torch.distributed, whose own timeout holds."""
        gathered: list[Any] = [None] * self.size
        self._distributed.all_gather_object(gathered, data, group=self._group)
        return gathered
