"""The bare libfabric loop between the two processes: the limit of the engine over ofi (rdma.py, BARE)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossrail import _core
from crossrail.cli.bench.arrays import Indices, Memory

if TYPE_CHECKING:
    from crossrail.cli.bench.pair import Link, Pair, Pool

# Pages that are not complete yet: as many as the engine has on a path.
_PAGE_WINDOW = 256


class BareFabric:
    """The first process's end, and the clock: one provider of libfabric, one rail. The peer's end: FabricPeer."""

    name = "bare libfabric"

    def __init__(self, provider: str, rail: str) -> None:
        self._provider = provider
        self._rail = rail
        self._open_for: Pool | None = None
        self._loop: _core.bench.FabricLoop | None = None
        self._target = (0, 0)

    def writes(self, pair: Pair, link: Link, pool: Pool, nbytes: int, window: int) -> int:
        """Once through the pool."""
        loop, source, count = self._opened(pair, link, pool), link.rig.view(pool.src), pool.nbytes // nbytes
        pair.child.start("fabric_receive", count=count)
        took_ns = loop.writes(source, self._target, nbytes=nbytes, count=count, window=window)
        pair.child.finish()
        return took_ns

    def pages(self, pair: Pair, link: Link, pool: Pool, src: Indices, dst: Indices, page_bytes: int) -> int:
        """All these pages once."""
        loop, source = self._opened(pair, link, pool), link.rig.view(pool.src)
        pair.child.start("fabric_receive", count=len(src))
        took_ns = loop.pages(source, self._target, src, dst, page_bytes=page_bytes, window=_PAGE_WINDOW)
        pair.child.finish()
        return took_ns

    def _opened(self, pair: Pair, link: Link, pool: Pool) -> _core.bench.FabricLoop:
        """Both ends, over the memory of this pool; kept until another pool comes."""
        if self._loop is None or self._open_for is not pool:
            self._loop = _core.bench.FabricLoop(self._provider, self._rail)
            name, base, key = pair.child.call(
                "fabric_open", provider=self._provider, rail=self._rail, key=link.key, region=pool.target
            )
            self._loop.meet(bytes.fromhex(name))
            self._loop.add_memory(link.rig.view(pool.src))
            self._target = (base, key)
            self._open_for = pool
        return self._loop


class FabricPeer:
    """The second process's end."""

    _loop: _core.bench.FabricLoop | None = None

    def open(self, provider: str, rail: str, memory: Memory) -> list[str | int]:
        """Returns [name, base, key] for the first process."""
        self._loop = _core.bench.FabricLoop(provider, rail)
        base, key = self._loop.add_memory(memory)
        return [self._loop.name.hex(), base, key]

    def receive(self, count: int) -> None:
        """Until so many immediates came."""
        assert self._loop is not None
        self._loop.receive(count)
