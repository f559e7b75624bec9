"""One rank in a process of its own: runs rounds as it is told, and compares what it gets with the oracle."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

import crossrail as xr
from crossrail.cli.child import answer_calls
from crossrail.moe import AllToAll, Dispatched, EngineGroup
from tests.moe import oracle
from tests.moe.workloads import Workload

Array = npt.NDArray[Any]
DEADLINE_S = 60.0  # the machine may be loaded; nothing here waits for it on purpose


class Rank:
    """What the commands below work on."""

    def __init__(self) -> None:
        self.engine: xr.Engine | None = None
        self.group: EngineGroup | None = None
        self._all_to_all: tuple[tuple[Any, ...], AllToAll] | None = None

    def open(self, name: str, transport: str) -> str:
        self.engine = xr.Engine(name, transport=transport)
        return self.engine.address.to_bytes().hex()

    def join(self, addresses: list[str]) -> None:
        assert self.engine is not None
        self.group = EngineGroup(self.engine, [xr.Address.from_bytes(bytes.fromhex(a)) for a in addresses])

    def close(self) -> None:
        self._drop()
        if self.engine is not None:
            self.engine.close()

    def round(self, work: dict[str, Any], options: dict[str, Any], style: str) -> str:
        """One round, in the way `style` of STYLES; the digest of all that came."""
        workload = Workload.from_json(work)
        all_to_all = self._opened(workload, options)
        assert self.group is not None
        digest = hashlib.sha256()
        for array in STYLES[style](all_to_all, workload, self.group.rank):
            digest.update(np.ascontiguousarray(array).view(np.uint8))
        return digest.hexdigest()

    def _opened(self, work: Workload, options: dict[str, Any]) -> AllToAll:
        key = (work.experts, work.hidden, work.top_k, work.max_tokens, work.dtype, work.out_dtype, work.scale_block)
        key = (*key, *sorted(options.items()))
        if self._all_to_all is None or self._all_to_all[0] != key:
            self._drop()
            assert self.engine is not None and self.group is not None
            opened = AllToAll(
                self.engine,
                self.group,
                experts=work.experts,
                hidden=work.hidden,
                top_k=work.top_k,
                max_tokens=work.max_tokens,
                dtype=work.dtype,
                out_dtype=work.out_dtype,
                scale_block=work.scale_block,
                timeout_s=DEADLINE_S,
                **options,
            )
            self._all_to_all = (key, opened)
        return self._all_to_all[1]

    def _drop(self) -> None:
        if self._all_to_all is not None:
            self._all_to_all[1].close()
            self._all_to_all = None


def whole(all_to_all: AllToAll, work: Workload, rank: int) -> list[Array]:
    """dispatch, then combine."""
    dispatched = all_to_all.dispatch(work.x(rank), work.scales(rank), work.indices(rank))
    arrays = check_dispatched(work, rank, dispatched)
    y = np.empty((dispatched.x.shape[0], work.hidden), _numpy_dtype(work))
    run_experts(work, rank, dispatched, y)
    return [*arrays, check_combined(work, rank, all_to_all.combine(y, dispatched, work.weights(rank)))]


def in_place(all_to_all: AllToAll, work: Workload, rank: int) -> list[Array]:
    """The same, in halves, the experts' output written where combine reads it, onto what was there before."""
    opened = all_to_all.dispatch_send(work.x(rank), work.scales(rank), work.indices(rank))
    dispatched = all_to_all.dispatch_recv(opened)
    arrays = check_dispatched(work, rank, dispatched)
    y = all_to_all.expert_output(dispatched)
    run_experts(work, rank, dispatched, y)
    all_to_all.combine_send(y, dispatched)
    before = oracle.combined(work, rank)
    out = before.copy()
    all_to_all.combine_recv(dispatched, work.weights(rank), out=out, accumulate=True)
    twice = oracle.doubled(work, before)
    np.testing.assert_array_equal(out, twice)
    return [*arrays, out]


def overlapped(all_to_all: AllToAll, work: Workload, rank: int) -> list[Array]:
    """Two micro-batches, each with half of its transfers under way while the other one computes."""
    first = all_to_all.dispatch_send(work.x(rank), work.scales(rank), work.indices(rank))
    second_work = work.after()
    second = all_to_all.dispatch_send(second_work.x(rank), second_work.scales(rank), second_work.indices(rank))
    arrays, sent = [], []
    for batch, opened in ((work, first), (second_work, second)):
        dispatched = all_to_all.dispatch_recv(opened)
        arrays += check_dispatched(batch, rank, dispatched)
        y = all_to_all.expert_output(dispatched)
        run_experts(batch, rank, dispatched, y)
        all_to_all.combine_send(y, dispatched)
        sent.append((batch, dispatched))
    for batch, dispatched in sent:
        got = all_to_all.combine_recv(dispatched, batch.weights(rank))
        arrays.append(check_combined(batch, rank, got))
    return arrays


def fractions(all_to_all: AllToAll, work: Workload, rank: int) -> list[Array]:
    """Weights with which every product and every sum is rounded."""
    dispatched = all_to_all.dispatch(work.x(rank), work.scales(rank), work.indices(rank))
    y = all_to_all.expert_output(dispatched)
    run_experts(work, rank, dispatched, y)
    weights = work.rng(rank, 4).random((work.count(rank), work.top_k), dtype=np.float32)
    got = all_to_all.combine(y, dispatched, weights)
    np.testing.assert_array_equal(got, oracle.combined(work, rank, weights))
    return [got]


STYLES = {"whole": whole, "in-place": in_place, "overlapped": overlapped, "fractions": fractions}


def check_dispatched(work: Workload, rank: int, dispatched: Dispatched) -> list[Array]:
    """Against the oracle; what came, without padding."""
    wanted = oracle.received(work, rank)
    np.testing.assert_array_equal(dispatched.counts, wanted.counts)
    x = valid_rows(dispatched, dispatched.x)
    np.testing.assert_array_equal(x, wanted.x)
    if wanted.scales is None:
        assert dispatched.scales is None
        return [x]
    scales = valid_rows(dispatched, dispatched.scales)
    np.testing.assert_array_equal(scales, wanted.scales)
    return [x, scales]


def check_combined(work: Workload, rank: int, got: Array) -> Array:
    np.testing.assert_array_equal(got, oracle.combined(work, rank))
    return got


def valid_rows(dispatched: Dispatched, array: Array) -> Array:
    """Of all experts, one after another, without what pads them."""
    groups = zip(dispatched.offsets, dispatched.counts, strict=False)
    return np.concatenate([array[:0], *(array[first : first + count] for first, count in groups)])


def run_experts(work: Workload, rank: int, dispatched: Dispatched, y: Array) -> None:
    """Into y: [rows, hidden]. What pads it is made a number that would show."""
    y.view(np.uint8)[:] = 0x55
    for local, count in enumerate(dispatched.counts):
        rows = slice(dispatched.offsets[local], dispatched.offsets[local] + count)
        scales = None if dispatched.scales is None else dispatched.scales[rows]
        y[rows] = oracle.expert(work, work.experts_of(rank)[local], dispatched.x[rows], scales)


def _numpy_dtype(work: Workload) -> str:
    return "uint16" if work.out_dtype == "bfloat16" else work.out_dtype


if __name__ == "__main__":
    rank = Rank()
    answer_calls({"open": rank.open, "join": rank.join, "round": rank.round, "close": rank.close})
