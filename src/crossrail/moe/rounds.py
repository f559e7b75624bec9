"""One dispatch and its combine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import crossrail as xr
from crossrail.errors import EngineClosed, UsageError
from crossrail.moe.arrays import Array


class Stage(Enum):
    """What has been called for a round; each stage follows the one before."""

    SENT = "dispatch_send"
    RECEIVED = "dispatch_recv"
    RETURNED = "combine_send"
    ENDED = "combine_recv"


@dataclass(eq=False, repr=False)
class Round:
    """Between dispatch_send and the end of combine_recv. number: from 1, the same on all ranks, modulo 2^32; ordinal:
    likewise, of all that ever were.

    begun_s: of time.perf_counter(). routes: how many, without those of index -1. indices, slots: as given and as
    Kernels.count made them. routes_hash: what far ranks were told of them, with dp_size > 1. placement: where all rows
    go, once all routes are known. where: as Kernels.reduce takes it, once received. sources: of each group the rank
    whose rows come to us, None where all that have them are masked; with placement. is_refused: it needs more room than
    there is. has_sent_sums: with node_sums, partners have theirs.
    output: what expert_output gave last, until results are returned. silent, absent: with on_lost="mask", ranks whose
    tokens are not in it, known with placement, and ranks whose experts' outputs are in no sum, known once it has ended.
    """

    number: int
    ordinal: int
    begun_s: float
    tokens: int
    routes: int
    indices: Array
    slots: Array
    weights: Array | None
    is_tensor: bool
    routes_hash: int = 0
    stage: Stage = Stage.SENT
    placement: Any = None
    sources: list[int | None] = field(default_factory=list)
    where: Any = None
    is_refused: bool = False
    has_sent_sums: bool = False
    output: Any = None
    silent: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()

    def require(self, stage: Stage, call: str) -> None:
        """UsageError unless the round is at this stage. call: which one asks, for the words."""
        if self.stage is not stage:
            raise UsageError(
                f"{call} of round {self.number}, which has had {self.stage.value}: it comes after {stage.value}"
            )

    def __repr__(self) -> str:
        return f"<Round {self.number} of {self.tokens} tokens, after {self.stage.value}>"

    def __str__(self) -> str:
        return f"round {self.number} (after {self.stage.value})"


@dataclass(frozen=True, eq=False)
class Dispatched:
    """Rows for this rank's experts.

    x: [rows, hidden] of dtype. scales: float32 [rows, blocks] or None. counts: int32 [experts of the rank], rows of
    each. offsets: int32 [experts of the rank + 1], first row of each, at multiples of padding; the last is rows. Rows
    that belong to no route, of padding and of the masked layout, hold what they held before.
    """

    x: Any
    scales: Any
    counts: Any
    offsets: Any
    rows: int
    round: Round


def check_usable(kind: str, is_closed: bool, engine: xr.Engine) -> None:
    """UsageError for an AllToAll, of that kind, that is closed; EngineClosed."""
    if is_closed:
        raise UsageError(f"this {kind} is closed")
    if engine.closed:
        float(engine._now_s)  # raises in a forked child, where nobody has closed it, and says that this is one
        raise EngineClosed(f"engine {engine.name!r} was closed")


def round_meant(
    given: object, call: str, kinds: tuple[type[Round | Dispatched], ...], known: Collection[Round]
) -> Round:
    """The round that a call is given, itself or by what it dispatched. known: those that are open.

    UsageError for what is of none of these kinds, and for a round of another AllToAll; not for one that has ended.
    """
    if not isinstance(given, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise UsageError(f"{call} was given {type(given).__name__}, must be {wanted}")
    opened = given.round if isinstance(given, Dispatched) else given
    assert isinstance(opened, Round)
    if opened.stage is not Stage.ENDED and opened not in known:
        raise UsageError(f"{call} was given {opened} of another AllToAll")
    return opened
