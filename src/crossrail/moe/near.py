"""Ranks that share memory: they read each other's boards, and wait for each other's words."""

from __future__ import annotations

from collections.abc import Sequence

import crossrail as xr
from crossrail import _core
from crossrail.moe.board import FAREWELL, PARITIES, RETURNED, SENT, VIEW, WORDS, BoardLayout
from crossrail.moe.errors import masked_out
from crossrail.moe.row_memory import Block
from crossrail.moe.troubles import trouble

_WHAT_IS_DUE = {SENT: "dispatch", RETURNED: "combine"}


class Near:
    """The boards of ranks that share memory with us, our own among them. Threads: one at a time.

    ranks: theirs, ascending. boards, addresses: likewise; ours is the region's own memory. rows: ours, of
    boards that hold none; then there is no other rank here. masks: who is lost is left out, on all ranks from the same
    half of the same round on, since one word tells all of them.
    """

    def __init__(
        self,
        engine: xr.Engine,
        rank: int,
        ranks: Sequence[int],
        boards: Sequence[memoryview],
        addresses: Sequence[xr.Address],
        layout: BoardLayout,
        rows: Block | None,
        masks: bool,
    ) -> None:
        self.ranks = list(ranks)
        self._engine = engine
        self._addresses = list(addresses)
        self._watched: list[tuple[int, xr.Address]] = []
        own = self.ranks.index(rank)
        owners = [None if other == rank else address for other, address in zip(ranks, addresses, strict=True)]
        self._masks = masks
        self.masked: set[int] = set()
        self._words = _core.moe.Words(engine, boards, owners, own, WORDS, masks)
        self.boards = [[layout.half(board, parity, rows) for parity in range(PARITIES)] for board in boards]
        self.own = self.boards[own]
        self.halves = {(other, parity): self.boards[i][parity] for i, other in enumerate(ranks) for parity in range(2)}

    def watch(self, rank: int, address: xr.Address, imms: Sequence[int]) -> None:
        """One that shares no memory with us: waits end when it is lost, since the others go no further then; unless it
        had ended in order. imms: by word, the numbers by which it tells us what words tell of others.
        """
        self._words.watch(address, imms)
        self._watched.append((rank, address))

    def leave_out(self, rank: int) -> None:
        """Waits go on without it from now on, whether it shares memory with us or is watched."""
        ranks = [*self.ranks, *(one for one, _ in self._watched)]
        self._words.leave_out(ranks.index(rank))

    def announce(self, view: int) -> None:
        """Tells those who read our memory that the ranks that are left are those of this view (moe/views.py)."""
        self._words.publish(VIEW, 2 * view)

    def is_ahead(self, view: int) -> bool:
        """Whether a rank that shares memory with us is in a later view."""
        return any(self._words.has_come(board, VIEW, 2 * (view + 1)) for board in range(len(self.ranks)))

    def has_come(self, rank: int, what: int, number: int) -> bool:
        """Whether that rank, which shares memory with us, has published it."""
        word = what if what == FAREWELL else what + number % PARITIES
        return self._words.has_come(self.ranks.index(rank), word, number)

    def publish(self, what: int, number: int) -> None:
        """We are through with this half of the round: others may read what it wrote. PeerLost when they have masked
        us.
        """
        if not self._words.publish(what + number % PARITIES, number):
            raise masked_out()

    def check_not_masked(self, number: int) -> None:
        """PeerLost when others have masked us, and may write to what we have just read for this round."""
        if any(self._words.is_sealed(what + number % PARITIES, number) for what in (SENT, RETURNED)):
            raise masked_out()

    def farewell(self) -> None:
        """No word of ours comes any more."""
        self._words.publish(FAREWELL, PARITIES)

    def check_alive(self) -> None:
        """PeerLost when one of them is lost; for calls that wait for nobody."""
        if self._masks:
            return
        for rank, address in zip(self.ranks, self._addresses, strict=True):
            if self._engine.peer_state(address) == "lost":
                raise trouble(self._engine, "peer-lost", rank, address, "", 0.0)

    def wait(self, what: int, number: int, timeout_s: float) -> list[int]:
        """Until all have published it. The ranks that were lost before they did: none, unless these are masked.

        Raises PeerLost, WaitTimeout, EngineClosed; UsageError when a rank has closed its AllToAll. Each names the rank.
        """
        result, index, boards = self._words.wait(what + number % PARITIES, number, timeout_s)
        if result != "ready":
            rank, address = [*zip(self.ranks, self._addresses, strict=True), *self._watched][index]
            raise trouble(self._engine, result, rank, address, f"{_WHAT_IS_DUE[what]} of round {number}", timeout_s)
        absent = [self.ranks[board] for board in boards]
        self.masked.update(absent)
        return absent

    def look(self, what: int, number: int, patience_s: float) -> tuple[str, int, str]:
        """As wait(), for who wants to know and not to be told off: result, rank, and nothing more to say of it."""
        result, index, _ = self._words.wait(what + number % PARITIES, number, patience_s)
        ranks = [*self.ranks, *(one for one, _ in self._watched)]
        return result, ranks[index] if result != "ready" else -1, ""
