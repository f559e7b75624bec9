"""The records that a Ledger (crossrail.campaign.checkers) keeps: memory, ranges in it, immediates, operations."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from crossrail.campaign.parts import AnyCounter, AnyEngine, AnyRegion, AnyTransfer
from crossrail.regions import RegionDescriptor

Bytes = npt.NDArray[np.uint8]


@dataclass(eq=False)
class Arena:
    """Registered memory from which a ledger takes ranges that nobody else uses."""

    engine: AnyEngine
    memory: Bytes
    region: AnyRegion
    taken: int = 0
    is_closed: bool = False  # or revoked: nobody who learned of it by its descriptor may touch it
    is_fencing: bool = False  # being revoked: a peer may still be at it
    is_fenced: bool = False  # revoked, not renewed, and in use by its owner
    older: list[RegionDescriptor] = field(default_factory=list)  # that were revoked, the last one last

    @property
    def descriptor(self) -> RegionDescriptor:
        """The descriptor that peers have: the present one, or the last."""
        return self.older[-1] if self.is_fencing or self.is_fenced else self.region.descriptor

    def refuses(self, descriptor: RegionDescriptor) -> bool:
        """Whether nothing is to be done by that descriptor, from now on."""
        return descriptor in (self.older[:-1] if self.is_fencing else self.older)

    def take(self, nbytes: int, align: int = 1) -> int | None:
        """Offset of an unused range; None if there is none left."""
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
    is_fenced: bool = False  # poisoned because peers were locked out, whether its operation is complete or not
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
    is_stale: bool = False  # goes by a descriptor that was revoked: it must fail
    is_verified: bool = False
    is_spoiled: bool = False  # its bytes were changed on their way, which verify has to find
    is_source_fenced: bool = False  # a read by a peer that was locked out

    def __str__(self) -> str:
        return f"operation {self.number} ({self.kind}, {self.transfer.nbytes} bytes, {self.status})"
