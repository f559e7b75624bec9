"""A prefiller and a decoder for measuring: one rank each, one request at a time that takes all pages."""

from __future__ import annotations

import ast
import asyncio
import hashlib
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

import crossrail as xr
from crossrail.cli.bench.arrays import Indices, Memory
from crossrail.control.deadlines import in_time
from crossrail.kv import KvLayout, KvReceiver, KvSender, KvTarget, PagePool, RankMemory, Reception, SendJob, page_hashes

_REQUEST = "bench"
_PATIENCE_S = 60.0

_T = TypeVar("_T")


class KvSide:
    """An engine, memory and pages, and an event loop that runs when called."""

    def __init__(self, name: str, layout: KvLayout, transport: str) -> None:
        self.layout = layout
        self.engine = xr.Engine(name, transport=transport)
        self.memory = RankMemory.alloc(self.engine, layout)
        self.pool = PagePool(layout.pages, layout.page_tokens)
        self._loop = asyncio.new_event_loop()

    @property
    def tokens(self) -> int:
        """Number of tokens of a request that takes all pages."""
        return self.layout.pages * self.layout.page_tokens

    def run(self, what: Coroutine[Any, Any, _T]) -> _T:
        """On the side's own loop."""
        return self._loop.run_until_complete(in_time(what, _PATIENCE_S))

    def close(self) -> None:
        """The engine, and the loop."""
        self.engine.close()
        self._loop.close()


class KvDecoder(KvSide):
    """Takes one request after another."""

    def __init__(self, layout: KvLayout, transport: str) -> None:
        super().__init__("bench-decoder", layout, transport)
        self.receiver = KvReceiver(layout, [self.memory], self.pool)
        self._reception: Reception | None = None

    def expect(self) -> KvTarget:
        """A request that takes all pages, from a prefiller of the same layout."""
        self._reception = self.receiver.reserve(_REQUEST, self.tokens)
        return self._reception.dispatch(self.layout, "bench-prefiller")

    def take(self) -> None:
        """Returns when everything has arrived, and the pages are free again."""
        assert self._reception is not None
        self.run(self._reception.arrived())
        self._reception.release()

    def drop(self) -> None:
        """Gives up a request that nobody counts or sends any more."""
        assert self._reception is not None
        self.run(self._reception.withdraw(_confirmed, _PATIENCE_S))
        self._reception.release()

    def digest(self) -> str:
        """SHA-256 of all memory."""
        return hashlib.sha256(self.memory.regions[0].array().data).hexdigest()

    def close(self) -> None:
        """Registrations first."""
        self.receiver.close()
        super().close()


async def _confirmed() -> None:
    pass


class KvPrefiller(KvSide):
    """Sends them."""

    def __init__(self, layout: KvLayout, transport: str) -> None:
        super().__init__("bench-prefiller", layout, transport)
        self.sender = KvSender(layout, {0: self.memory})

    @property
    def bytes(self) -> Memory:
        """Bytes of all memory."""
        return self.memory.regions[0].array()

    def send(self, target: KvTarget, pages: Indices, *, compute: Coroutine[Any, Any, None] | None = None) -> SendJob:
        """Sends the whole request in one step. pages: at the decoder. compute: counts the layers; None: all at once.

        Returns when nothing is under way any more.
        """
        return self.run(self._send(replace(target, pages=pages.astype(np.uint32)), compute))

    async def _send(self, target: KvTarget, compute: Coroutine[Any, Any, None] | None) -> SendJob:
        lease = self.pool.reserve(self.layout.pages, _REQUEST)
        job = self.sender.open(target, lease)
        self.sender.begin_step([(job, self.tokens)])
        if compute is None:
            self.sender.layer_done(self.layout.layers)
        else:
            await compute
        await job.finish()
        lease.release()
        return job

    def close(self) -> None:
        """The sender first."""
        self.run(self.sender.close())
        super().close()


class NamedPool:
    """Requests with one prompt that takes all pages, one after another."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        self._pool = PagePool(pages, page_tokens)

    def share(self, tokens: npt.NDArray[np.int32]) -> None:
        """The next one: all that is done for names, beside its pages."""
        names = page_hashes(tokens, self._pool.page_tokens)
        lease = self._pool.reserve(self._pool.pages, _REQUEST, names=names)
        lease.fill()
        lease.publish_computed(names)
        lease.use()
        lease.release()


def to_text(target: KvTarget) -> str:
    """The numbers as text for a line of JSON."""
    return repr(target.to_wire())


def from_text(text: str) -> KvTarget:
    """The inverse."""
    return KvTarget.from_wire(ast.literal_eval(text))
