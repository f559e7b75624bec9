"""Ranks that share memory: they read each other's boards, and wait for each other's words."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

import crossrail as xr
from crossrail import _core
from crossrail.moe.errors import masked_out
from crossrail.moe.farewell import Why
from crossrail.moe.links.board import FAREWELL, PARITIES, RETURNED, SENT, VIEW, WORDS, BoardLayout
from crossrail.moe.outcome import Outcome
from crossrail.moe.rows.interface import Block


class Near:
    """The boards of ranks that share memory with us, our own among them. Threads: one at a time.

    ranks: theirs, ascending. boards, addresses, layouts: likewise; ours is the region's own memory. rows: ours, of
    boards that hold none; then there is no other rank here. world: how many ranks there are, here or not.
    masks: who is lost is left out, on all ranks from the same half of the same round on, since one word tells all.
    """

    def __init__(
        self,
        engine: xr.Engine,
        rank: int,
        ranks: Sequence[int],
        boards: Sequence[memoryview],
        addresses: Sequence[xr.Address],
        layouts: Sequence[BoardLayout],
        rows: Block | None,
        masks: bool,
        world: int,
    ) -> None:
        self.ranks = list(ranks)
        self._watched: list[int] = []
        self._own = own = self.ranks.index(rank)
        self._world = world
        self._reasons = [layout.reason(board) for layout, board in zip(layouts, boards, strict=True)]
        self._notes = [layout.note(board) for layout, board in zip(layouts, boards, strict=True)]
        owners = [None if other == rank else address for other, address in zip(ranks, addresses, strict=True)]
        self.masked: set[int] = set()
        self._silent: tuple[set[int], set[int]] = (set(), set())  # by parity: ranks whose word of dispatch is sealed
        self._words = _core.moe.Words(engine, boards, owners, own, WORDS, masks)
        self.boards = [
            [layout.half(board, parity, rows) for parity in range(PARITIES)]
            for layout, board in zip(layouts, boards, strict=True)
        ]
        self.own = self.boards[own]
        self.halves = {(other, parity): self.boards[i][parity] for i, other in enumerate(ranks) for parity in range(2)}

    def close(self) -> None:
        """The boards are released, once nobody else holds them. Once; no other call but `masked` may follow."""
        self.boards.clear()
        self.own.clear()
        self.halves.clear()
        del self._words, self._reasons, self._notes

    def watch(self, rank: int, address: xr.Address, imms: Sequence[int], is_taken_meanwhile: bool) -> None:
        """One that shares no memory with us: waits end when it is lost, since the others go no further then; unless it
        had ended in order. imms: by word, the numbers by which it tells us what words tell of others. Unless these are
        taken while words are waited for, waits also end when it leaves before its part.
        """
        self._words.watch(address, imms, is_taken_meanwhile)
        self._watched.append(rank)

    def leave_out(self, rank: int) -> None:
        """From now on waits go on without the rank, whether it shares memory with us or is watched."""
        self._words.leave_out([*self.ranks, *self._watched].index(rank))

    def announce(self, view: int) -> None:
        """Tells those who read our memory that the remaining ranks are those of this view (masking/views.py)."""
        self._words.publish(VIEW, 2 * view)

    def is_ahead(self, view: int) -> bool:
        """Whether a rank that shares memory with us is in a later view."""
        return any(self._words.has_come(board, VIEW, 2 * (view + 1)) for board in range(len(self.ranks)))

    def has_come(self, rank: int, what: int, number: int) -> bool:
        """Whether that rank, which shares memory with us, has published it."""
        word = what if what == FAREWELL else what + number % PARITIES
        return self._words.has_come(self.ranks.index(rank), word, number)

    def silent_in(self, number: int) -> Collection[int]:
        """Ranks that were silent in an earlier round of that parity, and so are silent in this one, on every rank."""
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

    def farewell(self, why: Why) -> None:
        """No word of ours comes any more. Once."""
        words, number = why.words_bytes(), why.number(self._world)
        self._reasons[self._own][: len(words)] = np.frombuffer(words, np.uint8)
        self._words.publish(FAREWELL, PARITIES * (1 if number is None else 2 + number))

    def has_left(self, rank: int) -> bool:
        """Whether that rank, which shares memory with us, has said farewell."""
        return self.has_come(rank, FAREWELL, PARITIES)

    def why_left(self, rank: int) -> Why:
        """What that rank, which shares memory with us, gave as reason in its farewell."""
        board = self.ranks.index(rank)
        number = self._words.value(board, FAREWELL) // PARITIES
        words = self._reasons[board].tobytes().partition(b"\0")[0]
        return Why.of_peer(number - 2 if number >= 2 else None, words, self._world)

    def note(self, data: bytes) -> None:
        """Shows it to those who share memory with us."""
        self._notes[self._own][:] = np.frombuffer(data, np.uint8)

    def note_of(self, rank: int) -> bytes:
        """What that rank shows; perhaps half of it, while it writes."""
        return self._notes[self.ranks.index(rank)].tobytes()

    def wait(self, what: int, number: int, timeout_s: float) -> tuple[Outcome, list[int]]:
        """Waits until all have published it. Returns ranks that were lost before: none, unless these are masked."""
        parity = number % PARITIES
        then = RETURNED + parity if what == SENT else None
        result, index, boards = self._words.wait(what + parity, number, timeout_s, then)
        absent = [self.ranks[board] for board in boards]
        self.masked.update(absent)
        if what == SENT:
            self._silent[number % PARITIES].update(absent)
        rank = -1 if result == "ready" else [*self.ranks, *self._watched][index]
        return Outcome.of_native(result, rank), absent
