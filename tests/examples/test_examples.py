"""The programs of examples/ do what their docstrings say, and those that docs/ show are the same text there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.documentation.blocks import blocks
from tests.examples.programs import FOLDER, alike, promised, running
from tests.support.limits import PROGRAM_S

SHOWN = [("docs/moe.md", 0, "moe_ranks.py"), ("docs/simulator.md", 0, "simulated/conftest.py")]
SHOWN += [("docs/simulator.md", 1, "simulated/test_push.py")]


def test_pages_written_into_another_process(tmp_path: Path) -> None:
    with running(tmp_path, "target.py") as target, running(tmp_path, *target.next()) as initiator:
        written, counted = initiator.ended(), target.ended()

    assert written.splitlines() == promised("initiator.py")
    assert ["run: python initiator.py 5852...", *counted.splitlines()] == promised("target.py")
    assert initiator.complained == target.complained == ""


def test_kv_from_a_prefiller_to_a_decoder(tmp_path: Path) -> None:
    with running(tmp_path, "kv_decode.py") as decoder, running(tmp_path, *decoder.next()) as prefiller:
        written, arrived = prefiller.ended(), decoder.ended()

    assert written.splitlines() == promised("kv_prefill.py")
    assert ["run: python kv_prefill.py 5841...", *arrived.splitlines()] == promised("kv_decode.py")
    assert prefiller.complained == decoder.complained == ""


def test_experts_on_four_ranks(tmp_path: Path) -> None:
    with running(tmp_path, "moe_ranks.py") as ranks:
        said = ranks.ended().splitlines()

    assert Counter(alike(said)) == {alike(promised("moe_ranks.py"))[0]: 4}
    assert ranks.complained == ""


def test_rail_that_is_cut(tmp_path: Path) -> None:
    with running(tmp_path, "rails.py") as rails:
        said = rails.ended().splitlines()

    assert alike(said) == alike(promised("rails.py"))
    broke = [int(times) for times in re.findall(r"broke (\d+) times", said[2])]
    assert broke[2] >= 1 and broke == [0, 0, broke[2], 0]


def test_writes_that_are_late(tmp_path: Path) -> None:
    with running(tmp_path, "deadlines.py") as deadlines:
        said = deadlines.ended().splitlines()

    in_time, client, answer, stopped, goes_on = promised("deadlines.py")
    assert [said[0], said[2], said[4]] == [in_time, answer, goes_on]
    assert said[1].startswith(client.partition(":")[0]) and said[3].startswith(stopped.partition(":")[0])
    ends = [dict(zip(words[1::2], words[::2], strict=True)) for words in (_words(said[1]), _words(said[3]))]
    assert [sum(map(int, each.values())) for each in ends] == [64, 64]
    assert set(ends[0]) <= {"done", "cancelled"}
    # Not all threads of a process have stopped when kill() returns: the first few writes may find one that goes on.
    assert "cancelled" in ends[1] and set(ends[1]) <= {"done", "peer-lost", "cancelled"}


def _words(line: str) -> list[str]:
    return line.partition(": ")[2].replace(",", "").split()


@pytest.mark.parametrize(("page", "number", "file"), SHOWN, ids=lambda value: str(value))
def test_program_that_docs_show_is_this_one(page: str, number: int, file: str) -> None:
    assert blocks()[page][number] == (FOLDER / file).read_text()


def test_simulated_push_with_twenty_seeds() -> None:
    """As in a user's project: by a pytest that does not see our settings."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "--sim-runs", "20"]
    folder = FOLDER / "simulated"
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PROGRAM_S)

    assert done.returncode == 0 and "20 passed" in done.stdout, done.stdout + done.stderr


def test_each_example_is_listed_and_short() -> None:
    text = (FOLDER / "README.md").read_text()
    for file in FOLDER.rglob("*.py"):
        assert f"]({file.relative_to(FOLDER)})" in text
        assert file.read_text().count("\n") <= 90, file
