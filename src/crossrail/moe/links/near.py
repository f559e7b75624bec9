"""Ranks that share memory: they read each other's boards, and wait for each other's words."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import crossrail as xr
from crossrail import _core
from crossrail.moe.errors import masked_out
from crossrail.moe.links.board import FAREWELL, PARITIES, RETURNED, SENT, VIEW, WORDS, BoardLayout
from crossrail.moe.outcome import Outcome
from crossrail.moe.rows.interface import Block


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
        self._watched: list[int] = []
        own = self.ranks.index(rank)
        owners = [None if other == rank else address for other, address in zip(ranks, addresses, strict=True)]
        self.masked: set[int] = set()
        self._silent: tuple[set[int], set[int]] = (set(), set())  # by parity: whose word of dispatch is sealed
        self._words = _core.moe.Words(engine, boards, owners, own, WORDS, masks)
        self.boards = [[layout.half(board, parity, rows) for parity in range(PARITIES)] for board in boards]
        self.own = self.boards[own]
        self.halves = {(other, parity): self.boards[i][parity] for i, other in enumerate(ranks) for parity in range(2)}

    def watch(self, rank: int, address: xr.Address, imms: Sequence[int]) -> None:
        """One that shares no memory with us: waits end when it is lost, since the others go no further then; unless it
        had ended in order. imms: by word, the numbers by which it tells us what words tell of others.
        """
        self._words.watch(address, imms)
        self._watched.append(rank)

    def leave_out(self, rank: int) -> None:
        """Waits go on without it from now on, whether it shares memory with us or is watched."""
        self._words.leave_out([*self.ranks, *self._watched].index(rank))

    def announce(self, view: int) -> None:
        """Tells those who read our memory that the ranks that are left are those of this view (masking/views.py)."""
        self._words.publish(VIEW, 2 * view)

    def is_ahead(self, view: int) -> bool:
        """Whether a rank that shares memory with us is in a later view."""
        return any(self._words.has_come(board, VIEW, 2 * (view + 1)) for board in range(len(self.ranks)))

    def has_come(self, rank: int, what: int, number: int) -> bool:
        """Whether that rank, which shares memory with us, has published it."""
        word = what if what == FAREWELL else what + number % PARITIES
        return self._words.has_come(self.ranks.index(rank), word, number)

    def silent_in(self, number: int) -> Collection[int]:
        """Ranks that were silent in an earlier round of that parity, and so are in this one, at every rank."""
        return self._silent[number % PARITIES]

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

    def farewell(self, why: int | None) -> None:
        """No word of ours comes any more. why: as Peers has it."""
        self._words.publish(FAREWELL, PARITIES * (1 if why is None else 2 + why))

    def why_left(self, rank: int) -> int | None:
        """What that rank, which shares memory with us, gave in its farewell. Written by that rank: to be checked."""
        number = self._words.value(self.ranks.index(rank), FAREWELL) // PARITIES
        return number - 2 if number >= 2 else None

    def wait(self, what: int, number: int, timeout_s: float) -> tuple[Outcome, list[int]]:
        """Until all have published it. Also the ranks that were lost before they did: none, unless these are masked."""
        result, index, boards = self._words.wait(what + number % PARITIES, number, timeout_s)
        absent = [self.ranks[board] for board in boards]
        self.masked.update(absent)
        if what == SENT:
            self._silent[number % PARITIES].update(absent)
        rank = -1 if result == "ready" else [*self.ranks, *self._watched][index]
        return Outcome.of_native(result, rank), absent
