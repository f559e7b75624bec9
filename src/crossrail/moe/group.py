"""The ranks that take part, and the small exchanges among them before an AllToAll has any memory of its own."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import crossrail as xr
from crossrail._closing import Closing
from crossrail._extras import needs
from crossrail._options import check_seconds
from crossrail._raise import pool_closed
from crossrail.errors import CrossrailError, UsageError, WaitTimeout
from crossrail.moe.packets import (
    PACKET_BYTES_MAX,
    Call,
    Elsewhere,
    Failed,
    Kind,
    Packet,
    Stray,
    given,
    ids_of,
    name_of,
)

if TYPE_CHECKING:
    import torch.distributed

_BUFFERS = 64
_LOOK_EVERY_S = 0.05
_TELL_S = 0.5  # for those who wait to hear that a call has failed
_EARLY_MAX = 256  # of an engine; the oldest are given up

# Packets for groups that an engine has not made yet: ranks that make a new group, for example without one that died, do
# so one after another, and a rank that is not there yet still has the previous group's pool.
_early: weakref.WeakKeyDictionary[xr.Engine, deque[tuple[xr.Address, Packet]]] = weakref.WeakKeyDictionary()
# Groups of the same ranks that an engine has had: the number of the last one, by name.
_numbers: weakref.WeakKeyDictionary[xr.Engine, dict[bytes, int]] = weakref.WeakKeyDictionary()
# Calls of other groups because of which a call of this engine has failed: each fails one call only, not also the next
# if the stray rank has not been told yet.
_found: weakref.WeakKeyDictionary[xr.Engine, deque[Stray]] = weakref.WeakKeyDictionary()


class Group(Protocol):
    """Ranks 0 .. size - 1, each a process (or an engine) of its own. Threads: one at a time."""

    @property
    def rank(self) -> int:
        """Our own."""

    @property
    def size(self) -> int:
        """How many there are."""

    def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        """What each rank gave, by rank; every rank calls it, in the same order of calls. Raises WaitTimeout;
        UsageError for a timeout_s that is no time of 0 or more.
        """


def check_ranks(engine: object, group: object) -> None:
    """UsageError where these are no engine and no group, as when they are given the other way round."""
    if not isinstance(engine, xr.Engine):
        raise UsageError(f"engine is {type(engine).__name__}, must be an Engine")
    if missing := [name for name in ("rank", "size", "all_gather") if not hasattr(group, name)]:
        kind = type(group).__name__
        raise UsageError(f"group is {kind}, must be EngineGroup, TorchGroup or the like: it has no {missing[0]}")


@contextlib.contextmanager
def refusing_for_all(group: Group) -> Iterator[None]:
    """Around the look at a rank's own arguments, before the ranks meet: of what is refused, those who wait for it are
    told, so far as the group can do that without all of them.
    """
    try:
        yield
    except Exception as error:
        if isinstance(group, EngineGroup):
            with contextlib.suppress(CrossrailError):  # the engine is closed, say: the first error is the one to raise
                group.refuse(error)
        raise


class EngineGroup(Closing):
    """Ranks that know each other's engines: by the messages of these. It opens the engine's receive pool; close() it.

    addresses: of all ranks, by rank, the engine's own among them. One that the engine has given up is tried again, and
    so is one that it gives up in the first exchange, once: its link may be one of before, which has just been found to
    have ended at the other side.

    An exchange ends on a rank when it has heard of all others that they have what all gave: none takes what a rank gave
    that has given up since. Groups of the same addresses are numbered, and a rank whose exchange fails goes on with the
    next number, whether it calls again with this group or makes another one. Who waits in its first exchange goes on
    with the highest number; who is further is told by CrossrailError, and meets the others when it starts over, with
    this group or with another.

    Ranks that were given other addresses are told so, by UsageError that says who, and what was given there and here;
    the others of the group, too. What comes late of a group that a rank has left is left out.
    """

    def __init__(self, engine: xr.Engine, addresses: Sequence[xr.Address | bytes]) -> None:
        self._addresses = [_address(one) for one in addresses]
        own = [rank for rank, address in enumerate(self._addresses) if address == engine.address]
        if len(own) != 1:
            raise UsageError(
                f"addresses has engine {engine.name!r} {len(own)} times among {len(self._addresses)}, must have it once"
            )
        self.rank = own[0]
        self.size = len(self._addresses)
        self._engine = engine
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._name, self._ids = name_of(self._addresses), ids_of(self._addresses)
        self._linked: set[int] = set()  # ranks with a link of before this group, until that has ended
        self._numbers = _numbers.setdefault(engine, {})
        self._found = _found.setdefault(engine, deque(maxlen=_EARLY_MAX))
        self._said: list[Packet] = []  # in this call, to all others
        self._sent: list[tuple[int, xr.Transfer]] = []  # the same, to each
        self._tells: list[xr.Transfer] = []  # in this call, to those who wait elsewhere
        self._pool = engine.submit_recvs(_BUFFERS, PACKET_BYTES_MAX)
        try:
            self._forget_lost()
            self._start_over(self._numbers.get(self._name, 0) + 1)
        except BaseException:
            self._pool.close()
            raise

    def __repr__(self) -> str:
        return f"<EngineGroup, rank {self.rank} of {self.size}>"

    def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        """As of Group: a message to each of the others, and another one once all have come. After an error call it
        again, on all ranks. UsageError where ranks were given other addresses.
        """
        check_seconds(timeout_s=timeout_s)
        if self._pool.closed:
            raise pool_closed(self._engine)
        try:
            gathered = self._gather(data, time.monotonic() + timeout_s, timeout_s)
        except BaseException:
            # Our data is of no use to anybody any more: we will not confirm that we have everything.
            self._start_over(max([self._number + 1, *self._ahead.values()]))
            raise
        finally:
            self._cancel_sent()
        for heard in (self._strayed, self._elsewhere, self._failed):
            heard.clear()
        self._exchange += 1
        return gathered

    def refuse(self, error: BaseException) -> None:
        """Instead of the next exchange: those who wait for us there, or soon will, get a UsageError that says why we do
        not come. Returns once they have been told, after half a second at most.
        """
        if self._pool.closed:
            return
        name = self._addresses[self.rank].name
        why = f"rank {self.rank} ({name!r}) does not take part: {type(error).__name__}: {error}"
        failed = Failed(Stray(self._ids[self.rank], self._call), why)
        packet = Packet(Kind.FAILED, self._call, self.rank, 0, 1, failed.to_bytes()).to_bytes()
        self._wait_told([self._engine.submit_send(self._addresses[rank], packet) for rank in self._others], _TELL_S)
        self._start_over(self._number + 1)

    def close(self) -> None:
        """Stops receiving. Idempotent; before the engine."""
        if self._pool.closed:
            return
        self._pool.close()
        for message in [] if self._engine.closed else self._pool.poll(_BUFFERS):
            packet = Packet.from_bytes(bytes(message.data))
            if packet is not None and (packet.call.name != self._name or packet.call.number > self._number):
                self._keep_early(message.peer, packet)

    @property
    def _call(self) -> Call:
        return Call(self._name, self._number, self._exchange)

    def _gather(self, data: bytes, deadline_at_s: float, timeout_s: float) -> list[bytes]:
        self._send_all(given(self._call, self.rank, data))
        has_told = False
        # First what comes: everybody's buffers would fill if all waited for their own to be taken.
        while True:
            if not has_told and not self._silent():
                has_told = True
                self._send_all([Packet(Kind.HAS_ALL, self._call, self.rank, 0, 1, b"")])
            if not (missing := self._missing()):
                break
            left_s = deadline_at_s - time.monotonic()
            if self._take(max(left_s, 0.0)):
                continue
            for rank in missing:
                if self._is_lost(rank):
                    self._retry(rank)
            if self._goes_on_with_a_later_one(missing):
                self._send_all(given(self._call, self.rank, data))
                has_told = False
            else:
                self._check_is_in_this_group(missing, left_s)
                if left_s <= 0:
                    raise WaitTimeout(self._what_is_missing(missing, timeout_s))
        while self._sent:
            rank, transfer = self._sent[0]
            try:
                transfer.wait(max(deadline_at_s - time.monotonic(), 0.0))
                self._sent.pop(0)
            except xr.PeerLost as lost:
                self._retry(rank, lost)
            except WaitTimeout:
                raise WaitTimeout(
                    f"rank {rank} ({self._addresses[rank].name!r}) takes no messages: is it there?"
                ) from None
        self._have_all.pop(self._exchange, None)
        gathered = {rank: self._whole(rank) for rank in self._others} | {self.rank: data}
        return [gathered[rank] for rank in range(self.size)]

    # ---- what is sent

    def _send_all(self, packets: Sequence[Packet]) -> None:
        self._said += packets
        for rank in self._others:
            self._send(rank, packets)

    def _send(self, rank: int, packets: Sequence[Packet]) -> None:
        address = self._addresses[rank]
        self._sent += [(rank, self._engine.submit_send(address, packet.to_bytes())) for packet in packets]

    def _cancel_sent(self) -> None:
        """Cancels messages that have not left by now: their call has ended."""
        for transfer in (*(transfer for _, transfer in self._sent), *self._tells):
            transfer.cancel()
        self._said.clear()
        self._sent.clear()
        self._tells.clear()

    def _tell_elsewhere(self, rank: int, call: Call) -> None:
        """Tells a rank that gave something in that call of another group that we wait here, unless it knows. It leaves
        that out if it is not in that call any more.
        """
        if (rank, call) in self._told:
            return
        self._told.add((rank, call))
        names = tuple(address.name for address in self._addresses)
        said = Elsewhere(self._call, self._has_had(call), self._ids, names)
        packet = Packet(Kind.ELSEWHERE, call, self.rank, 0, 1, said.to_bytes())
        self._tells.append(self._engine.submit_send(self._addresses[rank], packet.to_bytes()))

    def _has_had(self, call: Call) -> bool:
        """Whether we were in that group before this one."""
        return call.name != self._name and self._numbers.get(call.name, 0) >= call.number

    # ---- what is missing

    def _goes_on_with_a_later_one(self, missing: Sequence[int]) -> bool:
        """Whether a rank that owes us something in this group has moved on to a later one, and so has given up this
        one.
        """
        gone = max(missing, key=lambda rank: self._ahead.get(rank, 0))
        if gone not in self._ahead:
            return False
        if self._exchange > 0:
            raise CrossrailError(
                f"rank {gone} ({self._addresses[gone].name!r}) gave up and started again. Next: do so on all ranks"
            )
        self._cancel_sent()
        self._start_over(self._ahead[gone])
        return True

    def _is_lost(self, rank: int) -> bool:
        return self._engine.peer_state(self._addresses[rank]) == "lost"

    def _forget_lost(self) -> None:
        """Gives lost ranks another try: they may have been frozen or cut off. Dead ones will be found dead again.

        Not before the engine's pool is ours: another group that has it may be about to notice that one of its ranks is
        lost.
        """
        for rank, address in enumerate(self._addresses):
            if self._is_lost(rank):
                self._engine.forget_peer(address)
            elif self._engine.peer_state(address) != "unknown":
                self._linked.add(rank)

    def _retry(self, rank: int, lost: xr.PeerLost | None = None) -> None:
        """Says to a rank that is lost all that it was to hear in this call. PeerLost, where that does not help any
        more. lost: of what was sent to it, if anything was.
        """
        name = self._addresses[rank].name
        if self._exchange > 0 or rank not in self._linked:
            note = self._engine.explain(self._addresses[rank]).note
            text = (
                f"rank {rank} ({name!r}) was lost: {note}. Next: see whether it runs, and whether this is its address"
            )
            raise xr.PeerLost(text, op="all_gather", peer=name, status="peer-lost", detail=note) from lost
        self._linked.remove(rank)
        self._engine.forget_peer(self._addresses[rank])
        self._sent = [one for one in self._sent if one[0] != rank]
        self._send(rank, self._said)

    def _check_is_in_this_group(self, missing: Sequence[int], left_s: float) -> None:
        """UsageError if a missing rank waits in another group, or another rank has found one that does. Its data
        elsewhere may be late packets of a group that it has left: so ask it, by telling it where we are.
        """
        for rank in missing:
            if rank in self._failed:
                stray, why = self._failed[rank]
                self._found.append(stray)
                raise UsageError(why)
            if rank in self._strayed:
                self._tell_elsewhere(rank, self._strayed[rank])
            said = self._elsewhere.get(rank)
            if said is None:
                continue
            self._tell_elsewhere(rank, said.call)
            stray = Stray(self._ids[rank], said.call)
            if not said.has_had and (self._has_had(said.call) or self._is_whole(rank) or stray in self._found):
                # It is behind, and is told so; or it has arrived since; or it has been told by now, and will come.
                continue
            self._found.append(stray)
            name = self._addresses[rank].name
            why = (
                f"{name!r} is in another group now: it was given other addresses than we were "
                f"({said.difference(self._addresses)}). Next: give all ranks the same addresses in the same order, "
                "and do this again on all of them"
            )
            self._tell_failed(rank, stray, f"rank {self.rank} found: {why}", left_s)
            raise UsageError(why)

    def _tell_failed(self, strayed: int, stray: Stray, why: str, left_s: float) -> None:
        """The others of the group. Waits a little: a rank that waits takes it at once."""
        packet = Packet(Kind.FAILED, self._call, self.rank, 0, 1, Failed(stray, why).to_bytes()).to_bytes()
        for rank in self._others:
            if rank != strayed:
                self._tells.append(self._engine.submit_send(self._addresses[rank], packet))
        self._wait_told(self._tells, min(_TELL_S, max(left_s, 0.0)))

    def _wait_told(self, tells: Sequence[xr.Transfer], timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        for transfer in tells:
            with contextlib.suppress(CrossrailError):  # it does not wait, or is gone: there is nobody to tell
                transfer.wait(max(until_s - time.monotonic(), 0.0))

    def _missing(self) -> list[int]:
        have_all = self._have_all.get(self._exchange, ())
        return [rank for rank in self._others if rank not in have_all or not self._is_whole(rank)]

    def _silent(self) -> list[int]:
        return [rank for rank in self._others if not self._is_whole(rank)]

    def _what_is_missing(self, missing: Sequence[int], timeout_s: float) -> str:
        if silent := self._silent():
            text = f"nothing arrived from ranks {silent} within {timeout_s:g} s"
        else:
            text = f"ranks {list(missing)} have not said within {timeout_s:g} s that they have what all gave"
        if strayed := [rank for rank in missing if rank in self._strayed]:
            text += (
                f". Ranks {strayed} gave something in another group. Next: see whether they were given the same "
                "addresses in the same order"
            )
        return text

    # ---- what comes

    def _start_over(self, number: int) -> None:
        """Goes on as the group of that number, at its first exchange."""
        self._number = self._numbers[self._name] = number
        self._exchange = 0
        self._ahead: dict[int, int] = {}  # by rank: the number of a later group that it has made
        # Ranks run ahead of each other: by exchange and rank, the parts, and how many there are.
        self._arrived: dict[tuple[int, int], dict[int, bytes]] = {}
        self._parts: dict[tuple[int, int], int] = {}
        self._have_all: dict[int, set[int]] = {}  # by exchange: the ranks that have everybody's data
        self._strayed: dict[int, Call] = {}  # by rank: the call of another group in which it gave something
        self._elsewhere: dict[int, Elsewhere] = {}  # by rank: what it says of where it waits
        self._failed: dict[int, Failed] = {}  # by rank: why its call has failed
        self._told: set[tuple[int, Call]] = set()
        kept = _early.pop(self._engine, ())
        for peer, packet in kept:
            if packet.call.name == self._name:
                self._accept(peer, packet)
            else:
                self._keep_early(peer, packet)

    def _take(self, patience_s: float) -> bool:
        """Takes one message; False if none came for a while."""
        try:
            message = self._pool.recv(min(patience_s, _LOOK_EVERY_S))
        except WaitTimeout:
            return False
        packet = Packet.from_bytes(bytes(message.data))
        if packet is None:
            raise UsageError(f"a message of {message.peer.name!r} is not of a group: it sends to the wrong engine")
        if packet.kind is Kind.ELSEWHERE:
            rank = self._rank_of(message.peer)
            if packet.call == self._call and rank is not None:
                self._elsewhere[rank] = Elsewhere.from_bytes(packet.body)
        elif packet.call.name == self._name:
            self._accept(message.peer, packet)
        else:
            self._keep_early(message.peer, packet)
            rank = self._rank_of(message.peer)
            if rank is not None and packet.kind is Kind.GIVEN:
                self._strayed[rank] = packet.call
        return True

    def _rank_of(self, peer: xr.Address) -> int | None:
        return self._addresses.index(peer) if peer in self._addresses else None

    def _keep_early(self, peer: xr.Address, packet: Packet) -> None:
        if packet.kind is Kind.GIVEN:
            _early.setdefault(self._engine, deque(maxlen=_EARLY_MAX)).append((peer, packet))

    def _accept(self, peer: xr.Address, packet: Packet) -> None:
        kind, call, rank, part, parts, body = packet
        if rank >= self.size or peer != self._addresses[rank]:
            raise UsageError(f"{peer.name!r} says it is rank {rank}: it was given other addresses than we were")
        if call.number > self._number:
            if kind is Kind.GIVEN:
                self._ahead[rank] = max(call.number, self._ahead.get(rank, 0))
                self._keep_early(peer, packet)
        elif call.number < self._number or call.exchange < self._exchange:
            return  # of one that was given up
        elif kind is Kind.GIVEN:
            self._arrived.setdefault((call.exchange, rank), {})[part] = body
            self._parts[call.exchange, rank] = parts
        elif kind is Kind.HAS_ALL:
            self._have_all.setdefault(call.exchange, set()).add(rank)
        elif call == self._call:
            failed = Failed.from_bytes(body)
            if failed.stray not in self._found:
                self._failed[rank] = failed

    def _is_whole(self, rank: int) -> bool:
        place = self._exchange, rank
        return len(self._arrived.get(place, ())) == self._parts.get(place, -1)

    def _whole(self, rank: int) -> bytes:
        parts = self._arrived.pop((self._exchange, rank))
        return b"".join(parts[part] for part in range(self._parts.pop((self._exchange, rank))))


def _address(given: object) -> xr.Address:
    if isinstance(given, bytes):
        return xr.Address.from_bytes(given)
    if not isinstance(given, xr.Address):
        raise UsageError(f"addresses has {type(given).__name__}, must have Address or bytes")
    return given


class TorchGroup:
    """The ranks of a torch.distributed process group; None: the default group. Its own timeout applies, not
    all_gather's. UsageError if this process is not a member.
    """

    def __init__(self, process_group: torch.distributed.ProcessGroup | None = None) -> None:
        with needs("TorchGroup", "'crossrail[torch]'"):
            import torch.distributed

        self._distributed: Any = torch.distributed
        self._group = process_group
        self.rank: int = self._distributed.get_rank(process_group)
        self.size: int = self._distributed.get_world_size(process_group)
        if self.rank < 0:
            raise UsageError("process_group is one that this process is not in: new_group() was given other ranks")

    def __repr__(self) -> str:
        return f"<TorchGroup, rank {self.rank} of {self.size}>"

    def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        """As in Group, by torch.distributed, whose own timeout applies."""
        check_seconds(timeout_s=timeout_s)
        gathered: list[Any] = [None] * self.size
        self._distributed.all_gather_object(gathered, data, group=self._group)
        return gathered
