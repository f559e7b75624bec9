"""How the ranks of an AllToAll meet: they compare arguments, and map each other's boards where possible."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import crossrail as xr
from crossrail import _core
from crossrail.errors import CrossrailError
from crossrail.moe.bounds import private_rows
from crossrail.moe.config import Config, check_agreement
from crossrail.moe.group import Group
from crossrail.moe.links.far import Far
from crossrail.moe.masking.agreement import Agreement
from crossrail.moe.nodes import Nodes, check_nodes, nodes_found


@dataclass(frozen=True)
class Member:
    """One rank. node: those of one share memory. board: its memory, if we are of that node. uses_tcp: some rank is
    reached by tcp from there.
    """

    rank: int
    address: xr.Address
    node: int
    board: memoryview | None
    uses_tcp: bool


def meet(engine: xr.Engine, group: Group, config: Config, board: xr.Region, timeout_s: float) -> list[Member]:
    """All ranks, by rank. All ranks get the same decision, or all get an error.

    Two exchanges: arguments and descriptors first; then whose boards each could map, or why it failed.
    """
    card = {"config": config.encode(), "board": board.descriptor.to_bytes().hex(), "trouble": ""}
    cards = _tell(group, "arguments", card, timeout_s)
    check_agreement([one["config"] for one in cards], range(group.size))
    _check_all_well(cards)
    descriptors = [xr.RegionDescriptor.from_bytes(bytes.fromhex(one["board"])) for one in cards]
    boards: dict[int, memoryview] = {}
    trouble = ""
    try:
        boards = {group.rank: board.view()}
        if config.node_size != 1:
            boards.update(_map_boards(engine, group.rank, descriptors, timeout_s))
    except CrossrailError as error:
        trouble = str(error)
    uses_tcp = any(
        engine.explain(descriptor.owner).transport == "tcp"
        for rank, descriptor in enumerate(descriptors)
        if rank != group.rank
    )
    report: dict[str, Any] = {"mapped": sorted(boards), "trouble": trouble, "uses_tcp": uses_tcp}
    reports = _tell(group, "memory", report, timeout_s)
    _check_all_well(reports)
    mapped = [set(told["mapped"]) for told in reports]
    nodes = config.nodes_given or nodes_found(mapped)
    check_nodes(nodes, mapped, config.node_size)
    return [
        Member(
            rank,
            descriptor.owner,
            nodes[rank],
            boards[rank] if nodes[rank] == nodes[group.rank] else None,
            bool(reports[rank]["uses_tcp"]),
        )
        for rank, descriptor in enumerate(descriptors)
    ]


def tell_absence(group: Group, config: Config, timeout_s: float, trouble: CrossrailError) -> None:
    """Instead of meet(): why we cannot."""
    card = {"config": config.encode(), "board": "", "trouble": str(trouble)}
    _tell(group, "arguments", card, timeout_s)


def meet_far(
    group: Group,
    far: Far | None,
    agreement: Agreement | None,
    addresses: Sequence[xr.Address],
    timeout_s: float,
    trouble: CrossrailError | None = None,
) -> None:
    """A third exchange, where not all ranks share memory: what those that do not need to know of each other.

    trouble: why we have no far, as of all_are_ready().
    """
    card = {"far": None if far is None else far.card(), "agreement": None if agreement is None else agreement.card()}
    cards = _tell(group, "far memory", card | {"trouble": "" if trouble is None else str(trouble)}, timeout_s)
    if trouble is not None:
        raise trouble
    _check_all_well(cards)
    assert far is not None
    far.connect([one["far"] for one in cards], addresses, timeout_s)
    if agreement is not None:
        agreement.connect([one["agreement"] for one in cards], addresses, timeout_s)


def all_are_ready(group: Group, far: Far, timeout_s: float, trouble: CrossrailError | None) -> None:
    """The last exchange, after meet_far: nobody writes before all have connected, and know who reaches their memory.

    trouble: why we cannot go on, which is raised here; others raise it, too.
    """
    card = {"reached": sorted(far.reached), "trouble": "" if trouble is None else str(trouble)}
    cards = _tell(group, "connected", card, timeout_s)
    if trouble is not None:
        raise trouble
    _check_all_well(cards)
    far.hear([rank for rank in far.ranks if group.rank in cards[rank]["reached"]])


@contextlib.contextmanager
def telling_others(tell: Callable[[CrossrailError], None]) -> Iterator[None]:
    """Tells the other ranks of a failure here, such as lack of memory, before it is raised: through the exchange in
    which they would wait for us in vain.
    """
    try:
        yield
    except Exception as error:
        told = CrossrailError(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        if isinstance(error, CrossrailError):
            told = error
        # Everybody was told, or somebody does not come; the first error is the one to raise.
        with contextlib.suppress(CrossrailError):
            tell(told)
        raise


def make_layout(config: Config, nodes: Nodes) -> _core.moe.Layout:
    """Where rows go, for ranks of these nodes."""
    return _core.moe.Layout(
        world=config.world,
        experts=config.experts,
        experts_per_rank=config.split.counts,
        top_k=config.top_k,
        max_tokens=config.max_tokens,
        dp_size=config.dp_size,
        padding=config.padding,
        private_rows=private_rows(config) if len(set(nodes)) > 1 else 0,
        rows_per_expert=config.rows_per_expert if config.layout == "masked" else 0,
        node_of_rank=nodes,
    )


def _tell(group: Group, step: str, card: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """What each rank says at this step. CrossrailError on all if one has given up and started over meanwhile."""
    told = [json.loads(data) for data in group.all_gather(json.dumps({"step": step, **card}).encode(), timeout_s)]
    for rank, one in enumerate(told):
        if one["step"] != step:
            raise CrossrailError(
                f"rank {rank} tells its {one['step']} where its {step} is due: a rank gave up and started again. "
                "Next: make this AllToAll again, on all ranks"
            )
    return told


def _check_all_well(cards: list[dict[str, Any]]) -> None:
    """CrossrailError with the trouble of the first rank that reports any."""
    for rank, told in enumerate(cards):
        if told["trouble"]:
            raise CrossrailError(f"rank {rank} could not be set up: {told['trouble']}")


def _map_boards(
    engine: xr.Engine, rank: int, descriptors: list[xr.RegionDescriptor], timeout_s: float
) -> dict[int, memoryview]:
    return {
        other: engine.map(descriptor, timeout_s)
        for other, descriptor in enumerate(descriptors)
        if other != rank and engine.explain(descriptor.owner).transport == "shm"
    }
