"""Where rows are (inputs, experts' outputs, sums) and what touches them there.

HostRows (host.py) is for memory of the host, DeviceRows (device.py) for a GPU's. What decides where a row goes -
routes, counts, tables - is in host memory with either, as arrays of numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import crossrail as xr
from crossrail.moe.arrays import Array


class Block(Protocol):
    """One range of such memory. Owner: its creator; close() it before the engine."""

    nbytes: int

    def array(self, dtype: str, shape: tuple[int, ...], offset: int) -> Any:
        """A view of it, from this byte on. dtype: of config.ITEM_BYTES, or "uint8"."""

    def close(self, timeout_s: float) -> None:
        """Idempotent. WaitTimeout while a peer is in the middle of a write to it."""


class SharedBlock(Block, Protocol):
    """A block that peers write to."""

    @property
    def region(self) -> xr.Region:
        """The region with all of it."""

    def register(self) -> xr.Region:
        """Registers it again: a separate region, for one peer. The caller closes it."""


class RowMemory(Protocol):
    """Threads: one at a time.

    name: as explain() says it. kernels: likewise.

    pack, pull, reduce: as of Kernels; `x` and `scales`, `out`, `weights` as given() gives them, tables of numpy. They
    may return before it is done. What is done in order: these calls, copy(), and what the caller of AllToAll does with
    the arrays, on the stream that is current in both.
    """

    name: str
    kernels: str

    def block(self, nbytes: int) -> Block: ...

    def shared_block(self, nbytes: int, on_host: bool) -> SharedBlock:
        """on_host: in memory of the host, which kernels reach too, so that an engine needs no driver to touch it."""

    def map(self, descriptor: xr.RegionDescriptor, timeout_s: float) -> Any:
        """Another rank's shared block, uint8, for kernels of ours, for as long as it is held. Raises as Engine.map."""

    def given(self, array: Any, name: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...]) -> Any:
        """What a caller gave as an argument of that name, to be read or written here; shape: None for any length.
        UsageError when it is none of these types, of another shape, has strides, or is elsewhere.
        """

    def routes(self, indices: Any, shape: tuple[int, int]) -> Array:
        """Indices as a caller gave them, for the host. Waits for kernels that make them."""

    def shown(self, array: Any, dtype: str, as_tensor: bool) -> Any:
        """An array of rows for a caller. as_tensor: what he gave were tensors of torch."""

    def shown_numbers(self, numbers: Array, as_tensor: bool) -> Any:
        """int32 for a caller, to where the rows are."""

    def empty(self, shape: tuple[int, int], dtype: str) -> Any: ...

    def copy_of(self, array: Any) -> Any: ...

    def copy(self, target: Any, source: Any) -> None:
        """Copies it; does nothing if it is the same memory."""

    def pack(self, target: Any, x: Any, scales: Any | None, table: Array | None) -> None: ...

    def pull(self, x: Any, scales: Any | None, source: Any, table: Array) -> None: ...

    def reduce(
        self, out: Any, sources: Sequence[Any], where: Array, weights: Any | None, accumulate: bool = False
    ) -> None: ...

    def settle(self) -> None:
        """Waits until everything asked for is done: packed memory may be sent, and what was read may be overwritten."""
