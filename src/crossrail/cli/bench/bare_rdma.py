"""Loops over a NIC's library without the engine, between the two processes: the limits that rdma.py compares with."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from crossrail import _core
from crossrail.cli.bench.arrays import Indices, Memory

if TYPE_CHECKING:
    from crossrail.cli.bench.pair import Link, Pair, Pool

# Pages that are not complete yet: as many as the engine has on a path.
_PAGE_WINDOW = 256
_VERBS = "verbs"


class OpenedBare(NamedTuple):
    """Our end of a bare loop, and what it was opened for."""

    loop: _core.bench.BareLoop
    target: tuple[int, int]
    ends: tuple[Link, int, int]


class BareRdma:
    """The first process's end, and the clock. The peer's end: BareRdmaPeer."""

    def __init__(self, name: str, transport: str, rail: str = "", *, imm_each: bool) -> None:
        """name: of the limit. rail: of libfabric's provider. imm_each: of pages, or with the last alone."""
        self.name = name
        self._transport = transport
        self._rail = rail
        self._imm_each = imm_each

    def writes(self, pair: Pair, link: Link, pool: Pool, nbytes: int, window: int) -> int:
        """Once through the pool."""
        loop, target = self._opened(pair, link, pool.src, pool.target)
        count = pool.nbytes // nbytes
        pair.child.start("bare_receive", count=count)
        took_ns = loop.writes(link.rig.view(pool.src), target, nbytes=nbytes, count=count, window=window)
        pair.child.finish()
        return took_ns

    def pages(self, pair: Pair, link: Link, pool: Pool, src: Indices, dst: Indices, page_bytes: int) -> int:
        """Writes all these pages once."""
        loop, target = self._opened(pair, link, pool.src, pool.target)
        pair.child.start("bare_receive", count=len(src) if self._imm_each else 1)
        took_ns = loop.pages(
            link.rig.view(pool.src),
            target,
            src,
            dst,
            page_bytes=page_bytes,
            window=_PAGE_WINDOW,
            imm_each=self._imm_each,
        )
        pair.child.finish()
        return took_ns

    def one_way_ns(self, pair: Pair, link: Link, rounds: int) -> float:
        """Half a round trip of 8-byte writes with an immediate, both ends looking all the time."""
        loop, target = self._opened(pair, link, link.control, link.peer_control)
        pair.child.start("bare_ping_pong", rounds=rounds)
        took_ns = loop.ping_pong(link.rig.view(link.control), target, rounds=rounds, first=True)
        while not pair.child.has_answered():
            loop.progress()
        pair.child.finish()
        return took_ns / rounds / 2

    def _opened(self, pair: Pair, link: Link, src: int, target: int) -> tuple[_core.bench.BareLoop, tuple[int, int]]:
        """Our end and the peer's memory. The pair keeps both ends, between two regions, until others come."""
        ends = (link, src, target)
        if pair.bare is None or pair.bare.ends != ends:
            pair.bare = None
            loop = _open(self._transport, self._rail)
            base, key = loop.add_memory(link.rig.view(src))
            name, *there = pair.child.call(
                "bare_open",
                transport=self._transport,
                rail=self._rail,
                key=link.key,
                region=target,
                peer=loop.name.hex(),
                peer_target=[base, key],
            )
            loop.meet(bytes.fromhex(name))
            pair.bare = OpenedBare(loop, (there[0], there[1]), ends)
        return pair.bare.loop, pair.bare.target


class BareRdmaPeer:
    """The second process's end."""

    _loop: _core.bench.BareLoop | None = None
    _memory: Memory
    _target = (0, 0)

    def open(self, transport: str, rail: str, memory: Memory, peer: str, peer_target: list[int]) -> list[str | int]:
        """Returns [name, base, key] for the first process."""
        self._loop = _open(transport, rail)
        self._memory = memory
        base, key = self._loop.add_memory(memory)
        self._loop.meet(bytes.fromhex(peer))
        self._target = (peer_target[0], peer_target[1])
        return [self._loop.name.hex(), base, key]

    def receive(self, count: int) -> None:
        """Returns once that many immediates have arrived."""
        assert self._loop is not None
        self._loop.receive(count)

    def ping_pong(self, rounds: int) -> None:
        """The second side."""
        assert self._loop is not None
        self._loop.ping_pong(self._memory, self._target, rounds=rounds, first=False)


def _open(transport: str, rail: str) -> _core.bench.BareLoop:
    if transport == _VERBS:
        return _core.bench.verbs_loop()
    return _core.bench.fabric_loop(transport.removeprefix("ofi:"), rail)
