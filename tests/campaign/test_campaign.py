"""The campaign over real processes: a few rounds, what it finds, what it prints. ./dev campaign runs many more."""

import json
import re
from pathlib import Path

import pytest

from crossrail.campaign.players import TRANSPORTS
from crossrail.campaign.run import Campaign
from tests.campaign.forking import run
from tests.support.seeds import Seed

pytestmark = pytest.mark.timeout(600)

ROUNDS = 6
FOUND = {
    "completes twice": "completed 2 times",
    "never completes": "there is no end of operation",
    "counts one more": "of immediate",
    "writes late": "was touched after its completion",
    "delivers twice": "was delivered twice",
    "loses messages": "was delivered 0 times",
    "sends other bytes": "is not what was sent|was counted before its bytes were in place",
    "leaks a descriptor": r"left behind \d+ more fds",
    "dies": "ended by itself, with status 3",
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("fresh", [False, True])
def test_rounds_keep_all_promises(tmp_path: Path, seed: Seed, transport: str, fresh: bool) -> None:
    first = seed.number() if fresh else 1

    done = run(
        tmp_path, "-m", "crossrail.campaign", "--transport", transport, "--rounds", str(ROUNDS), "--from", str(first)
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{transport}: {ROUNDS} rounds from {first}, 0 failed" in done.stdout
    assert " done, " in done.stdout


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What campaigns say whose processes break a promise."""
    done = run(tmp_path_factory.mktemp("dishonest"), str(Path(__file__).parent / "dishonest.py"))
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("mistake", FOUND)
def test_a_broken_promise_is_found(said: dict[str, str], mistake: str) -> None:
    assert said.keys() == FOUND.keys()
    assert re.search(FOUND[mistake], said[mistake])


def test_a_failure_prints_the_command_that_repeats_it(said: dict[str, str]) -> None:
    assert "again: ./dev campaign --transport shm --from 1 --rounds 1" in said["delivers twice"]


def test_a_summary_of_nothing_is_one() -> None:
    summary = Campaign("shm", 7).summary()

    assert "shm: 0 rounds from 7, 0 failed" in summary
    assert "player-0, never killed: nobody looked whether it grew: of 0 samples" in summary
