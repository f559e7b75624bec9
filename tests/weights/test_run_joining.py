"""Members that are left out while they join again."""

from __future__ import annotations

from typing import Any

import pytest

from crossrail.weights.inventory.holdings import Role
from crossrail.weights.services import messages as m
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S, until


@pytest.mark.parametrize("role", ["trainer", "target"])
async def test_who_is_left_out_again_before_it_hears_that_it_has_joined_again_does_so_once_more(
    make_fleet: MakeFleet, role: Role
) -> None:
    """It was frozen as it joined again, and through the next update: what it finds then comes in any order."""
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start()
    member: Any = fleet.trainers[1] if role == "trainer" else fleet.receivers[1]
    box, roster, joins = fleet.mailboxes["controller"], controller._roster, 0

    async def join(sender: bytes, question: m.Join) -> object:
        nonlocal joins
        joins += 1
        answer = await roster._on_join(sender, question)
        if joins == 1:
            roster._remove(roster.members[role, 1], "it did not answer Abort")
            told = m.Evicted("it did not answer Abort", number=question.number)
            await box.ask(sender, told, m.Taken, PATIENCE_S)
        return answer

    box.handle(m.Join, join)
    roster.drop(roster.members[role, 1], "it did not answer Commit")
    await until(lambda: (again := member._membership._joining) is not None and again.done())
    assert joins == 2 and 1 in controller.ranks(role)
    await fleet.update(1)
    await fleet.assert_holds(1)
