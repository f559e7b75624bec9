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
from crossrail.moe.board import PARITIES
from crossrail.moe.bounds import Bounds
from crossrail.moe.config import NUMPY_TYPES, Config
from crossrail.moe.kernels import Kernels
from crossrail.moe.troubles import trouble

_WHAT_IS_DUE = {"routes": "dispatch", "rows": "rows of dispatch", "results": "combine"}
_LINE = 64

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
        far_groups = max(layout.far_groups(other) for other in range(config.world))
        # Of larger groups one that is near by the member of our index may have others that are far.
        bounds = Bounds.of(config, far_groups, config.groups if config.dp_size > 1 else None)
        route_bytes = -(-4 * config.experts // _LINE) * _LINE
        parts = {
            "routes_in": config.world * route_bytes,
            "rows_in": bounds.far_rows * config.stride_bytes,
            "results_in": bounds.result_rows * config.y_bytes,
            "routes_out": route_bytes,
            "rows_out": bounds.sent_rows * config.stride_bytes,
            "results_out": bounds.returned_rows * config.y_bytes,
        }
        offsets, end = {}, 0
        for name, nbytes in parts.items():
            offsets[name] = end
            end += -(-nbytes // _LINE) * _LINE
        self.region = engine.alloc(PARITIES * end)
        memory = (*offsets.values(), end, route_bytes, config.stride_bytes, config.y_bytes)
        self._proxy = _core.moe.Proxy(engine, layout, rank, memory, self.region)
        self.ranks = self._proxy.far_ranks()
        self.private_rows = bounds.private_rows
        self._addresses: dict[int, xr.Address] = {}
        view = self.region.view()
        item = NUMPY_TYPES[config.out_dtype]

        def rows(name: str, parity: int, dtype: str, width: int) -> Array:
            count = parts[name] // np.dtype(dtype).itemsize
            return np.frombuffer(view, dtype, count, parity * end + offsets[name]).reshape(-1, width)

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
        return {"memory": self.region.descriptor.to_bytes().hex(), "imms": imms}

    def connect(self, cards: Sequence[dict[str, Any]], addresses: Sequence[xr.Address], timeout_s: float) -> None:
        """cards, addresses: of all ranks."""
        self._addresses = dict(enumerate(addresses))
        for rank in range(self._config.world):
            if rank in self.ranks:
                self._engine.connect(addresses[rank], timeout_s)
                descriptor = xr.RegionDescriptor.from_bytes(bytes.fromhex(cards[rank]["memory"]))
                self._proxy.connect(rank, descriptor, cards[rank]["imms"][str(self._rank)])
            elif rank != self._rank:
                self._proxy.watch(addresses[rank], rank)

    # ---- dispatch

    def send(self, number: int, counts: Array, timeout_s: float) -> None:
        """Our routes; once the memory of the round before the last is free again."""
        self._check(self._proxy.wait_sent(number, timeout_s), f"dispatch of round {number}", timeout_s)
        self._proxy.send_routes(number, counts)

    def send_rows(self, number: int, x: Array, scales: Array | None, tokens: Array) -> None:
        """The rows of these tokens, which are in the order of Placement.send_far."""
        if len(tokens) > 0:
            self._kernels.pack(self._halves[number % PARITIES].rows_out, x, scales, tokens)
        self._proxy.send_rows(number)

    def routes_of(self, number: int, rank: int) -> Array:
        return np.asarray(self._proxy.routes_of(number, rank))

    def send_remainder(self, number: int, placement: _core.moe.Placement | None) -> None:
        self._proxy.send_remainder(number, placement)

    def pull(self, number: int, placement: _core.moe.Placement, x: Array, scales: Array | None) -> None:
        """Rows that have come, to where they belong."""
        moves = np.asarray(placement.pull_far(self._rank))
        if len(moves) > 0:
            self._kernels.pull(x, scales, self._halves[number % PARITIES].rows_in, moves)

    # ---- combine

    def send_results(self, number: int, placement: _core.moe.Placement | None, y: Array | None) -> None:
        """Rows of y, outputs of our experts, to where they came from; none of either: only that there are none."""
        if placement is not None and y is not None:
            table = np.asarray(cast(tuple[Any, Any], placement.return_far(self._rank))[0])
            if len(table) > 0:
                self._kernels.pack(self._halves[number % PARITIES].results_out.view(np.uint8), y, None, table)
        self._proxy.send_results(number, placement)

    def results(self, number: int) -> Array:
        return self._halves[number % PARITIES].results_in

    # ---- waiting

    def wait(self, step: str, number: int, timeout_s: float) -> None:
        """Until "routes", "rows" or "results" of the round are here from all. Raises as Near.wait does."""
        self._check(self._proxy.wait(step, number, timeout_s), f"{_WHAT_IS_DUE[step]} of round {number}", timeout_s)

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
