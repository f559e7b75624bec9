"""Ranks die, freeze and are cut off on the simulator, and the others go on, all alike; and what would see it if not."""

from __future__ import annotations

import pytest

from crossrail.moe.links.far import Far
from crossrail.moe.masking.confirmations import Confirmations
from crossrail.moe.masking.views import View
from crossrail.sim.scenarios import Scenario, play
from tests.moe import dying_ranks
from tests.support.seeds import Seed

SCENARIO = Scenario("tests.moe.dying_ranks:ranks_die", "", dying_ranks.ranks_die)
RUNS = 5
SEEDS_MAX = 40


@pytest.mark.parametrize("fault", dying_ranks.FAULTS)
def test_the_others_go_on_and_agree(monkeypatch: pytest.MonkeyPatch, fault: str, seed: Seed) -> None:
    monkeypatch.setattr(dying_ranks, "FAULTS", (fault,))
    outcomes = [play(SCENARIO, seed.number()) for _ in range(RUNS)]
    assert [outcome.failures for outcome in outcomes] == [[]] * RUNS
    # Some 100 a run, and as few as 15 in one whose ranks die before the first round, which is no fault.
    assert sum(outcome.checks for outcome in outcomes) > 20 * RUNS


def complaints(fault: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the first of the first seeds that fails with that fault; empty: none does."""
    monkeypatch.setattr(dying_ranks, "FAULTS", (fault,))
    runs = (play(SCENARIO, number).failures for number in range(1, SEEDS_MAX))
    return "\n".join(next((failures for failures in runs if failures), []))


def test_ranks_that_do_not_wait_for_confirmations_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Confirmations, "unconfirmed", lambda *_: [])
    assert "is not the same to all" in complaints("in-send", monkeypatch)


def test_late_writes_that_nobody_fences_off_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Far, "shut_out", lambda *_: True)
    assert "closed to" in complaints("freeze", monkeypatch)


def test_two_halves_that_both_go_on_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(View, "is_quorum", lambda *_: True)
    assert "is not the same to all" in complaints("half", monkeypatch)
