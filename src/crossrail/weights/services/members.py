"""Who takes part in updates, and what the controller tells each trainer of a plan."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from crossrail.control.wire import Unreachable, Wire
from crossrail.weights.inventory.holdings import Inventory, Role
from crossrail.weights.planning.plan import Plan
from crossrail.weights.services import messages as m

_JOIN_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)


@dataclass(eq=False)
class Member:
    """One incarnation of a trainer or inference rank. buffers: descriptors of each of its memories."""

    role: Role
    rank: int
    address: bytes
    inventory: Inventory
    buffers: list[list[bytes]]

    def __str__(self) -> str:
        return f"{'trainer' if self.role == 'trainer' else 'inference rank'} {self.rank}"


def assigns_of(
    plan: Plan, trainers: Sequence[Member], targets: Sequence[Member], gone: list[bytes]
) -> dict[int, m.Assign]:
    """By trainer's rank. gone: whom they need not wait for any more. Blocks: it compresses all of the plan."""
    groups = sorted(set(plan.tasks["group"].tolist()))
    addresses = [m.Member(member.rank, member.address) for member in trainers]
    peers = {
        (member.rank, index): m.PeerRegion(member.rank, index, descriptor)
        for member in trainers
        for index, descriptor in enumerate(member.buffers[0])
    }
    senders = plan.tasks["trainer"][plan.parts["task"][plan.gathers["part"]]]
    meets_first = bool((plan.gathers["trainer"] != senders).any())
    regions = {
        (member.rank, index): [
            m.TargetRegion(member.rank, buffer, index, descriptors[index])
            for buffer, descriptors in enumerate(member.buffers)
        ]
        for member in targets
        for index in range(len(member.buffers[0]))
    }

    def assign(rank: int) -> m.Assign:
        part = plan.of_trainer(rank)
        gathered = np.unique(part.gathers[["trainer", "region"]]).tolist()
        written = np.unique(part.writes[["target", "region"]]).tolist()
        return m.Assign(
            plan.digest,
            m.packed(part.to_bytes()),
            groups,
            addresses,
            [peers[key] for key in gathered if key[0] != rank],
            [each for key in written for each in regions[key]],
            list(gone),
            meets_first,
        )

    return {member.rank: assign(member.rank) for member in trainers}


async def join_again(join: Callable[[bytes], Awaitable[None]], controller: bytes, wire: Wire) -> None:
    """Of one that was left out. A first try may only end what is left here of a connection that the controller's engine
    has given up.
    """
    for pause_s in _JOIN_PAUSES_S:
        try:
            await join(controller)
            return
        except Unreachable:
            await asyncio.sleep(pause_s)
            wire.try_anew(controller)
    await join(controller)
