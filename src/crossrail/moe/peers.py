"""The other ranks, whether they share memory with us or not: how they are met, and what is waited for."""

from __future__ import annotations

import time

import numpy as np

import crossrail as xr
from crossrail.errors import UsageError
from crossrail.moe import masking
from crossrail.moe.arrays import Array
from crossrail.moe.board import PARITIES, RETURNED, SENT, BoardLayout
from crossrail.moe.config import Config
from crossrail.moe.far import Far
from crossrail.moe.group import Group
from crossrail.moe.kernels import Kernels
from crossrail.moe.meeting import make_layout, meet, meet_far
from crossrail.moe.near import Near
from crossrail.moe.node_sums import NodeSums
from crossrail.moe.rounds import Round


class Peers:
    """All ranks of an AllToAll. Threads: one at a time.

    near: those that share memory with us, we among them. far: the others, None where there are none. sums: with
    node_sums, what our node returns to them. layout: where rows go. waited_s: in all calls here so far.
    Owner: board is the caller's; what far allocates is ours, until close().
    """

    def __init__(
        self,
        engine: xr.Engine,
        group: Group,
        config: Config,
        board: xr.Region,
        board_layout: BoardLayout,
        kernels: Kernels,
        proxy: tuple[bool, int | None],
        timeout_s: float,
    ) -> None:
        """Meets them, as all of them do. proxy: whether a thread posts to far ranks, and on which core.

        Raises UsageError for arguments that differ, or cannot be here; WaitTimeout, PeerLost, EngineClosed.
        """
        self.waited_s = 0.0
        self.far: Far | None = None
        self.sums: NodeSums | None = None
        self._engine = engine
        self._config = config
        self._rank = group.rank
        members = meet(engine, group, config, board, timeout_s)
        near = [member for member in members if member.board is not None]
        self.layout = make_layout(config, len(near))
        masks = config.on_lost == "mask"
        if masks and len(near) < group.size:
            raise UsageError(
                f"on_lost is 'mask', and only {len(near)} of {group.size} ranks share memory: not built yet"
            )
        boards = [member.board for member in near if member.board is not None]
        ranks, addresses = [member.rank for member in near], [member.address for member in near]
        self.near = Near(engine, group.rank, ranks, boards, addresses, board_layout, masks)
        if len(near) == group.size:
            return
        self.far = far = Far(engine, config, self.layout, group.rank, kernels)
        try:
            has_thread, cpu = proxy
            if has_thread:
                far.start_thread(cpu)
            meet_far(group, far, [member.address for member in members], timeout_s)
        except BaseException:
            self.close(timeout_s)
            raise
        for rank in far.ranks:
            self.near.watch(rank, members[rank].address)
        if config.node_sums:
            self.sums = NodeSums(self.layout, group.rank, self.near.boards, far, kernels, config.max_tokens)

    # ---- what is known of a round

    def counts(self, number: int, sources: list[int | None]) -> Array:
        """int32 [groups, experts], rows that each group sends to each expert. sources: of each group, as in Round."""
        counts = np.zeros((self._config.groups, self._config.experts), np.int32)
        for group, source in enumerate(sources):
            if source is None:
                continue  # whoever had these tokens is gone
            half = self.near.halves.get((source, number % PARITIES))
            if half is not None:
                counts[group] = half.counts
            elif self.far is not None:
                counts[group] = self.far.routes_of(number, source)
        return counts

    def results(self, number: int) -> list[Array]:
        """Where Kernels.reduce finds what was returned: of each near rank, and then what far ones wrote here."""
        near = [self.near.halves[rank, number % PARITIES].y for rank in self.near.ranks]
        return near if self.far is None else [*near, self.far.results(number)]

    # ---- waiting; all raise PeerLost, WaitTimeout, EngineClosed, and UsageError when a rank has closed its AllToAll

    def check_alive(self) -> None:
        """PeerLost when one of them is lost; for calls that wait for nobody."""
        self.near.check_alive()
        if self.far is not None:
            self.far.check_alive()

    def wait_sources(self, number: int, timeout_s: float) -> list[int | None]:
        """Until the routes of all are here. Of each group the rank whose rows come to us, as in Round."""
        return masking.sources(self._config, self._rank, self._wait(SENT, number, timeout_s))

    def wait_rows(self, number: int, timeout_s: float) -> None:
        """For rows of far ranks."""
        begin = time.monotonic()
        try:
            if self.far is not None:
                self.far.wait("rows", number, timeout_s)
        finally:
            self.waited_s += time.monotonic() - begin

    def wait_returned(self, number: int, timeout_s: float) -> list[int]:
        """Until all have returned. The masked ranks that never did."""
        return self._wait(RETURNED, number, timeout_s)

    def wait_results(self, opened: Round, timeout_s: float) -> list[int]:
        """That; with node_sums, what others are to get of us leaves as soon as our node has it."""
        if self.sums is not None and not opened.has_sent_sums:
            self.near.wait(RETURNED, opened.number, timeout_s)
            self.sums.send(opened.number, opened.placement)
            opened.has_sent_sums = True
        return self._wait(RETURNED, opened.number, timeout_s)

    def _wait(self, what: int, number: int, timeout_s: float) -> list[int]:
        """For near ranks, and then for the others. Those that are masked, and never had it."""
        begin = time.monotonic()
        try:
            absent = self.near.wait(what, number, timeout_s)
            if self.far is not None:
                self.far.wait("routes" if what == SENT else "results", number, timeout_s)
            return absent
        finally:
            self.waited_s += time.monotonic() - begin

    # ---- the end

    def farewell(self, timeout_s: float) -> None:
        """Nothing of ours comes any more."""
        self.near.farewell()
        if self.far is not None and not self._engine.closed:
            self.far.farewell(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Gives back what far ranks write to. Idempotent. WaitTimeout while one is in the middle of that."""
        if self.far is not None:
            self.far.stop_thread()
            if not self._engine.closed:
                self.far.region.close(timeout_s)
