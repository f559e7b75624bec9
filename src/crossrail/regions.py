"""Memory registered with our engine."""

from __future__ import annotations

import math
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from crossrail import _core, _options, _raise, _torch
from crossrail._buffers import GpuBytes
from crossrail._closing import Closing
from crossrail._core import RegionDescriptor
from crossrail._options import Shape, whole_shape
from crossrail.errors import EngineClosed, UsageError
from crossrail.poison import Poisoned

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

__all__ = ["Region", "RegionDescriptor"]


class Region(_core.Region, Closing):
    """Memory of this process that transfers and peers may use. Engine.register and Engine.alloc make it.

    Lifecycle: 1. open. 2. closing: new use is refused, by this process and by peers. 3. closed: nothing touches the
    memory any more. While it is open, revoke() locks peers out, and renew() lets them in again with a new descriptor.
    A Region that is garbage-collected is closed: hold it as long as peers use the memory.
    Owner of the memory: whoever owned it before. The region keeps the registered Python object alive until it is closed
    and no view() of it is left; the engine keeps it until the last transfer with it has ended.
    Any thread.
    """

    __slots__ = ("__weakref__",)

    def view(self) -> memoryview:
        """The memory as a memoryview of format "B", read-only if the registered object is. Nothing is copied.

        The view keeps the memory alive. Peers may write to it at any time; a count says when they have. Raises
        UsageError for memory of a GPU, and if the region is closed.
        """
        return self._memoryview()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Of memory of a GPU that Engine.alloc made: its bytes, for torch.as_tensor(region, device=region.device), CuPy
        and others. What they make of it keeps the memory alive.

        Raises AttributeError for other memory, UsageError if the region is closed.
        """
        if not self._is_own_gpu_memory:
            what = "host memory" if self.device == "cpu" else "memory that was registered: use the tensor"
            raise AttributeError(f"the region has no __cuda_array_interface__: it is {what}")
        if self.closed:
            raise UsageError("the region is closed: its memory may belong to somebody else by now")
        return GpuBytes(self.base, self.nbytes).__cuda_array_interface__

    def array(self, dtype: npt.DTypeLike = "uint8", shape: Shape | None = None) -> npt.NDArray[Any]:
        """The memory as a numpy array of this dtype and shape, without a copy. shape: a length, or one for each
        dimension, -1 where it follows from the others; None: all of it in one dimension.

        Raises UsageError if it does not fit, and in the same cases as view().
        """
        try:
            of_type = np.dtype(dtype)
        except (TypeError, UnicodeEncodeError) as error:
            is_bfloat16 = isinstance(dtype, str) and dtype == "bfloat16"
            hint = ". numpy has none; take region.tensor(), or array('uint16') for the bits" if is_bfloat16 else ""
            raise UsageError(f"dtype is {dtype!r:.80}, which is not a numpy dtype: {error}{hint}") from None
        if shape is None:
            if of_type.itemsize == 0 or self.nbytes % of_type.itemsize:
                raise UsageError(
                    f"region of {self.nbytes} bytes is not a whole number of {of_type} ({of_type.itemsize} bytes)"
                )
            shape = self.nbytes // of_type.itemsize
        lengths = whole_shape(shape)
        try:
            count = max(math.prod(lengths), -1)  # -1: all of it
            # frombuffer keeps the view alive, and with it the memory; numpy.ndarray(buffer=...) would not.
            return np.frombuffer(self._memoryview(), of_type, count).reshape(lengths)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"region of {self.nbytes} bytes as {of_type} of shape {shape}: {error}") from None

    def tensor(self, dtype: torch.dtype | str = "uint8", shape: Shape | None = None) -> torch.Tensor:
        """The memory as a torch tensor on the region's device, without a copy. Imports torch.

        dtype: torch.bfloat16 or its name, for example. shape None: all of it in one dimension. The tensor keeps the
        memory alive; peers may write to it at any time. It works for host memory, and for GPU memory that Engine.alloc
        made. Raises UsageError if dtype and shape do not fit, if the memory is read-only (torch has no such tensors),
        for registered GPU memory, and if the region is closed; ModuleNotFoundError without torch.
        """
        return _torch.over_region(self, dtype, None if shape is None else whole_shape(shape))

    def __dlpack__(self, **how: Any) -> Any:
        """All bytes as uint8, for torch.from_dlpack(region) and others, without a copy. how: as DLPack's protocol has
        it. What they make of it keeps the memory alive, and peers may write to it at any time, as of view().

        Raises what array() does for memory of the host, and what tensor() does for that of a GPU; BufferError if the
        memory is read-only, which not all that read DLPack respect.
        """
        if self.device != "cpu":
            return self.tensor().__dlpack__(**how)
        array = self.array()
        if not array.flags.writeable:
            raise BufferError("the memory is read-only: use array()")
        return array.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        """(1, 0) for memory of the host, (2, N) for that of GPU N."""
        kind, _, number = self.device.partition(":")
        return (1, 0) if kind == "cpu" else (2, int(number))

    def poison(self, offset: int = 0, nbytes: int | None = None) -> Poisoned:
        """Fills nbytes from offset on with a pattern. Poisoned.check() raises LateWrite if anything wrote there since.

        Use it on memory that nobody should write to any more, to find out whether somebody does: pages whose transfer
        was cancelled, a buffer given back, a whole region before close(). nbytes None: to the end of the region. Blocks
        while it fills (some GB/s), with the GIL released. Raises UsageError for a range outside the region, and if the
        region is read-only or closed.
        """
        _options.check_whole(offset=offset)
        nbytes = self.nbytes - int(offset) if nbytes is None else nbytes
        _options.check_whole(nbytes=nbytes)
        return Poisoned(self, None, nbytes, 0, offset)

    def poison_pages(self, pages: Any, page_bytes: int, *, stride: int | None = None, offset: int = 0) -> Poisoned:
        """Like poison(), for pages: page p is page_bytes bytes at offset + stride * p, as in submit_paged_writes.

        pages: a one-dimensional contiguous array (numpy, torch on CPU, any buffer) of int32, uint32, int64 or uint64;
        copied. stride None: page_bytes.
        """
        stride = page_bytes if stride is None else stride
        _options.check_whole(page_bytes=page_bytes, stride=stride, offset=offset)
        return Poisoned(self, pages, page_bytes, stride, offset)

    def close(self, timeout_s: float | None = 5.0, *, drain: bool = True) -> None:
        """Refuses new use, and blocks until nothing touches the memory any more, with the GIL released. Idempotent.

        drain: lets this engine's transfers with the region run to their ends; False cancels them. Operations that peers
        have begun end first in either case. timeout_s: seconds; None: no limit.
        Raises WaitTimeout, with the peers' names where they are known, if the region is still in use after timeout_s.
        It goes on refusing new use: call close() again. Until it has returned, `quarantined` says whether a peer may
        still touch the memory.
        """
        self._close(timeout_s, drain)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._engine._inherited:  # a forked child that leaves the block has nothing to close
            self.close()

    def revoke(self, timeout_s: float | None = 5.0) -> None:
        """Locks peers out: blocks until none of them can touch the memory any more, with the GIL released. Any thread.

        All descriptors given out so far become invalid for good. Operations with them fail at the peer with
        RemoteRegionRevoked, and nothing of them lands or is counted, however late they come. This engine's own
        transfers go on. Use it to fence off a writer that was slow, frozen or replaced; renew() lets its successor in.
        Raises WaitTimeout, with the peers' names where they are known, if one of them is still in the middle of an
        operation after timeout_s seconds; all others are refused already: call revoke() again. Raises UsageError if the
        region is closed, and TransportError if a NIC does not register the memory a second time: nothing has changed
        then.
        """
        self._revoke(timeout_s)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Region can be neither pickled nor copied: send peers its descriptor, which can be pickled")

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
