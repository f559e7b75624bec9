"""The randomised campaign: fixed seeds, fresh ones, the same again, and what it prints. ./dev sim runs many more."""

from pathlib import Path

import pytest

from crossrail import _core
from crossrail.sim import campaign
from crossrail.sim.scenarios import Run, Scenario
from crossrail.sim.workload import Workload
from tests.support.seeds import Seed


@pytest.mark.parametrize("seed", range(1, 26))
def test_a_fixed_seed_keeps_all_promises(seed: int) -> None:
    assert campaign.run_seed(seed) == ""


def test_fresh_seeds_keep_all_promises(seed: Seed) -> None:
    first = seed.number() << 8
    for number in range(first, first + 15):
        assert campaign.run_seed(number) == "", f"./dev sim --from {number} --seeds 1"


def test_a_seed_says_everything() -> None:
    digests = []
    for _ in range(2):
        workload = Workload(8)
        workload.run()
        digests.append((workload.world.log_digest, workload.done, [op.status for op in workload.ledger.ops]))

    assert digests[0] == digests[1]


def test_the_workload_is_not_idle() -> None:
    did: dict[str, int] = {}
    statuses: dict[str, int] = {}
    met: set[str] = set()
    for seed in range(100, 130):
        workload = Workload(seed)
        workload.run()
        for name, times in workload.done.items():
            did[name] = did.get(name, 0) + times
        for op in workload.ledger.ops:
            statuses[op.status] = statuses.get(op.status, 0) + 1
            met |= {name for name in ("is_stale", "is_verified", "is_spoiled") if getattr(op, name)}
            met |= {f"fenced, and {op.status}" for piece in op.pieces if piece.is_fenced and not op.is_stale}

    assert did.keys() == workload._actions().keys()
    assert statuses["done"] > sum(statuses.values()) / 2
    for status in ("cancelled", "peer-lost", "region-closed", "region-revoked", "transport-failed"):
        assert statuses.get(status, 0) > 0, statuses
    assert met >= {"is_stale", "is_verified", "is_spoiled", "fenced, and done", "fenced, and region-revoked"}


def test_a_failure_prints_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(campaign, "_run_batch", lambda first, count, *_: ([(first + 1, "not so")], count))

    assert campaign.main(["--from", "40", "--seeds", "20", "--jobs", "1"]) == 1

    shown = capsys.readouterr().out
    assert "FAILED: seed 41: not so" in shown
    assert "./dev sim --from 41 --seeds 1" in shown
    assert "20 seeds from 40, 1 failed" in shown


async def looks_wrong(run: Run) -> None:
    run.check.that(False, "it is wrong")


def test_scenarios_are_played_besides_with_some_of_the_seeds() -> None:
    beside = campaign.Beside([Scenario("wrong", "", looks_wrong)], every=4)

    assert [campaign.run_seed(seed, beside) for seed in (3, 4, 5)] == ["", "wrong: it is wrong", ""]


def test_processes_of_the_campaign_play_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--from", "3", "--seeds", "2", "--jobs", "1", "--every", "4"]
    assert campaign.main([*arguments, "--scenario", f"{__name__}:looks_wrong"]) == 1

    assert "FAILED: seed 4: tests.sim.test_campaign:looks_wrong: it is wrong" in capsys.readouterr().out


def test_a_process_that_crashes_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign.sys, "executable", "/bin/false")

    findings, ran = campaign._run_batch(7, 3, 30, False, [])

    assert ran == 0
    assert [seed for seed, _ in findings] == [7]
    assert "status 1" in findings[0][1]


def test_no_deliberate_mistake_is_in_this_build() -> None:
    assert b"CROSSRAIL_MUTATION" not in Path(_core.__file__).read_bytes()
