"""One rank's process: it takes orders from `ranks.py` and answers with its begin and end times."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

import crossrail as xr
from crossrail import _core
from crossrail.cli.bench.moe.gate import Gate
from crossrail.cli.bench.moe.ordinary import Ordinary
from crossrail.cli.bench.moe.work import SCALE_BLOCK, MoeShape, RankWork, expert_output, rows_between
from crossrail.cli.child import answer_calls
from crossrail.errors import CrossrailError
from crossrail.moe import AllToAll, Dispatched, EngineGroup

_TIMEOUT_S = 60.0
_COPY_CALL_BYTES = 32 << 20
# Routes are drawn uniformly: the worst case of all tokens at one rank would need eight times as much.
_SPARE_ROWS = 1.25

Times = dict[str, list[tuple[int, int]]]  # by what: of each round, when this rank came, and when it was done


class _Rank:
    """Lifecycle: open, join, verify, then run as often as one likes."""

    def open(self, name: str, transport: str) -> str:
        """The engine's address in hexadecimal."""
        self._engine = xr.Engine(name, transport=transport)
        return self._engine.address.to_bytes().hex()

    def join(self, rank: int, addresses: list[str], shape: dict[str, Any], gate_fd: int, shares_core: bool) -> None:
        """Joins the group; called on all ranks at once."""
        self._shape = MoeShape(**shape)
        self._rank, self._ranks = rank, len(addresses)
        self._gate = Gate(gate_fd, rank, self._ranks, sleeps=shares_core)
        self._work = RankWork(self._shape, rank)
        group = EngineGroup(self._engine, [xr.Address.from_bytes(bytes.fromhex(address)) for address in addresses])
        self._all_to_all = AllToAll(
            self._engine,
            group,
            experts=self._shape.experts,
            hidden=self._shape.hidden,
            top_k=self._shape.top_k,
            max_tokens=self._shape.tokens,
            dtype="float8_e4m3fn",
            scale_block=SCALE_BLOCK,
            out_dtype="bfloat16",
            capacity_factor=_SPARE_ROWS,
            timeout_s=_TIMEOUT_S,
        )
        self._rows = int(rows_between(self._shape, self._ranks)[:, rank].sum())
        self._out = np.empty((self._shape.tokens, self._shape.hidden), np.uint16)
        # Touched here, so that no page is first met while the clock runs.
        self._scratch = np.ones(self._rows * max(2 * self._shape.row_bytes, self._shape.back_bytes), np.uint8)

    def verify(self) -> None:
        """A round that is not timed, every byte of it compared."""
        dispatched = self._dispatch()
        if not np.array_equal(dispatched.counts.sum(), self._rows):
            raise CrossrailError(f"rank {self._rank} received {dispatched.counts.sum()} rows, not {self._rows}")
        self._check_rows(dispatched)
        y = self._all_to_all.expert_output(dispatched)
        y[: self._rows] = expert_output(dispatched.x[: self._rows])
        self._all_to_all.combine(y, dispatched, self._work.weights, out=self._out)
        if not np.array_equal(self._out, expert_output(self._work.x)):
            raise CrossrailError(f"rank {self._rank}: what combine gave is not what the experts made")

    def run(self, rounds: int) -> Times:
        """Rounds of dispatch and combine, each step of it just after copying the same bytes."""
        times: Times = {"copy-dispatch": [], "dispatch": [], "copy-combine": [], "combine": []}
        nbytes = self._rows * self._shape.row_bytes
        sent, arrived = self._scratch[:nbytes], self._scratch[nbytes : 2 * nbytes]
        for _ in range(rounds):
            self._timed(times, "copy-dispatch", partial(self._copy, arrived, sent))
            dispatched = self._timed(times, "dispatch", self._dispatch)
            y = self._all_to_all.expert_output(dispatched)
            y[: self._rows] = 0x3F80  # as experts would have just written it
            back = y[: self._rows].reshape(-1).view(np.uint8)
            self._timed(times, "copy-combine", partial(self._copy, self._scratch[: len(back)], back))
            self._timed(times, "combine", partial(self._combine, y, dispatched))
        return times

    def open_ordinary(self, meeting: str) -> None:
        """All ranks at once. meeting: path of a file that does not exist yet. Its results are compared with ours."""
        self._ordinary = Ordinary(meeting, self._shape, self._work, self._rank, self._ranks)
        x, scales = self._ordinary.dispatch()
        ours = self._dispatch()
        same = np.array_equal(ours.x[: self._rows], x.numpy()) and np.array_equal(
            ours.scales[: self._rows], scales.numpy()
        )
        if not same:
            raise CrossrailError(f"rank {self._rank}: torch.distributed and we dispatch different rows")
        self._combine(self._all_to_all.expert_output(ours), ours)
        self._ordinary.combine(self._ordinary.outputs())

    def run_ordinary(self, rounds: int) -> Times:
        """Runs the same rounds by torch.distributed, with the bare exchanges in them."""
        times: Times = {"dispatch": [], "combine": [], "exchange-dispatch": [], "exchange-combine": []}
        ordinary = self._ordinary
        for _ in range(rounds):
            self._timed(times, "dispatch", ordinary.dispatch)
            y = ordinary.outputs()
            self._timed(times, "combine", partial(ordinary.combine, y))
            self._timed(times, "exchange-dispatch", ordinary.exchange_out)
            self._timed(times, "exchange-combine", ordinary.exchange_back)
        return times

    def _timed(self, times: Times, what: str, act: Callable[[], Any]) -> Any:
        came_ns = self._gate.pass_together()
        result = act()
        times[what].append((came_ns, time.monotonic_ns()))
        self._gate.pass_together()  # what comes next needs a core that another rank may still be working on
        return result

    def _dispatch(self) -> Dispatched:
        return self._all_to_all.dispatch(self._work.x, self._work.scales, self._work.indices)

    def _combine(self, y: Any, dispatched: Dispatched) -> None:
        self._all_to_all.combine(y, dispatched, self._work.weights, out=self._out)

    def _copy(self, dst: npt.NDArray[np.uint8], src: npt.NDArray[np.uint8]) -> None:
        _core.bench.copy_in_calls(dst, src, _COPY_CALL_BYTES)

    def _check_rows(self, dispatched: Dispatched) -> None:
        """Checks each expert's rows, by (source rank, token, k), against the source's."""
        first = self._all_to_all.config.split.of(self._rank).start
        at = dispatched.offsets[:-1].copy()
        for source in range(self._ranks):
            theirs = RankWork(self._shape, source)
            for local in range(len(dispatched.counts)):
                tokens = np.nonzero(theirs.indices == first + local)[0]
                rows = slice(at[local], at[local] + len(tokens))
                at[local] += len(tokens)
                same = np.array_equal(dispatched.x[rows], theirs.x[tokens])
                if not same or not np.array_equal(dispatched.scales[rows], theirs.scales[tokens]):
                    raise CrossrailError(f"rank {self._rank}: rows of expert {first + local} are not rank {source}'s")


if __name__ == "__main__":
    this = _Rank()
    handlers = (this.open, this.join, this.verify, this.run, this.open_ordinary, this.run_ordinary)
    answer_calls({handler.__name__: handler for handler in handlers})
