"""Ranks that share no memory with us: their rows go by the rails, posted and counted by the native proxy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

import crossrail as xr
from crossrail import _core
from crossrail.errors import WaitTimeout
from crossrail.moe.board import PARITIES
from crossrail.moe.config import NUMPY_TYPES, TAG_BYTES, Config
from crossrail.moe.far_memory import FarMemory
from crossrail.moe.kernels import Kernels
from crossrail.moe.node_sums import tags_of
from crossrail.moe.troubles import trouble

_SETTLE_S = 5.0  # for the thread that posts, which has little to do
_FENCE_S = 1e-3
_WHAT_IS_DUE = {"routes": "dispatch", "rows": "rows of dispatch", "results": "combine"}

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class _Half:
    """Parts of the memory for one parity, as arrays; see moe/proxy.h."""

    rows_in: Array
    results_in: Array
    rows_out: Array
    results_out: Array


class Far:
    """One per AllToAll whose ranks do not all share memory. Threads: one at a time.

    Lifecycle: 1. made, and start_thread() perhaps. 2. card() is given to all ranks, and connect() gets theirs. 3.
    rounds. 4. stop_thread().
    """

    def __init__(
        self, engine: xr.Engine, config: Config, layout: _core.moe.Layout, rank: int, kernels: Kernels
    ) -> None:
        self._engine = engine
        self._config = config
        self._kernels = kernels
        self._rank = rank
        memory = FarMemory.of(config, layout)
        self.region = engine.alloc(memory.nbytes)
        self._masks = config.on_lost == "mask"
        self._proxy = _core.moe.Proxy(engine, layout, rank, memory.as_native(), self.region, self._masks)
        self.ranks = self._proxy.far_ranks()
        # Where ranks may be masked each has a registration of its own, which can be taken from it.
        self._doors = {other: engine.register(self.region.view()) for other in self.ranks if self._masks}
        self.private_rows = memory.bounds.private_rows
        self._addresses: dict[int, xr.Address] = {}
        view = self.region.view()
        item = NUMPY_TYPES[config.out_dtype]

        def rows(name: str, parity: int, dtype: str, width: int) -> Array:
            count = memory.parts[name] // np.dtype(dtype).itemsize
            begin = parity * memory.parity_bytes + memory.offsets[name]
            return np.frombuffer(view, dtype, count, begin).reshape(-1, width)

        self._halves = [
            _Half(
                rows("rows_in", parity, "uint8", config.stride_bytes),
                rows("results_in", parity, item, config.hidden),
                rows("rows_out", parity, "uint8", config.stride_bytes),
                rows("results_out", parity, item, config.hidden),
            )
            for parity in range(PARITIES)
        ]

    def start_thread(self, cpu: int | None) -> None:
        """From now on a thread posts, not the caller: on that core, or wherever this process may run."""
        self._proxy.start_thread(cpu)

    def stop_thread(self) -> None:
        """Ends it, once it has posted what it was told to. Idempotent."""
        self._proxy.stop_thread()

    def card(self) -> dict[str, Any]:
        """What the far ranks need to know of us."""
        imms = {str(rank): self._proxy.imms_for(rank) for rank in self.ranks}
        doors = {str(rank): self._doors.get(rank, self.region) for rank in self.ranks}
        return {"memory": {rank: door.descriptor.to_bytes().hex() for rank, door in doors.items()}, "imms": imms}

    def connect(self, cards: Sequence[dict[str, Any]], addresses: Sequence[xr.Address], timeout_s: float) -> None:
        """cards, addresses: of all ranks."""
        self._addresses = dict(enumerate(addresses))
        for rank in range(self._config.world):
            if rank in self.ranks:
                self._engine.connect(addresses[rank], timeout_s)
                descriptor = xr.RegionDescriptor.from_bytes(bytes.fromhex(cards[rank]["memory"][str(self._rank)]))
                self._proxy.connect(rank, descriptor, cards[rank]["imms"][str(self._rank)])
            elif rank != self._rank:
                self._proxy.watch(addresses[rank], rank)

    # ---- dispatch

    def send(self, number: int, counts: Array, timeout_s: float) -> None:
        """Our routes; once the memory of the round before the last is free again."""
        told = self._proxy.wait_sent(number, timeout_s)
        if not (self._masks and told[0] in ("peer-lost", "failed")):  # else it is for those who wait to see to that
            self._check(told, f"dispatch of round {number}", timeout_s)
        self._proxy.send_routes(number, counts)

    def send_rows(self, number: int, x: Array, scales: Array | None, weights: Array | None, routes: Array) -> None:
        """The rows of these routes, which are in the order of Placement.send_far. weights: with node_sums."""
        if len(routes) > 0:
            rows = self._halves[number % PARITIES].rows_out
            self._kernels.pack(rows, x, scales, routes // np.int32(self._config.top_k))
            if self._config.node_sums and weights is not None:
                rows[: len(routes), -TAG_BYTES:] = tags_of(routes, weights)
        self._proxy.send_rows(number)
        if self._masks:
            self._proxy.send_remainder(number, None)  # there is none: slots have room for all

    def routes_of(self, number: int, rank: int) -> Array:
        return np.asarray(self._proxy.routes_of(number, rank))

    def send_remainder(self, number: int, placement: _core.moe.Placement | None) -> None:
        self._proxy.send_remainder(number, placement)

    def pull(self, number: int, placement: _core.moe.Placement, x: Array, scales: Array | None, tags: Array) -> None:
        """Rows that have come, to where they belong; with node_sums their tags, in return_far's order."""
        moves = np.asarray(placement.pull_far(self._rank))
        if len(moves) > 0:
            rows = self._halves[number % PARITIES].rows_in
            self._kernels.pull(x, scales, rows, moves)
            if self._config.node_sums:
                tags[: len(moves)].view(np.uint8)[:] = rows[moves[:, 0], -TAG_BYTES:]

    # ---- combine

    def send_results(self, number: int, placement: _core.moe.Placement | None, y: Array | None) -> None:
        """Rows of y, outputs of our experts, to where they came from; none of either: only that there are none."""
        if placement is not None and y is not None:
            table = np.asarray(cast(tuple[Any, Any], placement.return_far(self._rank))[0])
            if len(table) > 0:
                self._kernels.pack(self._halves[number % PARITIES].results_out.view(np.uint8), y, None, table)
        self._proxy.send_results(number, placement)

    def sums_out(self, number: int, first_row: int, rows: int) -> Array:
        """Where sums for a partner are made."""
        return self._halves[number % PARITIES].results_out[first_row : first_row + rows]

    def send_sums(self, number: int, partner: int, first_row: int, rows: int) -> None:
        self._proxy.send_sums(number, partner, first_row, rows)

    def results(self, number: int) -> Array:
        return self._halves[number % PARITIES].results_in

    # ---- waiting

    def wait(self, step: str, number: int, timeout_s: float) -> None:
        """Until "routes", "rows" or "results" of the round are here from all. Raises as Near.wait does."""
        self._check(self._proxy.wait(step, number, timeout_s), f"{_WHAT_IS_DUE[step]} of round {number}", timeout_s)

    def look(self, step: str, number: int, patience_s: float) -> tuple[str, int, str]:
        """As wait(), for who wants to know and not to be told off: result, rank, detail."""
        return self._proxy.wait(step, number, patience_s)

    def has_come(self, step: str, number: int, rank: int) -> bool:
        """Whether all of that is here from that rank; also "farewell"."""
        return self._proxy.has_come(step, number, rank, _SETTLE_S)

    def leave_out(self, rank: int) -> None:
        """Goes on without it, if it is one of these."""
        if self._proxy.leave_out(rank, _SETTLE_S)[0] != "ready":
            raise WaitTimeout(f"the thread that posts has not come to its orders within {_SETTLE_S:g} s")

    def shut_out(self, rank: int) -> bool:
        """Nothing of that rank lands here any more. False: it may be in the middle of a write; ask again."""
        door = self._doors.get(rank)
        if door is None:
            return True
        try:
            door.revoke(_FENCE_S)
        except WaitTimeout:
            return False
        return True

    def close(self, timeout_s: float) -> None:
        """Gives back what the others write to. Idempotent. WaitTimeout while one is in the middle of that."""
        for region in (*self._doors.values(), self.region):
            region.close(timeout_s)

    def check_alive(self) -> None:
        """PeerLost when one of them is lost."""
        for rank in self.ranks:
            if self._engine.peer_state(self._addresses[rank]) == "lost":
                raise trouble(self._engine, "peer-lost", rank, self._addresses[rank], "", math.inf)

    def farewell(self, timeout_s: float) -> None:
        """Nothing of ours comes any more: who waits for us is told."""
        self._proxy.say_farewell(timeout_s)

    def _check(self, told: tuple[str, int, str], half: str, timeout_s: float) -> None:
        result, rank, detail = told
        if result != "ready":
            raise trouble(self._engine, result, rank, self._addresses[rank], half, timeout_s, detail)
