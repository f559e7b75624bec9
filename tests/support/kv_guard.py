"""Finds late writes: memory of a node's pages that changed although nobody had them."""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from crossrail.kv.nodes.node import Node
from crossrail.kv.transfer.pages import PageLease, PageState

_POISON = 0xA5

Pages = npt.NDArray[np.uint32]


class PageGuard:
    """Watches a node's pool. Free pages hold poison until they are reserved, cached ones what they held when released.

    late: a sentence for each page that held something else. Wraps the pool's methods: one guard per node.
    """

    def __init__(self, node: Node) -> None:
        self.late: list[str] = []
        self._node = node
        self._pool = node.pool
        self._layers = [layer for rank in node.cache for layer in rank]
        self._cached: dict[int, bytes] = {}
        self._reserve, self._free, self._return = self._pool.reserve, self._pool._free_pages, self._pool._return
        self._pool.reserve = self._on_reserve  # type: ignore[method-assign]
        self._pool._free_pages = self._on_free  # type: ignore[method-assign]
        self._pool._return = self._on_return  # type: ignore[method-assign]
        self._poison(np.arange(self._pool.pages, dtype=np.uint32))

    def check(self) -> list[str]:
        """All findings, after checking every page that is not in use."""
        for page in np.flatnonzero(self._pool._state == PageState.FREE):
            self._expect_poison(int(page))
        for page in list(self._cached):
            self._expect_cached(page)
        return self.late

    def _on_reserve(self, count: int, owner: str, **options: Any) -> PageLease:
        lease = self._reserve(count, owner, **options)
        for page in lease.pages[: lease.shared].tolist():
            self._expect_cached(page)
        for page in lease.own.tolist():
            self._expect_poison(page)
        return lease

    def _on_free(self, pages: Pages) -> None:
        for page in pages.tolist():  # pages that were cached, and are evicted now
            self._expect_cached(page)
        self._poison(pages)
        self._free(pages)

    def _on_return(self, lease: PageLease) -> None:
        self._return(lease)
        for page in lease.pages.tolist():
            if self._pool._state[page] == PageState.CACHED:
                self._cached[page] = self._digest(page)

    def _poison(self, pages: Pages) -> None:
        for layer in self._layers:
            layer.view(np.uint8)[:, pages] = _POISON

    def _expect_poison(self, page: int) -> None:
        if any((layer.view(np.uint8)[:, page] != _POISON).any() for layer in self._layers):
            self.late.append(f"free page {page} of {self._node.name} was written to")

    def _expect_cached(self, page: int) -> None:
        before = self._cached.pop(page, None)
        if before is not None and before != self._digest(page):
            self.late.append(f"cached page {page} of {self._node.name} was written to")

    def _digest(self, page: int) -> bytes:
        whole = hashlib.blake2b()
        for layer in self._layers:
            whole.update(layer[:, page].tobytes())
        return whole.digest()
