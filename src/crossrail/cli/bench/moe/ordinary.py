"""The ordinary way, for comparison: torch.distributed's all_to_all_single over gloo, with the same routes and results.

dispatch packs rows by expert, exchanges their numbers, then the rows, and sorts by expert; combine undoes that and
sums. exchange_out and exchange_back are the bare exchanges of the same rows, with sizes known and nothing else done.
All large tensors are allocated once and reused: fresh memory would cost more than the rest.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from crossrail.cli.bench.moe.work import MoeShape, RankWork, rows_between

_TIMEOUT = timedelta(seconds=120)


class Ordinary:
    """One rank of the exchange. Threads: one; torch uses no more either, since each rank has one core.

    The result of a call is valid until the next call.
    """

    def __init__(self, meeting: str, shape: MoeShape, work: RankWork, rank: int, ranks: int) -> None:
        """Returns when all ranks have come. meeting: path of a file that is not there yet."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        meeting = f"file://{meeting}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=_TIMEOUT)
        self._torch: Any = torch
        self._exchange: Any = dist.all_to_all_single
        self._shape, self._ranks = shape, ranks
        self._x, self._scales = torch.from_numpy(work.x), torch.from_numpy(work.scales)
        self._indices, self._weights = torch.from_numpy(work.indices), torch.from_numpy(work.weights)
        rows = rows_between(shape, ranks)
        self._sent, self._received = rows[rank].tolist(), rows[:, rank].tolist()
        # Buffers for sending, receiving and results: dispatch and combine take turns with the same memory.
        nbytes = max(sum(self._sent), sum(self._received)) * shape.back_bytes
        self._memory = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(3)]
        self._of_tokens = torch.ones((shape.tokens, shape.hidden), dtype=torch.bfloat16)
        self._product, self._sums = (
            torch.ones_like(self._of_tokens, dtype=torch.float32),
            torch.ones_like(self._x).float(),
        )

    def dispatch(self) -> Any:
        """x and scales of our experts' rows, sorted by expert."""
        torch, shape = self._torch, self._shape
        routed = self._indices.flatten()
        self._order = torch.argsort(routed, stable=True)
        tokens = self._order // shape.top_k
        counts = torch.bincount(routed, minlength=-(-shape.experts // self._ranks) * self._ranks)
        theirs = torch.empty_like(counts)
        self._exchange(theirs, counts)
        of_ranks = theirs.view(self._ranks, -1)
        received, sent = of_ranks.sum(1).tolist(), counts.view(self._ranks, -1).sum(1).tolist()
        experts = torch.arange(of_ranks.shape[1]).repeat(self._ranks).repeat_interleave(theirs)
        by_expert = torch.argsort(experts, stable=True)
        self._arrival = _inverse(torch, by_expert)
        sorted_rows = []
        taken = [0, 0, 0]  # bytes of each memory, the scales behind the rows
        for whole in (self._x, self._scales):
            packed, arrived, ordered = (
                self._rows(which, taken, length, whole.shape[1], whole.dtype)
                for which, length in enumerate((sum(sent), sum(received), sum(received)))
            )
            torch.index_select(whole, 0, tokens, out=packed)
            self._exchange(arrived, packed, received, sent)
            sorted_rows.append(torch.index_select(arrived, 0, by_expert, out=ordered))
        return tuple(sorted_rows)

    def combine(self, y: Any) -> Any:
        """[tokens, hidden] in bfloat16: the sum of what the experts gave, by weights, in float32. y: of outputs()."""
        torch, shape = self._torch, self._shape
        taken = [0, 0, 0]
        unsorted = self._rows(1, taken, len(y), shape.hidden, y.dtype)
        back = self._rows(2, taken, len(self._order), shape.hidden, y.dtype)
        torch.index_select(y, 0, self._arrival, out=unsorted)
        self._exchange(back, unsorted, self._sent, self._received)
        at = _inverse(torch, self._order)
        self._sums.zero_()
        for k in range(shape.top_k):
            torch.index_select(back, 0, at[k :: shape.top_k], out=self._of_tokens)
            self._sums.addcmul_(self._product.copy_(self._of_tokens), self._weights[:, k : k + 1])
        return self._of_tokens.copy_(self._sums)

    def outputs(self) -> Any:
        """The experts' outputs, [rows, hidden] in bfloat16: ones, where combine expects them."""
        rows = sum(self._received)
        return self._rows(0, [0], rows, self._shape.hidden, self._torch.bfloat16).fill_(1.0)

    def exchange_out(self) -> None:
        """Packed rows to the experts' ranks."""
        sent, received = self._packed(self._shape.row_bytes)
        self._exchange(received, sent, self._received, self._sent)

    def exchange_back(self) -> None:
        """And back."""
        sent, received = self._packed(self._shape.back_bytes)
        self._exchange(sent, received, self._sent, self._received)

    def _packed(self, row_bytes: int) -> tuple[Any, Any]:
        sent, received = (
            self._rows(which, [0, 0], sum(rows), row_bytes, self._torch.uint8)
            for which, rows in enumerate((self._sent, self._received))
        )
        return sent, received

    def _rows(self, which: int, taken: list[int], rows: int, columns: int, dtype: Any) -> Any:
        """[rows, columns] behind what is taken of one of the memories."""
        begin = taken[which]
        taken[which] += rows * columns * dtype.itemsize
        return self._memory[which][begin : taken[which]].view(dtype).view(rows, columns)


def _inverse(torch: Any, permutation: Any) -> Any:
    """Where each entry went."""
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(len(permutation))
    return inverse
