"""Prepares tasks with torch, on a GPU: the counterpart of task.py's numpy, with the same bytes.

Needs torch. On the device "cpu" it is the same code, without a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import crossrail as xr
from crossrail._extras import needs
from crossrail.errors import UsageError
from crossrail.weights import gpu
from crossrail.weights.conversion.torch_casts import BITS, Checks, cast, quantise
from crossrail.weights.step.task import Part, ReadyTask, View

with needs(__name__, "'crossrail[torch]'"):
    import torch

Tensor: TypeAlias = Any  # torch.Tensor
_ARENA = None  # among regions by index
_STAGING_BYTES = 16 << 20  # of each half: some hundred microseconds of a GPU's link
_STAGING_ALIGN = 256


class TorchPreparer:
    """On one device, where the arena is; regions may be on the host or on other GPUs: their data is copied to it, the
    host's by load(), that of other GPUs by prepare().

    device: "cuda:0", or "cpu". Kernels run on a stream of its own, loads on another one, and it waits for them: the
    results are in memory when prepare() or load() returns, so NICs and copies may read them. Besides the arena it uses
    a few times 32 MiB of torch's own memory and, if weights are on the host and not pinned, 32 MiB of pinned memory.
    Values and their scales must be aligned for their type, as those of tensors are.
    """

    bytes_at_once = 32 << 20  # a hand-over waits for the GPU, which does some hundred megabytes meanwhile

    def __init__(self, device: str) -> None:
        self.device = device
        self._stream = None if device == "cpu" else torch.cuda.Stream(device)
        self._load_stream = None if device == "cpu" else torch.cuda.Stream(device)
        self._staging: _Staging | None = None
        self._regions: dict[int | None, xr.Region] = {}
        self._typed: dict[tuple[int | None, torch.dtype], tuple[Tensor, int]] = {}

    def alloc(self, engine: xr.Engine, nbytes: int) -> xr.Region:
        return gpu.alloc(engine, self.device, nbytes)

    def far(self, regions: Sequence[xr.Region]) -> frozenset[int]:
        return frozenset() if self.device == "cpu" else gpu.on_host(regions)

    def open(self, regions: Sequence[xr.Region], arena: xr.Region | None) -> None:
        self.close()
        if arena is not None:
            self._regions = {**dict(enumerate(regions)), _ARENA: arena}

    def load(self, tasks: Sequence[tuple[ReadyTask, int]]) -> None:
        with gpu.told(f"copying to {self.device}"), torch.no_grad(), _on(self._load_stream):
            try:
                for task, base in tasks:
                    for region, view, wanted in task.loads:
                        self._load(self._bits(region, view, 0), self._bits(_ARENA, wanted, base))
            finally:  # as in prepare()
                _finish(self._load_stream)

    def _load(self, here: Tensor, there: Tensor) -> None:
        """Launches the copy: one that a GPU makes by itself, so only from pinned memory without gaps."""
        if self._load_stream is None or (here.is_contiguous() and here.is_pinned()):
            there.copy_(here, non_blocking=True)
        elif here.nbytes > _STAGING_BYTES:
            dim = max(range(here.dim()), key=here.shape.__getitem__)
            for one, other in zip(here.chunk(2, dim), there.chunk(2, dim), strict=True):
                self._load(one, other)
        else:
            if self._staging is None:
                self._staging = _Staging(self._load_stream)
            there.copy_(self._staging.of(here), non_blocking=True)

    def prepare(self, tasks: Sequence[tuple[ReadyTask, int]]) -> None:
        checks = Checks()
        with gpu.told(f"preparing on {self.device}"), torch.no_grad(), _on(self._stream):
            try:
                for task, base in tasks:
                    for part in task.parts:
                        self._prepare(part, base, checks)
                checks.finish()
            finally:  # also of what was launched before something failed: the arena is used again
                _finish(self._stream)

    def close(self) -> None:
        self._regions, self._typed = {}, {}

    def _prepare(self, part: Part, base: int, checks: Checks) -> None:
        """Part.prepare()."""
        for region, view, wanted in part.copies:
            piece = self._bits(_ARENA, view, base) if region is None else self._bits(region, view, 0)
            self._bits(_ARENA, wanted, base).copy_(piece)
        if part.quantised is None:
            for view, out in part.outputs:
                if part.source == part.target:
                    self._bits(_ARENA, out, base).copy_(self._values(part, view, base, None))
                else:
                    values = self._values(part, view, base, getattr(torch, part.source))
                    cast(values, self._view(_ARENA, out, base, getattr(torch, part.target)))
            return
        made = part.quantised
        values = self._values(part, part.values, base, getattr(torch, part.source))
        codes = self._view(_ARENA, made.values, base, torch.uint8)
        scales = self._view(_ARENA, made.scales, base, torch.float32)
        quantise(values, codes, scales, part.name, made.block, checks, made.start)
        for view, out in part.outputs:
            self._bits(_ARENA, out, base).copy_(self._bits(_ARENA, view, base))

    def _values(self, part: Part, view: View, base: int, dtype: torch.dtype | None) -> Tensor:
        """Gathered, loaded or own ones, on our device; dtype None: their bits."""
        kind = BITS[view.dtype.itemsize] if dtype is None else dtype
        values = self._view(part.own, view, base if part.own is None else 0, kind)
        return values.to(self.device)

    def _bits(self, region: int | None, view: View, base: int) -> Tensor:
        return self._view(region, view, base, BITS[view.dtype.itemsize])

    def _view(self, region: int | None, view: View, base: int, dtype: torch.dtype) -> Tensor:
        """Copies nothing."""
        memory, begin = self._memory(region, dtype)
        item = dtype.itemsize
        at = base + view.offset - begin
        # The stride of a dimension with one element is never used.
        strides = [step if n > 1 else 0 for n, step in zip(view.shape, view.strides, strict=True)]
        if at % item or any(step % item for step in strides):
            raise UsageError(f"weights of {dtype} lie {at % item} bytes beside where {self.device} can read them")
        return torch.as_strided(memory, view.shape, [step // item for step in strides], at // item)

    def _memory(self, index: int | None, dtype: torch.dtype) -> tuple[Tensor, int]:
        """A region as a tensor of this type, and at which of its bytes that begins: where the type may lie."""
        found = self._typed.get((index, dtype))
        if found is None:
            region, item = self._regions[index], dtype.itemsize
            begin = -region.base % item
            count = (region.nbytes - begin) // item
            memory = self.bytes_of(region, begin)[: count * item].view(dtype)
            found = self._typed[index, dtype] = memory, begin
        return found

    def bytes_of(self, region: xr.Region, offset: int) -> Tensor:
        """A region's bytes as a tensor."""
        return gpu.bytes_of(region, offset)


class _Staging:
    """Pinned memory of the host: one half is filled while the GPU takes what is in the other. Threads: one."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._halves = [torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._taken = [torch.cuda.Event(blocking=True) for _ in range(2)]
        self._half = self._used = 0

    def of(self, values: Tensor) -> Tensor:
        """A copy without gaps. It stays until what the stream has been given next has taken it."""
        if self._used + values.nbytes > _STAGING_BYTES:
            self._taken[self._half].record(self._stream)
            self._half, self._used = 1 - self._half, 0
            self._taken[self._half].synchronize()
        begin = self._used
        self._used = -(-(begin + values.nbytes) // _STAGING_ALIGN) * _STAGING_ALIGN
        copy = self._halves[self._half][begin : begin + values.nbytes].view(values.dtype).view(values.shape)
        return copy.copy_(values)


def _on(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _finish(stream: Any) -> None:
    if stream is not None:
        done = torch.cuda.Event(blocking=True)  # sleeps: the engine's threads have work for this processor
        done.record(stream)
        done.synchronize()
