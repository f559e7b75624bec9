"""A child process of the campaign: it has one engine at a time and carries out its parent's orders.

Both ends of the socket send pickled tuples, one per packet: a verb and its arguments. The parent gives a number to each
object that it will refer to later.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import random
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossrail.campaign.books import Bytes
from crossrail.campaign.usage import Usage
from crossrail.counters import CountTicket, ImmCounter
from crossrail.engine import Engine
from crossrail.errors import CrossrailError, TransportError, UsageError, WaitTimeout
from crossrail.messages import Message, ReceivePool
from crossrail.peers import Address
from crossrail.regions import Region
from crossrail.transfers import Transfer

PACKET_BYTES_MAX = 1 << 18
_FDS = Path("/proc/self/fd")
_PATIENCE_S = 5.0  # until what a closed engine had is gone: threads need a moment to end


@dataclass(frozen=True)
class RegionNumber:
    """Stands for a region of the child's among the arguments of a submit."""

    number: int


def obey(control: socket.socket, verbs: Mapping[str, Callable[..., None]]) -> None:
    """Carries out the orders that come, each by the function of its verb, until the parent closes its end."""
    while packet := control.recv(PACKET_BYTES_MAX):
        verb, *arguments = pickle.loads(packet)
        verbs[verb](*arguments)


class Child:
    """The child's end. One thread executes commands; events are reported from the engine's callback thread."""

    def __init__(self, control: socket.socket, slots: list[Bytes]) -> None:
        self._control = control
        self._slots = slots
        self._opened: Engine | None = None
        self._before: Usage | None = None  # it opened
        self._regions: dict[int, Region] = {}
        self._transfers: dict[int, Transfer] = {}
        self._pools: dict[int, ReceivePool] = {}
        self._counters: dict[int, ImmCounter] = {}
        self._tickets: list[CountTicket] = []
        self._verbs: dict[str, Callable[..., None]] = {
            "open": self._open, "close": self._close, "register": self._register, "alloc": self._alloc,
            "close-region": self._close_region, "revoke": self._revoke, "renew": self._renew, "submit": self._submit,
            "cancel": self._cancel, "open-pool": self._open_pool, "close-pool": self._close_pool,
            "numbers": self._numbers, "on-count": self._on_count, "drop-tickets": self._drop_tickets,
            "release": self._release, "peer-state": self._peer_state, "forget": self._forget, "cut": self._cut,
            "report": self._report, "dump": self._dump,
        }  # fmt: skip

    def run(self) -> None:
        """Carries out orders until the parent closes its end."""
        obey(self._control, self._verbs)
        if self._opened is not None:
            self._opened.close()

    @property
    def _engine(self) -> Engine:
        assert self._opened is not None
        return self._opened

    def _tell(self, *what: object) -> None:
        self._control.send(pickle.dumps(what))

    # ---- the engine

    def _open(self, ask: int, name: str, options: dict[str, Any]) -> None:
        self._before = Usage.take()
        self._opened = engine = Engine(name, **options)
        engine.on_event(lambda event: self._tell("event", event.kind, event.peer, event.detail))
        self._tell("reply", ask, engine.address)

    def _close(self, ask: int, timeout_s: float) -> None:
        """Replies with what the engine has left behind, in words."""
        self._engine.close(timeout_s)
        self._opened = None
        for things in (self._regions, self._transfers, self._pools, self._counters, self._tickets):
            things.clear()
        assert self._before is not None
        deadline = time.monotonic() + _PATIENCE_S
        while (left := Usage.take().exceeds(self._before)) and time.monotonic() < deadline:
            time.sleep(0.005)
        self._tell("reply", ask, left)

    def _peer_state(self, ask: int, peer: Address) -> None:
        self._tell("reply", ask, self._engine.peer_state(peer))

    def _forget(self, peer: Address) -> None:
        self._engine.forget_peer(peer)

    def _report(self, ask: int, imms: list[int]) -> None:
        counts = {imm: self._counter(imm).poll() for imm in imms}
        self._tell("reply", ask, (self._engine.stats(), counts, Usage.take()))

    def _dump(self, ask: int, path: str) -> None:
        if self._opened is not None:
            self._opened.dump(path, reason="a round of the campaign failed")
            known = "\n".join(str(self._opened.explain(peer)) for peer in self._opened.peers())
            Path(f"{path}.peers.txt").write_text(known)
        self._tell("reply", ask, path)

    # ---- memory

    def _register(self, ask: int, number: int, slot: int) -> None:
        region = self._regions[number] = self._engine.register(self._slots[slot])
        self._tell("reply", ask, region.descriptor)

    def _alloc(self, ask: int, number: int, nbytes: int) -> None:
        region = self._regions[number] = self._engine.alloc(nbytes)
        fd, _, offset = file_at(region.base)
        self._tell("reply", ask, (region.descriptor, fd, offset))

    def _close_region(self, ask: int, number: int, timeout_s: float) -> None:
        try:
            self._regions[number].close(timeout_s)
        except WaitTimeout as error:
            self._tell("reply", ask, str(error))
            return
        del self._regions[number]
        self._tell("reply", ask, "")

    def _revoke(self, ask: int, number: int, timeout_s: float) -> None:
        try:
            self._regions[number].revoke(timeout_s)
        except WaitTimeout as error:
            self._tell("reply", ask, str(error))
            return
        self._tell("reply", ask, "")

    def _renew(self, ask: int, number: int) -> None:
        self._tell("reply", ask, self._regions[number].renew())

    # ---- operations

    def _submit(self, number: int, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        try:
            meant = [
                self._regions[one.number] if isinstance(one, RegionNumber) else self._group(one) for one in arguments
            ]
            transfer: Transfer = getattr(self._engine, method)(*meant, **options)
        except (UsageError, TransportError) as error:
            self._tell("completed", number, "refused", str(error))
            return
        self._transfers[number] = transfer
        self._tell("submitted", number, transfer.nbytes)
        transfer.add_done_callback(lambda done: self._completed(number, done))

    def _group(self, argument: Any) -> Any:
        """A tuple of addresses is a group of peers; anything else is itself."""
        return self._engine.add_peer_group(list(argument)) if isinstance(argument, tuple) else argument

    def _completed(self, number: int, transfer: Transfer) -> None:
        status, why = transfer.status, ""
        if status != "done":
            try:
                transfer.wait(0)
            except CrossrailError as error:
                why = str(error)
        self._transfers.pop(number, None)
        self._tell("completed", number, status, why)

    def _cancel(self, number: int) -> None:
        if (transfer := self._transfers.get(number)) is not None:
            transfer.cancel()

    def _open_pool(self, number: int, count: int, nbytes: int) -> None:
        def arrived(message: Message) -> None:
            self._tell("message", number, bytes(message.data))

        self._pools[number] = self._engine.submit_recvs(count, nbytes, arrived)

    def _close_pool(self, number: int) -> None:
        self._pools.pop(number).close()

    # ---- counting

    def _counter(self, imm: int) -> ImmCounter:
        if imm not in self._counters:
            self._counters[imm] = self._engine.imm_counter(imm)
        return self._counters[imm]

    def _numbers(self, ask: int, count: int) -> None:
        fresh = [self._engine.alloc_imm() for _ in range(count)]
        self._counters.update({counter.imm: counter for counter in fresh})
        self._tell("reply", ask, [counter.imm for counter in fresh])

    def _on_count(self, number: int, imm: int, count: int) -> None:
        counter = self._counter(imm)

        def counted() -> None:
            self._tell("counted", number)
            counter._give_back(count)

        self._tickets.append(counter.on_count(count, counted))

    def _drop_tickets(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()
        self._tickets.clear()

    def _release(self, imm: int, force: bool) -> None:
        counter = self._counter(imm)
        del self._counters[imm]
        try:
            counter.release(force=force)
        except UsageError as error:
            self._tell("complaint", f"release of {imm}: {error}")

    # ---- what goes wrong

    def _cut(self, chance: float, seed: int) -> None:
        cut_connections(chance, seed)


def cut_connections(chance: float, seed: int) -> None:
    """Breaks connections of this process off, each with that chance, as a network would that resets them."""
    draw = random.Random(seed)
    for fd in list(_FDS.iterdir()):
        try:
            is_socket = str(fd.readlink()).startswith("socket:")
        except FileNotFoundError:  # it was closed meanwhile
            continue
        if is_socket and draw.random() < chance:
            _disconnect(int(fd.name))


def _disconnect(fd: int) -> None:
    """Resets a tcp connection, dropping what it has not sent; connect(2), AF_UNSPEC. Leaves other sockets alone."""
    try:
        with socket.socket(fileno=os.dup(fd)) as same:
            if same.family != socket.AF_INET or same.type != socket.SOCK_STREAM:
                return
            same.getpeername()  # raises for sockets that listen or are not connected
            ctypes.CDLL(None).connect(same.fileno(), struct.pack("=H14x", socket.AF_UNSPEC), 16)
    except OSError:  # the engine closed it meanwhile, or it was none
        return


def file_at(address: int) -> tuple[int, int, int]:
    """The descriptor and inode of the shared memory file that is mapped there, and where in it that is."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, inode, *_ = line.split()
        first, end = (int(edge, 16) for edge in span.split("-"))
        if first <= address < end:
            break
    for fd in list(_FDS.iterdir()):
        try:
            if fd.stat().st_ino == int(inode):
                return int(fd.name), int(inode), int(offset, 16) + address - first
        except FileNotFoundError:  # the one of iterdir itself
            continue
    raise LookupError(f"no descriptor of the file mapped at {address:#x}")
