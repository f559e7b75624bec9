"""A network in memory for control messages, as bad as a test wants it, by a seed."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from crossrail.control.wire import Unreachable, Wire
from crossrail.errors import UsageError


@dataclass
class Net:
    """loss, repeat: chance of each packet. late_s: each copy takes up to so long, drawn anew."""

    draw: random.Random = field(default_factory=lambda: random.Random(1))
    loss: float = 0.0
    repeat: float = 0.0
    late_s: float = 0.0
    wires: dict[bytes, "MemoryWire"] = field(default_factory=dict)
    carried: list[tuple[bytes, bytes, bytes]] = field(default_factory=list)  # from, to, packet

    def wire(self, name: str) -> "MemoryWire":
        return MemoryWire(self, name)


class MemoryWire:
    """An end of it. kill(): it neither sends nor receives any more, and others learn that. freeze(): they do not."""

    def __init__(self, net: Net, name: str) -> None:
        self.packet_bytes_max = 4096
        self.address = name.encode() + b"#" + net.draw.randbytes(16)
        self._net = net
        self._inbox: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
        self.lost = False
        self._dead = asyncio.Event()
        self._moves = asyncio.Event()
        self._moves.set()
        net.wires[self.address] = self

    def identity(self, address: bytes) -> bytes:
        if len(address) < 17 or address[-17:-16] != b"#":
            raise UsageError(f"{address!r} is no address of this network")
        return address[-16:]

    async def send(self, to: bytes, packet: bytes) -> None:
        await self._moves.wait()
        target = self._net.wires.get(to)
        if target is None or target.lost or self.lost:
            raise Unreachable(f"{to!r} is gone")
        self._net.carried.append((self.address, to, packet))
        draw = self._net.draw
        loop = asyncio.get_running_loop()
        if draw.random() < self._net.loss:
            return
        for _ in range(2 if draw.random() < self._net.repeat else 1):
            loop.call_later(draw.uniform(0, self._net.late_s), target._inbox.put_nowait, (self.address, packet))
        await asyncio.sleep(0)

    def post(self, to: bytes, packet: bytes) -> asyncio.Future[None]:
        return asyncio.ensure_future(self.send(to, packet))

    async def packets(self) -> AsyncIterator[tuple[bytes, bytes]]:
        while True:
            item = await self._inbox.get()
            await self._moves.wait()
            if not self.lost:
                yield item

    def inject(self, sender: bytes, packet: bytes) -> None:
        """Delivers a packet as if it had come from that sender."""
        self._inbox.put_nowait((sender, packet))

    def is_lost(self, address: bytes) -> bool:
        target = self._net.wires.get(address)
        return target is None or target.lost

    async def until_lost(self, address: bytes) -> None:
        target = self._net.wires.get(address)
        if target is not None:
            await target._dead.wait()

    def revive(self, address: bytes) -> None:
        """Nothing here remembers who was lost."""

    def kill(self) -> None:
        self.lost = True
        self._dead.set()

    def freeze(self) -> None:
        self._moves.clear()

    def thaw(self) -> None:
        self._moves.set()


class BadWire:
    """A wire over another one that loses, repeats and delays packets, by a seed."""

    def __init__(self, inner: Wire, draw: random.Random, loss: float, repeat: float, late_s: float) -> None:
        self.address = inner.address
        self.packet_bytes_max = inner.packet_bytes_max
        self.identity = inner.identity
        self.packets = inner.packets
        self.is_lost = inner.is_lost
        self.until_lost = inner.until_lost
        self.revive = inner.revive
        self._inner = inner
        self._draw = draw
        self._loss, self._repeat, self._late_s = loss, repeat, late_s
        self._late: set[asyncio.Task[None]] = set()

    async def send(self, to: bytes, packet: bytes) -> None:
        if self._draw.random() < self._loss:
            return
        for _ in range(2 if self._draw.random() < self._repeat else 1):
            task = asyncio.ensure_future(self._send_late(to, packet, self._draw.uniform(0, self._late_s)))
            self._late.add(task)
            task.add_done_callback(self._late.discard)
        await asyncio.sleep(0)

    def post(self, to: bytes, packet: bytes) -> asyncio.Future[None]:
        return asyncio.ensure_future(self.send(to, packet))

    async def _send_late(self, to: bytes, packet: bytes, after_s: float) -> None:
        await asyncio.sleep(after_s)
        try:
            await self._inner.send(to, packet)
        except Unreachable:
            return  # as lost as the others

    async def close(self) -> None:
        for task in list(self._late):
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
