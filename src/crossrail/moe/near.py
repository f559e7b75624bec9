"""Ranks that share memory: they read each other's boards, and wait for each other's words."""

from __future__ import annotations

from collections.abc import Sequence

import crossrail as xr
from crossrail import _core
from crossrail.moe.board import FAREWELL, PARITIES, RETURNED, SENT, WORDS, BoardLayout
from crossrail.moe.troubles import trouble

_WHAT_IS_DUE = {SENT: "dispatch", RETURNED: "combine"}


class Near:
    """The boards of ranks that share memory with us, our own among them. Threads: one at a time.

    ranks: theirs, ascending. boards, addresses: likewise; ours is the region's own memory.
    """

    def __init__(
        self,
        engine: xr.Engine,
        rank: int,
        ranks: Sequence[int],
        boards: Sequence[memoryview],
        addresses: Sequence[xr.Address],
        layout: BoardLayout,
    ) -> None:
        self.ranks = list(ranks)
        self._engine = engine
        self._addresses = list(addresses)
        self._watched: list[tuple[int, xr.Address]] = []
        own = self.ranks.index(rank)
        owners = [None if other == rank else address for other, address in zip(ranks, addresses, strict=True)]
        self._words = _core.moe.Words(engine, boards, owners, own, WORDS)
        self._halves = [[layout.half(board, parity) for parity in range(PARITIES)] for board in boards]
        self.own = self._halves[own]
        self.halves = {(other, parity): self._halves[i][parity] for i, other in enumerate(ranks) for parity in range(2)}

    def watch(self, rank: int, address: xr.Address) -> None:
        """One that shares no memory with us: waits end when it is lost, since the others go no further then."""
        self._words.watch(address)
        self._watched.append((rank, address))

    def publish(self, what: int, number: int) -> None:
        """We are through with this half of the round: others may read what it wrote."""
        self._words.publish(what + number % PARITIES, number)

    def farewell(self) -> None:
        """No word of ours comes any more."""
        self._words.publish(FAREWELL, 1)

    def check_alive(self) -> None:
        """PeerLost when one of them is lost; for calls that wait for nobody."""
        for rank, address in zip(self.ranks, self._addresses, strict=True):
            if self._engine.peer_state(address) == "lost":
                raise trouble(self._engine, "peer-lost", rank, address, "", 0.0)

    def wait(self, what: int, number: int, timeout_s: float) -> None:
        """Until all have published it.

        Raises PeerLost, WaitTimeout, EngineClosed; UsageError when a rank has closed its AllToAll. Each names the rank.
        """
        result, index = self._words.wait(what + number % PARITIES, number, timeout_s)
        if result != "ready":
            rank, address = [*zip(self.ranks, self._addresses, strict=True), *self._watched][index]
            raise trouble(self._engine, result, rank, address, f"{_WHAT_IS_DUE[what]} of round {number}", timeout_s)
