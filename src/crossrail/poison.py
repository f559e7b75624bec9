"""Watches memory that nobody should write to any more, and detects when somebody did."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from crossrail import _core
from crossrail.errors import LateWrite

if TYPE_CHECKING:
    from crossrail.regions import Region


class Poisoned:
    """Poisoned memory of a region: made by Region.poison and Region.poison_pages.

    Keeps the memory alive, also after the region was closed: then check() says whether close() kept its promise.
    As a context manager it checks at the end of the block, unless that ends with an error. One thread at a time.
    """

    def __init__(self, region: Region, pages: Any, page_bytes: int, stride: int, offset: int) -> None:
        self._memory = region.view()
        self._base = region.base
        self._what = repr(region)
        self._native = _core._Poison(region, pages, page_bytes, stride, offset)

    def __repr__(self) -> str:
        return f"<Poisoned memory of {self._what}>"

    def check(self) -> None:
        """Raises LateWrite when anything wrote there since: a peer, a NIC, a transfer of ours, or the program itself.

        Reads all of it, GIL released. May be called again, and then finds the same again. A write of the very bytes
        that are there goes unnoticed: by chance one in 256 of a single byte, one in 2**64 of 8 bytes.
        """
        found = self._native.find()
        if found is not None:
            offset, nbytes, data, pages = found
            raise LateWrite(self._what, offset, nbytes, data, pages)

    def __enter__(self) -> Poisoned:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.check()
