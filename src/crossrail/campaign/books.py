"""What a Ledger (crossrail.campaign.checkers) notes: memory, ranges in it, numbers, operations."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from crossrail.campaign.parts import AnyCounter, AnyEngine, AnyRegion, AnyTransfer

Bytes = npt.NDArray[np.uint8]


@dataclass(eq=False)
class Arena:
    """Registered memory from which a ledger takes ranges that nobody else uses."""

    engine: AnyEngine
    memory: Bytes
    region: AnyRegion
    taken: int = 0
    is_closed: bool = False  # or revoked: nobody who learned of it by its descriptor may touch it

    def take(self, nbytes: int, align: int = 1) -> int | None:
        """Offset of a range that was never used; None when there is none left."""
        at = -(-self.taken // align) * align
        if self.is_closed or at + nbytes > len(self.memory):
            return None
        self.taken = at + nbytes
        return at


@dataclass(eq=False)
class Piece:
    """A range at a target, and what is to be there in the end."""

    arena: Arena
    offset: int
    data: Bytes
    is_poisoned: bool = False  # by us, after its operation was complete: from then on nothing may touch it
    is_unsure: bool = False  # nothing is promised any more

    @property
    def memory(self) -> Bytes:
        return self.arena.memory[self.offset : self.offset + len(self.data)]


@dataclass(eq=False)
class Tally:
    """One immediate number at one receiver, and the operations that count there."""

    counter: AnyCounter
    engine: AnyEngine
    ops: list[Op] = field(default_factory=list)


@dataclass(eq=False)
class Op:
    """One submit."""

    number: int
    kind: str
    transfer: AnyTransfer
    sources: list[tuple[Arena, int, int]]
    pieces: list[Piece]
    counts: dict[Tally, int] = field(default_factory=dict)  # how much each receiver counts of it
    completions: int = 0
    status: str = "pending"
    payload: bytes = b""
    receiver: AnyEngine | None = None

    def __str__(self) -> str:
        return f"operation {self.number} ({self.kind}, {self.transfer.nbytes} bytes, {self.status})"
