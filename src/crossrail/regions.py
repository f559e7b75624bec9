"""Registered memory, ours."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from crossrail import _core, _options, _raise
from crossrail._core import RegionDescriptor
from crossrail.errors import EngineClosed, UsageError
from crossrail.poison import Poisoned

__all__ = ["Region", "RegionDescriptor"]


class Region(_core.Region):
    """Local memory that transfers may use as source, and peers as target. Made by Engine.register and Engine.alloc.

    Lifecycle: 1. open. 2. closing: new use is refused, here and to peers. 3. closed: nothing touches the memory.
    While it is open, revoke() locks peers out and renew() lets them in again, by a new descriptor.
    Owner of the memory: whoever owned it before. The region keeps that Python object alive until it is closed and no
    view() of it is left. A region that the garbage collector takes is closed, and the engine keeps the object until
    the last transfer with it has ended.
    Any thread.
    """

    __slots__ = ()

    def view(self) -> memoryview:
        """The bytes as a memoryview of format "B", read-only where the registered object is. Copies nothing.

        The view keeps the memory alive. Peers may write to it at any time: a count says when they have.
        """
        return self._memoryview()

    def array(self, dtype: npt.DTypeLike = "uint8", shape: int | tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        """The memory as a numpy array that shares it; shape None: one dimension, all of it."""
        try:
            of_type = np.dtype(dtype)
        except (TypeError, UnicodeEncodeError) as error:
            raise UsageError(f"dtype is {dtype!r:.80}, which is not a numpy dtype: {error}") from None
        if shape is None:
            if of_type.itemsize == 0 or self.nbytes % of_type.itemsize:
                raise UsageError(
                    f"region of {self.nbytes} bytes is not a whole number of {of_type} ({of_type.itemsize} bytes)"
                )
            shape = self.nbytes // of_type.itemsize
        try:
            count = max(int(np.prod(shape)), -1)  # -1: all of it
            # frombuffer keeps the view, and with it the memory, alive; numpy.ndarray(buffer=...) would not.
            return np.frombuffer(self._memoryview(), of_type, count).reshape(shape)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"region of {self.nbytes} bytes as {of_type} of shape {shape}: {error}") from None

    def poison(self, offset: int = 0, nbytes: int | None = None) -> Poisoned:
        """Fills nbytes from offset on with a pattern; Poisoned.check() raises LateWrite if anything wrote there since.

        For memory that was released: pages whose transfer was cancelled, a buffer given back, all of a region before
        its close(). nbytes None: to the end. Everything that may still write there is to have ended, which is what this
        finds out. Blocks for as long as the writing takes (some GB/s), GIL released. UsageError for a range that is
        not in the region, a region that is read-only or closed.
        """
        _options.check_whole(offset=offset)
        nbytes = self.nbytes - int(offset) if nbytes is None else nbytes
        _options.check_whole(nbytes=nbytes)
        return Poisoned(self, None, nbytes, 0, offset)

    def poison_pages(self, pages: Any, page_bytes: int, *, stride: int | None = None, offset: int = 0) -> Poisoned:
        """The same for pages: index p names page_bytes bytes at offset + stride * p, as in submit_paged_writes.

        pages: a one-dimensional contiguous array (numpy, torch on CPU, any buffer) of int32, uint32, int64 or uint64;
        copied. stride None: page_bytes.
        """
        stride = page_bytes if stride is None else stride
        _options.check_whole(page_bytes=page_bytes, stride=stride, offset=offset)
        return Poisoned(self, pages, page_bytes, stride, offset)

    def close(self, timeout_s: float | None = 5.0, *, drain: bool = True) -> None:
        """Refuses new use and blocks until nothing touches the memory, GIL released. Idempotent.

        drain: transfers of ours that use it run to their ends; False cancels them first, which takes back what peers
        have not begun. What peers have begun to do with it ends first in either case.
        Raises WaitTimeout, naming the peers where that is known, when it is still in use after timeout_s: it goes on
        refusing; call again. Until then see quarantined.
        """
        self._close(timeout_s, drain)

    def revoke(self, timeout_s: float | None = 5.0) -> None:
        """Locks peers out: returns once none of them can touch the memory any more, GIL released. Any thread.

        All descriptors given out so far are dead for good: what peers do by them fails there with RemoteRegionRevoked,
        and nothing of it lands or is counted, however late it comes. Our own transfers go on using the memory. So a
        writer that was slow, frozen or replaced is fenced off; renew() lets its successor in.
        Raises WaitTimeout, naming the peers where that is known, when one is still in the middle of something after
        timeout_s: all others are refused already; call again. UsageError when closed, TransportError when a NIC does
        not register the memory a second time: then nothing has changed.
        """
        self._revoke(timeout_s)

    def __enter__(self) -> Region:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        try:
            return self._shown()
        except EngineClosed:
            return _raise.inherited(self)

    def _shown(self) -> str:
        where = "mapped" if self.mapped else "private" if self.device == "cpu" else f"on {self.device}"
        state = "closed" if self.closed else f"{self.access}, {where}"
        state += ", revoked" if self.revoked and not self.closed else ""
        return f"<Region of {self.nbytes} bytes at {self.base:#x}, {state}>"
