"""Ranks that share memory: they read each other's boards, and wait for each other's words."""

from __future__ import annotations

from collections.abc import Sequence

import crossrail as xr
from crossrail import _core
from crossrail.errors import EngineClosed, PeerLost, UsageError, WaitTimeout
from crossrail.moe.board import FAREWELL, PARITIES, RETURNED, SENT, WORDS, BoardLayout

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
        own = self.ranks.index(rank)
        owners = [None if other == rank else address for other, address in zip(ranks, addresses, strict=True)]
        self._words = _core.moe.Words(engine, boards, owners, own, WORDS)
        self._halves = [[layout.half(board, parity) for parity in range(PARITIES)] for board in boards]
        self.own = self._halves[own]
        self.halves = {(other, parity): self._halves[i][parity] for i, other in enumerate(ranks) for parity in range(2)}

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
                raise self._trouble("peer-lost", rank, address, "", 0.0)

    def wait(self, what: int, number: int, timeout_s: float) -> None:
        """Until all have published it.

        Raises PeerLost, WaitTimeout, EngineClosed; UsageError when a rank has closed its AllToAll. Each names the rank.
        """
        result, index = self._words.wait(what + number % PARITIES, number, timeout_s, ())
        if result != "ready":
            half = f"{_WHAT_IS_DUE[what]} of round {number}"
            raise self._trouble(result, self.ranks[index], self._addresses[index], half, timeout_s)

    def _trouble(self, result: str, rank: int, address: xr.Address, half: str, timeout_s: float) -> Exception:
        who = f"rank {rank} ({address.name!r}, pid {address.pid})"
        during = f" before its {half}" if half else ""
        if result == "engine-closed":
            return EngineClosed(f"engine {self._engine.name!r} was closed while it waited for {who}, {half}")
        if result == "left":
            return UsageError(f"{who} has closed its AllToAll{during}")
        if result == "peer-lost":
            return PeerLost(
                f"{who} was lost{during}: {self._engine.explain(address).note}. Next: make a new AllToAll without it",
                op="moe",
                peer=address.name,
                status="peer-lost",
            )
        state = self._engine.peer_state(address)
        return WaitTimeout(
            f"{who} has not sent its {half} within {timeout_s:g} s; its engine is {state}. Nothing is lost: wait "
            "again. Next: see whether that rank makes the same calls as this one"
        )
