"""One dispatch and its combine; or, once captured into a graph, one of each per replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from crossrail.moe.graph.kernels import Routes
from crossrail.moe.rounds import Stage

if TYPE_CHECKING:
    from crossrail.moe.graph.all_to_all import GraphAllToAll


class Outputs(NamedTuple):
    """What a dispatch fills, as GraphDispatched has it."""

    x: Any
    scales: Any | None
    counts: Any
    offsets: Any


@dataclass(eq=False)
class GraphRound:
    """Between dispatch_send and combine_recv. In a captured graph it stands for one round of each replay.

    number: int64 [1], on the device: the round that it is when kernels of it run. tokens: rows of x. stage: what was
    called for it last.
    """

    number: Any
    tokens: int
    routes: Routes
    weights: Any | None
    owner: GraphAllToAll
    stage: Stage = Stage.SENT
    outputs: Outputs | None = None  # once somebody asked
    stream: int = 0  # of dispatch_send

    def __repr__(self) -> str:
        return f"<GraphRound of {self.tokens} tokens, after {self.stage.value}>"


@dataclass(frozen=True, eq=False)
class GraphDispatched:
    """Rows for this rank's experts, once the kernels before have run.

    x: [rows, hidden] of dtype. scales: float32 [rows, blocks] or None. counts: int32 [experts of the rank], rows of
    each. offsets: int32 [experts of the rank + 1], first row of each. rows: as many as there may be, whatever came:
    with layout "masked" room for each expert, with "grouped" for all of them, of which offsets[-1] are used. Rows that
    belong to no route are not written.
    """

    x: Any
    scales: Any | None
    counts: Any
    offsets: Any
    rows: int
    round: GraphRound
