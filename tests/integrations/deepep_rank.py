"""One rank with a Buffer, in a process of its own; compares what it gets with what all ranks were given."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from crossrail.cli.child import answer_calls
from crossrail.errors import CrossrailError
from crossrail.integrations import deepep
from crossrail.integrations.deepep import Buffer, Handle
from crossrail.moe import AllToAll, PeerFailed
from crossrail.moe.graph import GraphAllToAll
from crossrail.moe.kernels import CpuKernels
from crossrail.moe.links import notes
from tests.moe.workloads import Workload

_BLOCK = 128


class _Rank:
    def open(self, rank: int, ranks: int, meeting: str, kind: str) -> None:
        """kind: of what a Buffer has on a GPU, or in host memory; either also does without a GPU."""
        deepep.AllToAll = {"AllToAll": AllToAll, "GraphAllToAll": GraphAllToAll}[kind]  # type: ignore[misc,assignment]
        torch.set_num_threads(1)
        notes._MEND_S = 60.0  # a machine may take long between a refused call and the next one
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
        self.rank = rank
        self.buffer = Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True, timeout_s=60.0)

    def close(self) -> None:
        self.buffer.destroy()
        dist.destroy_process_group()

    def round(self, work: dict[str, Any], **options: Any) -> list[int]:
        """Dispatch and combine; recv_count as the statistics have it."""
        workload = Workload.from_json(work)
        sent = _Sent(workload, self.rank)
        stats = torch.zeros(workload.experts_per_rank, dtype=torch.int32)
        received = self.dispatch(workload, sent, cumulative_local_expert_recv_stats=stats, **options)
        check_received(workload, self.rank, received, options.get("use_fp8", True))
        self.combine(workload, sent, received)
        return stats.tolist()

    def overlapped(self, work: dict[str, Any]) -> None:
        """Two rounds by hooks, each half of the one between halves of the other; no copy in combine."""
        works = [Workload.from_json(work), Workload.from_json(work).after()]
        sent = [_Sent(each, self.rank) for each in works]
        received = [self.dispatch(*each, return_recv_hook=True) for each in zip(works, sent, strict=True)]
        hooks = []
        for each, of_sent, got in zip(works, sent, received, strict=True):
            got[4]()
            check_received(each, self.rank, got, fp8=True)
            y = self.buffer.get_next_low_latency_combine_buffer(got[2])
            y.copy_(experts(each, self.rank, y.shape))
            combined, _, hook = self.buffer.low_latency_combine(
                y, of_sent.topk_idx, of_sent.weights, got[2], zero_copy=True, return_recv_hook=True
            )
            hooks.append((each, combined, hook))
        for each, combined, hook in hooks:
            hook()
            check_combined(each, self.rank, combined)

    def fail_in(self, work: dict[str, Any], call: str) -> str:
        """A round up to that call, of which an argument is refused here. The error; go_on() makes the call."""
        workload = Workload.from_json(work)
        sent = _Sent(workload, self.rank)
        if call == "low_latency_dispatch":
            return self.refused(call, dtype="float32")
        self.received = self.dispatch(workload, sent)
        y = experts(workload, self.rank, self.received[2].shape)
        try:
            self.buffer.low_latency_combine(y, sent.topk_idx, sent.weights.double(), self.received[2])
        except CrossrailError as error:
            return str(error)
        return ""

    def go_on(self, work: dict[str, Any], call: str) -> None:
        workload = Workload.from_json(work)
        sent = _Sent(workload, self.rank)
        if call == "low_latency_dispatch":
            self.received = self.dispatch(workload, sent)
        self.combine(workload, sent, self.received)

    def hear(self, work: dict[str, Any], call: str) -> str:
        """A round in which another rank's call fails, and is made again later: what the hook that waits for it says."""
        workload = Workload.from_json(work)
        sent = _Sent(workload, self.rank)
        self.received = self.dispatch(workload, sent, return_recv_hook=True)
        self.hook = self.received[4]
        if call == "low_latency_combine":
            self.hook()
            y = experts(workload, self.rank, self.received[2].shape)
            self.combined, _, self.hook = self.buffer.low_latency_combine(
                y, sent.topk_idx, sent.weights, self.received[2], return_recv_hook=True
            )
        try:
            with _quick_to_hear():
                self.hook()
        except PeerFailed as error:
            return f"rank {error.rank}, left: {error.has_left}: {error}"
        return ""

    def hear_on(self, work: dict[str, Any], call: str) -> None:
        workload = Workload.from_json(work)
        self.hook()
        if call == "low_latency_dispatch":
            check_received(workload, self.rank, self.received, fp8=True)
            self.combine(workload, _Sent(workload, self.rank), self.received)
        else:
            check_combined(workload, self.rank, self.combined)

    def dispatch(self, work: Workload, sent: _Sent, **options: Any) -> Any:
        return self.buffer.low_latency_dispatch(sent.x, sent.topk_idx, work.max_tokens, work.experts, **options)

    def combine(self, work: Workload, sent: _Sent, received: Any) -> None:
        handle: Handle = received[2]
        out = torch.empty(sent.x.shape, dtype=torch.bfloat16)
        y = experts(work, self.rank, handle.shape)
        refused = [(sent.weights.double(), None, "topk_weights is torch.float64")]
        refused += [(sent.weights, torch.empty((1, 1), dtype=torch.bfloat16), "out has shape [1, 1]")]
        refused += [(sent.weights, torch.empty(sent.x.shape, dtype=torch.float64), "out is of type float64")]
        if sent.x.numel() > 0:
            odd = torch.frombuffer(bytearray(2 * sent.x.numel() + 1), dtype=torch.bfloat16, offset=1)
            refused += [(sent.weights, odd.view(sent.x.shape), "out begins at 0x")]
        for weights, target, complaint in refused:  # and nothing was sent: the round goes on
            try:
                self.buffer.low_latency_combine(y, sent.topk_idx, weights, handle, out=target, return_recv_hook=True)
            except CrossrailError as error:
                assert complaint in str(error), error
            else:
                raise AssertionError(f"accepted, though {complaint}")
        combined, event, hook = self.buffer.low_latency_combine(
            y, sent.topk_idx, sent.weights, handle, out=out, async_finish=True
        )
        event.current_stream_wait()
        assert hook is None
        assert combined is out
        check_combined(work, self.rank, combined)

    def refused(self, call: str, **options: Any) -> str:
        """What a call with an option that is not there says."""
        x, topk_idx = torch.zeros((4, 256), dtype=torch.bfloat16), torch.zeros((4, 2), dtype=torch.int64)
        x = x.to(getattr(torch, options.pop("dtype", "bfloat16")))
        max_tokens, experts = options.pop("max_tokens", 4), options.pop("experts", 4)
        if (stats := options.pop("stats", None)) is not None:
            options["cumulative_local_expert_recv_stats"] = torch.zeros(*stats[:1], dtype=getattr(torch, stats[1]))
        with_it = {
            "Buffer": lambda: Buffer(dist.group.WORLD, **{"low_latency_mode": True} | options),
            "low_latency_dispatch": lambda: self.buffer.low_latency_dispatch(
                x, topk_idx, max_tokens, experts, **options
            ),
            "low_latency_combine": lambda: self.buffer.low_latency_combine(x, topk_idx, x, None, **options),
            "combine of no dispatch": lambda: self.buffer.low_latency_combine(x[None], topk_idx, x, None),
            "x of no tensor": lambda: self.buffer.low_latency_dispatch([], topk_idx, 4, 4),
        }
        try:
            with_it[call]()
        except CrossrailError as error:
            return str(error)
        return ""

    def parameters(self, call: str) -> list[str]:
        """Names, as a caller may use them."""
        return list(inspect.signature(getattr(Buffer, call)).parameters)[1:]


@contextlib.contextmanager
def _quick_to_hear() -> Iterator[None]:
    before, notes._MEND_S = notes._MEND_S, 0.2
    try:
        yield
    finally:
        notes._MEND_S = before


class _Sent:
    """What one rank dispatches: rows in bfloat16."""

    def __init__(self, work: Workload, rank: int) -> None:
        shape = (work.count(rank), work.hidden)
        x = work.rng(rank, 7).standard_normal(shape, dtype=np.float32) * 10
        self.x = torch.from_numpy(x).bfloat16()
        self.topk_idx = torch.from_numpy(work.indices(rank))
        self.weights = torch.from_numpy(work.weights(rank))


def check_received(work: Workload, rank: int, received: Any, fp8: bool) -> None:
    """Rows of each expert by (source rank, token, k), and their scales, as the sources have them."""
    recv_x, recv_count, *_ = received
    sent = [_Sent(work, source) for source in range(work.ranks)]
    for local in range(work.experts_per_rank):
        routed = [(of.topk_idx == rank * work.experts_per_rank + local).nonzero()[:, 0] for of in sent]
        rows = torch.cat([of.x[tokens] for of, tokens in zip(sent, routed, strict=True)])
        assert int(recv_count[local]) == len(rows)
        if not fp8:
            assert torch.equal(recv_x[local, : len(rows)], rows)
            continue
        x, scales = recv_x
        assert scales.stride()[1:] == (1, scales.shape[1])
        wanted, wanted_scales = CpuKernels().quantize(rows.contiguous(), _BLOCK)
        assert torch.equal(x[local, : len(rows)].view(torch.uint8), wanted)
        assert torch.equal(scales[local, : len(rows)], wanted_scales)


def experts(work: Workload, rank: int, shape: Any) -> torch.Tensor:
    """What each local expert gives for all of its rows: its number plus one."""
    first = rank * work.experts_per_rank
    numbers = torch.arange(first, first + shape[0], dtype=torch.bfloat16) + 1
    return numbers.view(-1, 1, 1).expand(shape).contiguous()


def check_combined(work: Workload, rank: int, combined: torch.Tensor) -> None:
    indices, weights = work.indices(rank), work.weights(rank)
    sums = np.where(indices >= 0, weights * (indices + 1), 0).sum(axis=1)
    assert torch.equal(combined, torch.from_numpy(sums).bfloat16()[:, None].expand(combined.shape))


if __name__ == "__main__":
    this = _Rank()
    handlers = (
        this.open, this.close, this.round, this.overlapped, this.refused, this.parameters, this.fail_in, this.go_on,
        this.hear, this.hear_on,
    )  # fmt: skip
    answer_calls({handler.__name__: handler for handler in handlers})
