"""Where each rank's rows of a round go, and how a round ends for which some rank has too little room."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from crossrail import _core
from crossrail.errors import UsageError
from crossrail.moe.arrays import Array
from crossrail.moe.capacity import find_overflow
from crossrail.moe.config import Config
from crossrail.moe.links.board import PARITIES, RETURNED
from crossrail.moe.peers import OtherRoute, Peers
from crossrail.moe.rounds import Round, Stage


class Placing:
    """One per AllToAll. Threads: one at a time. open: its rounds by parity; one that is refused is taken out."""

    def __init__(self, config: Config, peers: Peers, rank: int, open_rounds: dict[int, Round]) -> None:
        self._config = config
        self._peers = peers
        self._rank = rank
        self._open = open_rounds
        self._unsettled: dict[int, Round] = {}  # by parity: a round that came to nothing, until all ranks know

    def routes_for_far(self, counts: Array, order: Array) -> Array:
        """Routes of the rows that go to far ranks, in their order. Our own routes decide alone."""
        table = np.zeros((self._config.groups, self._config.experts), np.int32)
        table[self._rank // self._config.dp_size] = counts
        ranges = _core.moe.Placement(self._peers.layout, table).send_far(self._rank, order)
        return np.asarray(cast(tuple[Any, Any], ranges)[0])

    def place(self, opened: Round, timeout_s: float) -> None:
        """Waits for the routes of all, decides where rows go, and has the rest of ours sent. CapacityExceeded, and what
        a wait raises.
        """
        peers, number = self._peers, opened.number
        opened.sources = peers.wait_sources(opened, timeout_s)
        try:
            self._check_same_routes(opened)
            placement = _core.moe.Placement(peers.layout, peers.counts(number, opened.sources))
        except UsageError as error:  # what others wrote makes no sense, and will not by waiting
            peers.parting.give_up(f"dispatch of round {number}", error)
            raise
        refusal = find_overflow(self._config, number, placement, opened.silent)  # all come to the same end
        if refusal is not None:
            self._refuse(opened, timeout_s)
            raise refusal
        try:
            if peers.far is not None and not self._masks:
                peers.far.send_remainder(number, placement)
            opened.placement = placement
        except BaseException as error:
            peers.parting.give_up(f"dispatch of round {number}", error)
            raise

    def _check_same_routes(self, opened: Round) -> None:
        """UsageError if ranks that must hold the same tokens send different ones: they would not agree on who has rows
        of whom.

        For ranks that share memory with us each route is compared, for others a hash of all.
        """
        first, size = self._rank // self._config.dp_size * self._config.dp_size, self._config.dp_size
        alike = f"with dp_size {size} both must hold the same tokens and route them alike"
        ours = self._peers.counts_of(opened.number, self._rank)
        for other in range(first, first + size):
            if other == self._rank or other in opened.silent:
                continue
            theirs = self._peers.counts_of(opened.number, other)
            if not np.array_equal(ours, theirs):
                expert = int(np.argmax(ours != theirs))
                raise UsageError(
                    f"indices of round {opened.number} send {ours[expert]} tokens to expert {expert}, those of rank "
                    f"{other} {theirs[expert]}: {alike}"
                )
            if (route := self._peers.other_routes(opened, other)) is True:
                raise UsageError(
                    f"indices of round {opened.number} send as many tokens to each expert as those of rank {other}, "
                    f"and not the same ones: {alike}"
                )
            if isinstance(route, OtherRoute):
                expert = int(np.searchsorted(np.cumsum(ours), route.place, "right"))
                raise UsageError(
                    f"indices of round {opened.number} send token {route.ours} to expert {expert} where those of rank "
                    f"{other} send token {route.theirs}: {alike}"
                )

    def settle(self, parity: int, timeout_s: float) -> None:
        """A refused round has ended once all ranks have said so: until then one may still be reading our counts."""
        opened = self._unsettled.get(parity)
        if opened is not None:
            self._peers.wait_results(opened, timeout_s)
            del self._unsettled[parity]

    @property
    def _masks(self) -> bool:
        return self._config.on_lost == "mask"

    def _refuse(self, opened: Round, timeout_s: float) -> None:
        """Ends a round without results: all ranks do, and tell each other as they would with some. After WaitTimeout
        it may be called again.
        """
        peers, number, parity = self._peers, opened.number, opened.number % PARITIES
        if peers.far is not None:
            if not opened.is_refused and not self._masks:
                peers.far.send_remainder(number, None)
            opened.is_refused = True
            # For rows that came before the refusal was known: the next round's are counted alike.
            peers.wait_rows(number, timeout_s)
        try:
            if peers.far is not None:
                peers.far.send_results(number, None)
            peers.near.publish(RETURNED, number)
            opened.stage = Stage.ENDED
            del self._open[parity]
            self._unsettled[parity] = opened
        except BaseException as error:
            peers.parting.give_up(f"the end of round {number}", error)
            raise
