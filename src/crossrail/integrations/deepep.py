"""`Buffer` with DeepEP's low-latency calls, over crossrail.moe: for programs written for that interface.

    from crossrail.integrations.deepep import Buffer      # instead of: from deep_ep import Buffer

    buffer = Buffer(group, low_latency_mode=True)
    recv_x, recv_count, handle, event, hook = buffer.low_latency_dispatch(x, topk_idx, max_tokens, experts)
    combined_x, event, hook = buffer.low_latency_combine(y, topk_idx, topk_weights, handle)

Signatures and meanings are those of deep_ep/buffers/legacy.py (github.com/deepseek-ai/DeepEP, 2026). Tensors are in
host memory, or on one GPU: there calls and hooks only launch, and can be captured in a CUDA graph, once each has been
made before with tensors of these sizes (crossrail.moe.graph). What is not there is refused by name, never
passed over: the high-throughput calls, MPI communicators, scales rounded to powers of two, LogFMT, statistics of
waiting, ranks masked by hand. Unlike there, results are the same bits each time, and any hidden size, top-k and number
of experts will do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import crossrail as xr
from crossrail._extras import needs
from crossrail._options import check_seconds, check_whole
from crossrail._torch import uncompiled
from crossrail.errors import CrossrailError, UsageError
from crossrail.moe import AllToAll, Dispatched, TorchGroup
from crossrail.moe.config import Config
from crossrail.moe.farewell import is_told_by
from crossrail.moe.graph import GraphAllToAll, GraphDispatched
from crossrail.moe.kernels import CpuKernels, Kernels
from crossrail.moe.links.board import PARITIES, BoardLayout
from crossrail.moe.rows.device import kernels_of_a_gpu

with needs(__name__, "'crossrail[torch]'"):
    import torch

__all__ = ["Buffer", "Event", "Handle"]

_SCALE_BLOCK = 128
_HOST = torch.device("cpu")


class Event:
    """What DeepEP calls an EventOverlap. A call does all on the stream that is current: there is none to wait for."""

    def __init__(self, *, valid: bool) -> None:
        self.event = self if valid else None

    def current_stream_wait(self) -> None:
        """Returns at once. UsageError without async_finish=True: there is no event then."""
        if self.event is None:
            raise UsageError("there is an event only of a call with async_finish=True")

    def __enter__(self) -> Event:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.event is not None:
            self.current_stream_wait()


@dataclass
class Handle:
    """Links a dispatch to its combine; opaque to callers. shape: of recv_x, and of the experts' outputs."""

    exchange: Any  # AllToAll, on a GPU GraphAllToAll
    topk_idx: torch.Tensor
    shape: torch.Size
    dispatched: Dispatched | GraphDispatched | None = None  # before it is received
    output: torch.Tensor | None = None  # on a GPU: what get_next_low_latency_combine_buffer gave

    def received(self) -> Any:
        """UsageError before it is."""
        if self.dispatched is None:
            raise UsageError("combine before the hook of its dispatch was called: nothing is received yet")
        return self.dispatched


class _Sizes(NamedTuple):
    """The sizes that an AllToAll is made for."""

    max_tokens: int
    hidden: int
    experts: int
    top_k: int
    fp8: bool
    device: torch.device


def _exchanges_of(buffer: Buffer) -> list[Any]:
    return list(buffer._exchanges.values())


class Buffer:
    """One rank's buffer. A context manager; destroy() ends it too.

    Threads: one at a time. At most two dispatches may be without their combine; what a dispatch returned is valid until
    the second-next one. Each new set of sizes is set up at its first dispatch, which all ranks call alike. When a rank
    is gone, calls and hooks of the others raise PeerLost; when it does not come, WaitTimeout that names it. On a GPU
    calls do not wait, so what has happened is raised by a later one, by check(), or at the end.
    """

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        transport: str = "auto",
        timeout_s: float = 30.0,
    ) -> None:
        """group: of torch.distributed, with a backend for CPU tensors.

        num_rdma_bytes, num_qps_per_rank, allow_nvlink_for_low_latency_mode and allow_mnnvl say how DeepEP uses its
        hardware and mean nothing here: memory is taken for each set of sizes. transport: of crossrail.Engine;
        timeout_s: how long a call or hook waits for the other ranks.
        """
        check_seconds(timeout_s=timeout_s)
        _refuse("low_latency_mode", low_latency_mode, True, "there are no high-throughput calls")
        _refuse("num_nvl_bytes", num_nvl_bytes, 0, "there are no high-throughput calls")
        _refuse("enable_shrink", enable_shrink, False, "ranks cannot be masked by hand")
        _refuse("comm", comm, None, "a group of torch.distributed is needed")
        self.group = group
        self.rank: int = group.rank()
        self.group_size: int = group.size()
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self._timeout_s = timeout_s
        self._kernels: dict[torch.device, Kernels] = {}
        self._engine = xr.Engine(f"deepep-{self.rank}", transport=transport)
        self._exchanges: dict[_Sizes, Any] = {}

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        with (
            contextlib.nullcontext() if kind is None else contextlib.suppress(CrossrailError)
        ):  # the first is the one to see
            self._close()

    def destroy(self) -> None:
        """Frees everything. Idempotent. UsageError unless made with explicitly_destroy=True."""
        if not self.explicitly_destroy:
            raise UsageError("destroy() is for a Buffer made with explicitly_destroy=True")
        self._close()

    def check(self) -> None:
        """Not of DeepEP: raises what has ended the rounds on a GPU, if anything has. Graphs that are replayed say
        nothing.
        """
        for exchange in self._exchanges.values():
            if isinstance(exchange, GraphAllToAll):
                exchange.check()

    def _close(self) -> None:
        """Closes all of them, whatever one of them raises, and then raises that."""
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._engine.close)
            for exchange in self._exchanges.values():
                last_first.callback(exchange.close)
            self._exchanges = {}

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that one rank takes for these sizes, at a top-k of 8 and with rows in bfloat16."""
        sizes = _Sizes(num_max_dispatch_tokens_per_rank, hidden, num_experts, min(8, num_experts), False, _HOST)
        config = Config(
            world=num_ranks, private_tokens=None, padding=1, node_size=None, dp_size=1, capacity_factor=None,
            on_lost="raise", **_options(sizes),
        )  # fmt: skip
        return BoardLayout(config, 0).nbytes + PARITIES * config.output_rows[0] * config.x_row_bytes

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Does nothing: rounds are numbered, so nothing that an earlier one left is taken for a later one's."""

    @is_told_by(_exchanges_of)
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, torch.Tensor, Handle, Event, Callable[[], None] | None]:
        """(recv_x, recv_count, handle, event, hook).

        x: [tokens, hidden], bfloat16, contiguous; topk_idx: [tokens, top_k], int64, -1: none. recv_x: [local experts,
        ranks * max tokens, hidden], of each expert the first recv_count rows, in the order of (source rank, token, k);
        with use_fp8 a pair of float8_e4m3fn and float32 scales [local experts, ranks * max tokens, hidden / 128], whose
        last but one dimension is the contiguous one. recv_count: [local experts], int32.
        cumulative_local_expert_recv_stats: [local experts], int32, to which recv_count is added. num_experts: a
        multiple of the number of ranks. With return_recv_hook
        the call only sends, and all of that is there once hook() has returned.
        """
        _refuse("dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats, None, "waiting is not measured")
        _refuse("round_scale", round_scale, False, "scales are not rounded to powers of two")
        _refuse("use_ue8m0", use_ue8m0, False, "scales are float32")
        _check_finish(async_finish, return_recv_hook)
        _check("x", x, torch.bfloat16, 2)
        _check("topk_idx", topk_idx, torch.int64, 2)
        local_experts = self._local_experts(num_max_dispatch_tokens_per_rank, num_experts)
        stats = cumulative_local_expert_recv_stats
        if stats is not None:
            _check("cumulative_local_expert_recv_stats", stats, torch.int32, 1, (local_experts,))
        sizes = _Sizes(num_max_dispatch_tokens_per_rank, x.shape[1], num_experts, topk_idx.shape[1], use_fp8, x.device)
        exchange = self._exchange(sizes)
        rows, scales = x, None
        if use_fp8:
            codes, scales = self._kernels_on(x.device).quantize(x, _SCALE_BLOCK)
            rows = codes.view(torch.float8_e4m3fn)
        opened = exchange.dispatch_send(rows, scales, topk_idx)
        arriving, arriving_scales = exchange.arriving(opened)
        recv_x = arriving.view(-1, self.group_size * sizes.max_tokens, sizes.hidden)
        recv_scales = _column_major(recv_x.shape, arriving_scales)
        recv_count = torch.zeros(len(recv_x), dtype=torch.int32, device=x.device)
        handle = Handle(exchange, topk_idx, recv_x.shape)

        def receive() -> None:
            handle.dispatched = exchange.dispatch_recv(opened)
            recv_count.copy_(handle.dispatched.counts)
            if recv_scales is not None:
                _turn(arriving_scales, handle.dispatched, recv_scales)
            if stats is not None:
                stats.add_(recv_count)

        hook = _now_or_later(receive, return_recv_hook)
        received = recv_x if recv_scales is None else (recv_x, recv_scales)
        return received, recv_count, handle, Event(valid=async_finish), hook

    @is_told_by(_exchanges_of)
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Handle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Event, Callable[[], None] | None]:
        """(combined_x, event, hook).

        x: [local experts, ranks * max tokens, hidden], bfloat16, what experts made of recv_x; copied before the call
        returns, unless it is what get_next_low_latency_combine_buffer gave. topk_idx: as dispatched; topk_weights:
        [tokens, top_k], float32. combined_x: [tokens, hidden], bfloat16, or out: summed in float32 in the order of k.
        With return_recv_hook the call only sends, and combined_x is there once hook() has returned; topk_weights must
        stay as they are until then.
        """
        _refuse("use_logfmt", use_logfmt, False, "rows travel in bfloat16")
        _refuse("combine_wait_recv_cost_stats", combine_wait_recv_cost_stats, None, "waiting is not measured")
        _check_finish(async_finish, return_recv_hook)
        _check("x", x, torch.bfloat16, 3)
        _check_handle(handle)
        if x.shape != handle.shape:
            raise UsageError(f"x has shape {tuple(x.shape)}, must have {tuple(handle.shape)} of the dispatch")
        _check("topk_idx", topk_idx, torch.int64, 2)
        # On a GPU to compare is to wait.
        is_same = topk_idx.shape == handle.topk_idx.shape and (
            topk_idx.is_cuda or torch.equal(topk_idx, handle.topk_idx)
        )
        if topk_idx is not handle.topk_idx and not is_same:
            raise UsageError("topk_idx is not that of the dispatch")
        shape = (len(topk_idx), x.shape[2])
        # Before anything is sent: what is refused now may be called again.
        _check("topk_weights", topk_weights, torch.float32, 2, topk_idx.shape)
        combined = torch.empty(shape, dtype=torch.bfloat16, device=x.device) if out is None else out
        exchange, dispatched = handle.exchange, handle.received()
        exchange.check_combine(dispatched, topk_weights, out=combined)
        if zero_copy and x.data_ptr() != self.get_next_low_latency_combine_buffer(handle).data_ptr():
            raise UsageError("zero_copy: x must be what get_next_low_latency_combine_buffer gave for this handle")
        exchange.combine_send(x.view(-1, x.shape[2]), dispatched)

        def receive() -> None:
            exchange.combine_recv(dispatched, topk_weights, out=combined)

        return combined, Event(valid=async_finish), _now_or_later(receive, return_recv_hook)

    @uncompiled
    def get_next_low_latency_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """Where experts may write what they make, of the shape of recv_x, bfloat16: in host memory combine then copies
        nothing. On a GPU it copies the rows that are sent, from wherever they are.

        In host memory other ranks read it, even after our combine has returned: from low_latency_combine on it must
        stay as it is until the second-next dispatch is received.
        """
        _check_handle(handle)
        dispatched = handle.received()
        if isinstance(dispatched, Dispatched):
            return handle.exchange.expert_output(dispatched).view(handle.shape)
        if handle.output is None:
            handle.output = torch.empty(handle.shape, dtype=torch.bfloat16, device=dispatched.x.device)
        return handle.output

    def _local_experts(self, max_tokens: object, experts: int) -> int:
        """How many each rank has: as DeepEP's callers count them, by a division. UsageError where that leaves some."""
        check_whole(num_max_dispatch_tokens_per_rank=max_tokens, num_experts=experts)
        if experts % self.group_size != 0:
            raise UsageError(f"num_experts is {experts}, must be a multiple of the number of ranks, {self.group_size}")
        return experts // self.group_size

    def _exchange(self, sizes: _Sizes) -> Any:
        found = self._exchanges.get(sizes)
        if found is None:
            group, kind = TorchGroup(self.group), AllToAll if sizes.device == _HOST else GraphAllToAll
            found = kind(self._engine, group, **_options(sizes), device=sizes.device, timeout_s=self._timeout_s)
            self._exchanges[sizes] = found
        return found

    def _kernels_on(self, device: torch.device) -> Kernels:
        if device not in self._kernels:
            self._kernels[device] = CpuKernels() if device == _HOST else kernels_of_a_gpu()
        return self._kernels[device]


def _options(sizes: _Sizes) -> dict[str, Any]:
    """Options of AllToAll."""
    return {
        "experts": sizes.experts,
        "hidden": sizes.hidden,
        "top_k": sizes.top_k,
        "max_tokens": sizes.max_tokens,
        "dtype": "float8_e4m3fn" if sizes.fp8 else "bfloat16",
        "scale_block": _SCALE_BLOCK if sizes.fp8 else None,
        "out_dtype": "bfloat16",
        "layout": "masked",
    }


def _column_major(shape: torch.Size, scales: torch.Tensor | None) -> torch.Tensor | None:
    """Empty, for the scales of rows of that shape; None where there are none."""
    if scales is None:
        return None
    return torch.empty((shape[0], scales.shape[1], shape[1]), device=scales.device).transpose(1, 2)


def _turn(scales: torch.Tensor, dispatched: Dispatched | GraphDispatched, target: torch.Tensor) -> None:
    """The scales of the rows that came. scales: [local experts * rows, blocks]; target: of _column_major."""
    by_expert = scales.view(target.shape)
    if not isinstance(dispatched, Dispatched):  # only the GPU knows how many
        target.copy_(by_expert)
        return
    for expert, count in enumerate(dispatched.counts.tolist()):
        target[expert, :count] = by_expert[expert, :count]


def _now_or_later(receive: Callable[[], None], later: bool) -> Callable[[], None] | None:
    """The function that the caller calls to receive; None if that was done here."""
    if later:
        return receive
    receive()
    return None


def _refuse(argument: str, value: object, only: object, why: str) -> None:
    if value is not only and value != only:
        raise UsageError(f"{argument}={value!r} is not supported, only {only!r}: {why}")


def _check_handle(handle: object) -> None:
    if not isinstance(handle, Handle):
        raise UsageError(f"handle is {type(handle).__name__}, must be what low_latency_dispatch gave")


def _check_finish(async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise UsageError("async_finish and return_recv_hook exclude each other")


def _check(
    argument: str, tensor: torch.Tensor, dtype: torch.dtype, dimensions: int, shape: tuple[int, ...] | None = None
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{argument} is {type(tensor).__name__}, must be a tensor of torch")
    if tensor.dtype != dtype or tensor.dim() != dimensions or not tensor.is_contiguous():
        raise UsageError(
            f"{argument} is {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}, must be "
            f"{dtype}, contiguous, of {dimensions} dimensions"
        )
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise UsageError(f"{argument} has shape {tuple(tensor.shape)}, must have {tuple(shape)}")
    if tensor.device.type not in ("cpu", "cuda"):
        raise UsageError(f"{argument} is on {tensor.device}, must be in host memory or on one of NVIDIA's GPUs")
