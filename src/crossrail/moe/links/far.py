"""Ranks that share no memory with us: their rows go over the rails, posted and counted by the native proxy."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

import crossrail as xr
from crossrail import _core
from crossrail.errors import CrossrailError, TransportError, UsageError, WaitTimeout
from crossrail.moe.arrays import Array
from crossrail.moe.config import TAG_BYTES, Config
from crossrail.moe.countdown import Countdown
from crossrail.moe.farewell import Why
from crossrail.moe.links.board import PARITIES, RETURNED
from crossrail.moe.links.far_memory import FarMemory, FarPart
from crossrail.moe.links.node_sums import tags_of
from crossrail.moe.outcome import Outcome
from crossrail.moe.rows.interface import RowMemory

_SETTLE_S = 5.0  # for the thread that posts, which has little to do
_FENCE_S = 1e-3
_TRIAL_BYTES = 64
_NOTE_S = 0.1  # for a note to arrive before the next one leaves, which it must not overtake


@dataclass(frozen=True)
class _Half:
    """Parts of the rows' memory for one parity, as arrays; see moe/proxy.h. The last two are the same one."""

    rows_in: Any
    results_in: Any
    rows_out: Any
    results_out: Any
    results_out_bytes: Any


class Far:
    """The far links of one AllToAll whose ranks do not all share memory. Threads: one at a time.

    memory: what is where. proxy: the native half, for a thread of its own instead of the calls here. reached, once
    reach() was called: far ranks' memory of rows, uint8, that we write to by ourselves; unreached: why not of others.
    heard: ranks that write to ours by themselves, and signal it.

    Lifecycle: 1. made, and start_thread() perhaps. 2. card() is given to all ranks, and connect() gets theirs. 3.
    rounds. 4. stop_thread(). 5. close(), and forget().
    """

    def __init__(
        self,
        engine: xr.Engine,
        config: Config,
        layout: _core.moe.Layout,
        rank: int,
        rows: RowMemory,
        rows_on_host: bool = False,
    ) -> None:
        self._engine = engine
        self._config = config
        self._layout = layout
        self._memory = rows
        self._rank = rank
        self.memory = memory = FarMemory.of(config, layout)
        self.routes = engine.alloc(memory.routes.nbytes)
        self._rows = rows.shared_block(memory.rows.nbytes, rows_on_host)
        self.rows = self._rows.region
        self._masks = config.on_lost == "mask"
        self.proxy = _core.moe.Proxy(
            engine, layout, rank, memory.as_native(), self.routes, self.rows, masks=self._masks
        )
        self.ranks = self.proxy.far_ranks()
        # If ranks may be masked, each has registrations of its own, which can be revoked.
        self._doors: dict[int, list[xr.Region]] = {}
        for other in self.ranks if self._masks else ():
            self._doors[other] = [engine.register(self.routes.view()), self._rows.register()]
        self.private_rows = memory.bounds.private_rows
        self._addresses: dict[int, xr.Address] = {}
        self._routes_of: dict[int, xr.RegionDescriptor] = {}  # far ranks' memory of routes
        self._rows_of: dict[int, xr.RegionDescriptor] = {}  # far ranks' memory of rows
        self._noting: list[xr.Transfer] = []
        self.reached: dict[int, Any] = {}
        self.unreached: dict[int, str] = {}
        self.heard: list[int] = []
        self._halves = [self._half(memory.rows, parity) for parity in range(PARITIES)]

    def _half(self, part: FarPart, parity: int) -> _Half:
        config = self._config

        def rows(name: str, dtype: str, row_bytes: int, width: int) -> Any:
            offset = parity * part.parity_bytes + part.offsets[name]
            return self._rows.array(dtype, (part.sizes[name] // row_bytes, width), offset)

        return _Half(
            rows("rows_in", "uint8", config.stride_bytes, config.stride_bytes),
            rows("results_in", config.out_dtype, config.y_bytes, config.hidden),
            rows("rows_out", "uint8", config.stride_bytes, config.stride_bytes),
            rows("results_out", config.out_dtype, config.y_bytes, config.hidden),
            rows("results_out", "uint8", config.y_bytes, config.y_bytes),
        )

    @property
    def rows_bytes(self) -> Any:
        """The memory of rows, uint8."""
        return self._rows.array("uint8", (self.memory.rows.nbytes,), 0)

    def start_thread(self, cpu: int | None) -> None:
        """From now on a thread posts instead of the caller: on that core, or wherever this process may run."""
        self.proxy.start_thread(cpu)

    def stop_thread(self) -> None:
        """Ends the thread, once it has posted everything that it was told to. Idempotent."""
        self.proxy.stop_thread()

    def card(self) -> dict[str, Any]:
        """What far ranks need to know about us."""
        imms = {str(rank): self.proxy.imms_for(rank) for rank in self.ranks}
        doors = {str(rank): self._doors.get(rank, [self.routes, self.rows]) for rank in self.ranks}
        memory = {rank: [one.descriptor.to_bytes().hex() for one in both] for rank, both in doors.items()}
        return {"memory": memory, "imms": imms}

    def connect(self, cards: Sequence[dict[str, Any]], addresses: Sequence[xr.Address], timeout_s: float) -> None:
        """cards, addresses: of all ranks."""
        self._addresses = dict(enumerate(addresses))
        for rank in range(self._config.world):
            if rank in self.ranks:
                self._engine.connect(addresses[rank], timeout_s)
                routes, rows = (
                    xr.RegionDescriptor.from_bytes(bytes.fromhex(one)) for one in cards[rank]["memory"][str(self._rank)]
                )
                self.proxy.connect(rank, routes, rows, cards[rank]["imms"][str(self._rank)])
                self._routes_of[rank], self._rows_of[rank] = routes, rows

    def try_ways(self, timeout_s: float) -> None:
        """Writes some bytes to each far rank, where its second round will have rows, and waits: so whatever is created
        at the first write - connections, mappings, pinned memory, streams - exists before any rank's first round.
        """
        nbytes = min(_TRIAL_BYTES, self.memory.rows.nbytes)
        writes = [self._engine.submit_write(self.rows, theirs, length=nbytes) for theirs in self._rows_of.values()]
        patience = Countdown(self._engine, timeout_s)
        for write in writes:
            write.wait(patience.left_s)

    def reach(self, timeout_s: float) -> None:
        """Maps memory of rows of those far ranks that are on this host, where it can be mapped. Rows for them that have
        room in our slot, and results, are then to be written there, instead of packed, before they are sent.
        """
        for rank, rows in self._rows_of.items():
            path = self._engine.explain(self._addresses[rank])
            if path.transport != "shm":
                self.unreached[rank] = f"{path.transport}: {path.reason}"
                continue
            try:
                self.reached[rank] = self._memory.map(rows, timeout_s)
            except (UsageError, TransportError) as error:
                self.unreached[rank] = str(error)
            else:
                self.proxy.reach(rank)

    def hear(self, ranks: list[int]) -> None:
        """Notes that those ranks write here by themselves, and signal it."""
        self.heard = ranks
        for rank in ranks:
            self.proxy.hear(rank)

    def slot_at(self, rank: int) -> int:
        """The row of that rank's rows_in at which the slot is that only we write."""
        layout = self._layout
        return layout.far_index(self._rank // self._config.dp_size, rank) * self.private_rows

    def watch(self, rank: int, board: memoryview) -> None:
        """Watches a rank that shares memory with us, by this board: waits end when it is lost, unless it said farewell;
        and when it said so before the results of the round.
        """
        self.proxy.watch(self._addresses[rank], rank, board, RETURNED)

    def imms_of(self, rank: int) -> list[int]:
        """By word of board.py: the numbers by which a far rank tells us what these words tell us of near ranks."""
        imms = self.proxy.imms_for(rank)
        routes, _, results, farewell = (imms[step : step + PARITIES] for step in range(0, len(imms), PARITIES))
        return [farewell[0], *routes, *results]

    # ---- dispatch

    def wait_sent(self, number: int, timeout_s: float) -> Outcome:
        """Waits until the memory of the round before the last is free again."""
        return Outcome.of_native(*self.proxy.wait_sent(number, timeout_s))

    def send_routes(self, number: int, counts: Array, routes_hash: int) -> None:
        """Sends our routes to that memory. routes_hash: as in hash_of(); meaningless without dp_size."""
        self.proxy.send_routes(number, counts, routes_hash)

    def send_rows(self, number: int, x: Any, scales: Any | None, weights: Any | None, routes: Array) -> None:
        """The rows of these routes, which are in the order of Placement.send_far. weights: with node_sums."""
        if len(routes) > 0:
            rows = self._halves[number % PARITIES].rows_out
            self._memory.pack(rows, x, scales, routes // np.int32(self._config.top_k))
            if self._config.node_sums and weights is not None:
                rows[: len(routes), -TAG_BYTES:] = tags_of(routes, weights)
        self._memory.settle()
        self.proxy.send_rows(number)
        if self._masks:
            self.proxy.send_remainder(number, None)  # there is none: slots have room for everything

    def routes_of(self, number: int, rank: int) -> Array:
        return np.asarray(self.proxy.routes_of(number, rank))

    def hash_of(self, number: int, rank: int) -> int:
        """The hash of that rank's routes, as it came with them; with dp_size > 1."""
        return self.proxy.hash_of(number, rank)

    def send_remainder(self, number: int, placement: _core.moe.Placement | None) -> None:
        self.proxy.send_remainder(number, placement)

    def pull(self, number: int, placement: _core.moe.Placement, x: Any, scales: Any | None, tags: Array) -> None:
        """Rows that have come, to where they belong; with node_sums their tags, in return_far's order."""
        moves = np.asarray(placement.pull_far(self._rank))
        if len(moves) > 0:
            rows = self._halves[number % PARITIES].rows_in
            self._memory.pull(x, scales, rows, moves)
            if self._config.node_sums:
                tags[: len(moves)].view(np.uint8)[:] = rows[moves[:, 0], -TAG_BYTES:]

    # ---- combine

    def pack_results(self, number: int, placement: _core.moe.Placement, y: Any) -> None:
        """Rows of y, outputs of our experts, in the order in which send_results() sends them."""
        table = np.asarray(cast(tuple[Any, Any], placement.return_far(self._rank))[0])
        if len(table) > 0:
            self._memory.pack(self._halves[number % PARITIES].results_out_bytes, y, None, table)
        self._memory.settle()

    def send_results(self, number: int, placement: _core.moe.Placement | None) -> None:
        """Sends packed results to where their tokens came from; without a placement: only that there is nothing."""
        self.proxy.send_results(number, placement)

    def sums_out(self, number: int, first_row: int, rows: int) -> Any:
        """Where sums for a rank are made."""
        return self._halves[number % PARITIES].results_out[first_row : first_row + rows]

    def take_sums(self, number: int) -> None:
        """The results of this round are those of our partners."""
        self.proxy.take_sums(number)

    def send_sums(self, number: int, origin: int, first_row: int, rows: int) -> None:
        self.proxy.send_sums(number, origin, first_row, rows)

    def results(self, number: int) -> Any:
        return self._halves[number % PARITIES].results_in

    # ---- waiting

    def wait(self, step: str, number: int, timeout_s: float) -> Outcome:
        """Waits until "routes", "rows" or "results" of the round are here from all."""
        return Outcome.of_native(*self.proxy.wait(step, number, timeout_s))

    def has_come(self, step: str, number: int, rank: int) -> bool:
        """Whether all of that is here from that rank."""
        return self.proxy.has_come(step, number, rank, _SETTLE_S)

    def has_left(self, rank: int) -> bool:
        """Whether that far rank has said farewell."""
        return self.has_come("farewell", 0, rank)

    def leave_out(self, rank: int) -> None:
        """Goes on without it, if it is one of these."""
        if self.proxy.leave_out(rank, _SETTLE_S)[0] != "ready":
            raise WaitTimeout(f"the thread that posts has not come to its orders within {_SETTLE_S:g} s")

    def shut_out(self, rank: int) -> bool:
        """Keeps that rank's writes out from now on. False: it may be in the middle of one; ask again."""
        try:
            for door in self._doors.get(rank, ()):
                door.revoke(_FENCE_S)
        except WaitTimeout:
            return False
        return True

    def close(self, timeout_s: float) -> None:
        """Gives back what the others write to. Idempotent. WaitTimeout while one is in the middle of that."""
        for region in (*(door for both in self._doors.values() for door in both), self.routes):
            region.close(timeout_s)
        self._rows.close(timeout_s)

    def forget(self) -> None:
        """Releases our memory, and that of others which we mapped, once nobody else holds it. Once, after close()."""
        self._halves.clear()
        self.reached.clear()
        self._doors.clear()
        del self.proxy, self.routes, self.rows, self._rows

    def farewell(self, why: Why, timeout_s: float) -> bool:
        """Tells everybody who waits for us that nothing more will come. Returns whether it was posted."""
        number, words = why.number(self._config.world), why.words_bytes()
        return Outcome.of_native(*self.proxy.say_farewell(number, words, timeout_s)).result == "ready"

    def note(self, data: bytes) -> None:
        """Shows it to far ranks, in the place of our last one. Waits for a moment at most."""
        patience = Countdown(self._engine, _NOTE_S)
        for write in self._noting:
            with contextlib.suppress(CrossrailError):  # who cannot be told will be lost, or has closed
                write.wait(patience.left_s)
        self._noting.clear()
        begin = self.memory.note_out
        self.routes.view()[begin : begin + len(data)] = data
        for rank, routes in self._routes_of.items():
            if self._engine.peer_state(self._addresses[rank]) == "lost":
                continue
            with contextlib.suppress(CrossrailError):
                self._noting.append(
                    self._engine.submit_write(
                        self.routes, routes, len(data), src_offset=begin, dst_offset=self.memory.note_in(self._rank)
                    )
                )

    def note_of(self, rank: int) -> bytes:
        """What that far rank shows; perhaps half of it, while it arrives."""
        begin = self.memory.note_in(rank)
        return bytes(self.routes.view()[begin : begin + _core.moe.FAREWELL_BYTES])

    def why_left(self, rank: int) -> Why:
        """What that far rank gave as reason in its farewell."""
        return Why.of_peer(*self.proxy.why_left(rank), self._config.world)
