"""The soak: a short one, what it finds when processes break a promise, what it leaves. ./dev soak runs for an hour."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from crossrail.campaign.soak.chaos import KINDS, schedule
from tests.campaign.forking import run
from tests.support.seeds import Seed

pytestmark = pytest.mark.timeout(600)

FOUND = {
    "never completes": "there is no end of row",
    "counts one more": "transfers_submitted says|counted of immediate",
    "writes late": "was touched after its last completion",
    "delivers twice": "was delivered 2 times",
    "loses messages": "is done, and was delivered 0 times",
    "sends other bytes": "is not what was sent",
    "leaks a descriptor": r"left behind \d+ more fds",
    "notes too early": "counted of immediate|is done, and was delivered 0 times",
}


def test_rounds_over_both_transports_keep_all_promises(tmp_path: Path, seed: Seed) -> None:
    command = ["-m", "crossrail.campaign.soak", "--rounds", "2", "--round-s", "1", "--seed", str(seed.number())]

    done = run(tmp_path, *command, "--folder", "left", "--csv", "samples.csv")

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"2 rounds of shm, tcp  [\d,]+ operations  \d+ kills  [\d.]+ GB  0 failed", done.stdout)
    assert "parent: nobody looked whether it grew: of 2 samples in a row" in done.stdout
    assert "nothing grew" not in done.stdout
    assert not (tmp_path / "left").exists()
    head, *samples = (tmp_path / "samples.csv").read_text().splitlines()
    assert head == "seconds,rounds,process,fds,threads,heap_kib,private_kib,shared_kib,mappings"
    assert {line.split(",")[2] for line in samples} == {"shm seat-0", "tcp seat-0", "parent"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, list[str]]]:
    """What soaks say whose processes break a promise, and the names of the files that they leave."""
    done = run(tmp_path_factory.mktemp("dishonest"), str(Path(__file__).parent / "dishonest_soak.py"))
    assert done.returncode == 0, done.stderr
    return {name: (said, files) for name, said, files in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("mistake", FOUND)
def test_a_broken_promise_is_found(found: dict[str, tuple[str, list[str]]], mistake: str) -> None:
    assert found.keys() == FOUND.keys()
    assert re.search(FOUND[mistake], found[mistake][0])


def test_a_failure_leaves_books_recorders_and_the_command_that_repeats_it(
    found: dict[str, tuple[str, list[str]]],
) -> None:
    said, files = found["delivers twice"]

    assert "again: ./dev soak --transport shm --seed 1 --rounds 1 --round-s 0.4" in said
    assert {"why.txt", "seat-0.json", "life-1-seat-0.npz"} <= set(files)


def test_a_seed_is_a_schedule_and_one_seat_lives_on() -> None:
    import random

    plans = [schedule(random.Random(7), 3.0, "tcp", has_rails=True, spared=0) for _ in range(2)]
    many = [
        fault
        for number in range(200)
        for fault in schedule(random.Random(number), 3.0, "tcp", has_rails=True, spared=0)
    ]

    assert plans[0] == plans[1]
    assert {fault.kind for fault in many} == set(KINDS)
    assert all(fault.seat != 0 for fault in many if fault.kind in ("kill", "reopen"))
    assert all(np.diff([fault.at_s for fault in plans[0]]) >= 0)
