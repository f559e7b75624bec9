"""The pytest plugin for users: crossrail.testing."""

import re
import shlex
import sys

import pytest

from tests.support.limits import PROGRAM_S

pytest_plugins = ["pytester"]

TESTS = """
import asyncio
import os
import pytest
import crossrail as xr
from crossrail import sim

async def test_coroutine(sim_world):
    loop = asyncio.get_running_loop()
    await asyncio.sleep(3600 * 0.5)
    assert loop.time() == pytest.approx(1800)

def test_current(sim_world):
    a, b = (xr.Engine(name, transport="sim") for name in "ab")
    source, target = a.alloc(64), b.alloc(64)
    a.submit_write(source, target.descriptor, imm=1).wait(timeout_s=1)
    b.imm_counter(1).wait(1, timeout_s=1)

def test_seed(sim_world):
    with open(os.environ["SEEDS"], "a") as file:
        print(sim_world.seed, file=file)

def test_fails(sim_world):
    sim_world.host("a").engine("a")
    assert False
"""


@pytest.fixture
def user(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project of a user's, with its tests."""
    monkeypatch.setenv("SEEDS", str(pytester.path / "seeds"))
    monkeypatch.delenv("CROSSRAIL_SIM_SEED", raising=False)
    pytester.makeconftest('pytest_plugins = ["crossrail.testing"]')
    pytester.makepyfile(test_mine=TESTS)
    return pytester


PYTEST = (sys.executable, "-m", "pytest")
WITHOUT = ("-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "no:rerunfailures")


def run(user: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return user.runpytest_inprocess(*WITHOUT, *arguments)


def seeds(user: pytest.Pytester) -> list[int]:
    file = user.path / "seeds"
    found = [int(line) for line in file.read_text().split()]
    file.unlink()
    return found


def test_worlds_are_made_and_coroutines_run_on_their_loops(user: pytest.Pytester) -> None:
    run(user, "-k", "coroutine or current").assert_outcomes(passed=2, deselected=2)


def test_a_failure_tells_the_command_that_replays_it_and_the_last_events(user: pytest.Pytester) -> None:
    # In a process of its own: pytest holds on to the failure, and so to its world.
    result = user.runpytest_subprocess(*WITHOUT, "-k", "fails", "--sim-seed", "1847", timeout=PROGRAM_S)

    result.assert_outcomes(failed=1, deselected=3)
    result.stdout.fnmatch_lines(["*replay*", "pytest *test_mine.py::test_fails* --sim-seed 1847", "*engine-open*"])


def test_a_failure_of_many_runs_is_replayed_by_its_command(user: pytest.Pytester) -> None:
    """The command of a run that failed runs that one again, in the same world."""
    fails = "def test_odd(sim_world):\n    print('world', sim_world.seed)\n    assert sim_world.seed % 2 == 0\n"
    user.makepyfile(test_odd=fails)
    first = user.runpytest_subprocess(*WITHOUT, "test_odd.py", "--sim-runs", "12", "--sim-seed", "3", timeout=PROGRAM_S)
    command = re.search(r"^pytest (.*)$", first.stdout.str(), re.MULTILINE)
    assert command is not None

    again = user.runpytest_subprocess(*WITHOUT, *shlex.split(command[1]), timeout=PROGRAM_S)

    again.assert_outcomes(failed=1)
    shown = [re.findall(r"^world (\d+)$", result.stdout.str(), re.MULTILINE)[0] for result in (first, again)]
    assert shown[0] == shown[1]


def test_a_failure_in_a_folder_is_replayed_from_there(user: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    user.makeini("[pytest]\n")
    folder = user.mkdir("folder")
    (folder / "test_inner.py").write_text("def test_fails(sim_world):\n    assert False\n")
    monkeypatch.chdir(folder)
    result = user.run(*PYTEST, *WITHOUT, "test_inner.py", timeout=PROGRAM_S)

    result.stdout.fnmatch_lines(["pytest test_inner.py::test_fails --sim-seed *"])


def test_workers_of_xdist_have_the_seed_that_the_header_shows(user: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    result = user.runpytest_subprocess(*WITHOUT, "-n", "2", "-k", "fails or seed", timeout=PROGRAM_S)

    shown = re.findall(r"--sim-seed (\d+)", result.stdout.str())
    assert len(shown) == 2 and shown[0] == shown[1], shown


@pytest.mark.parametrize("runs", ["0", "-3"])
def test_no_runs_are_refused(user: pytest.Pytester, runs: str) -> None:
    result = user.runpytest_subprocess(*WITHOUT, "--sim-runs", runs, timeout=PROGRAM_S)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"--sim-runs is {runs}, must be 1 or more" in result.stderr.str()


def test_the_same_session_seed_gives_the_same_worlds_and_another_others(user: pytest.Pytester) -> None:
    drawn = []
    for number in ("5", "5", "6"):
        run(user, "-k", "seed", "--sim-seed", number).assert_outcomes(passed=1, deselected=3)
        drawn += seeds(user)

    assert drawn[0] == drawn[1] != drawn[2]


def test_the_seed_is_new_each_session_unless_given_by_option_variable_or_configuration(
    user: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    def header(*arguments: str) -> str:
        shown = re.search(r"--sim-seed (\d+)", run(user, "-k", "seed", *arguments).stdout.str())
        assert shown is not None
        return shown[1]

    assert header() != header()
    user.makeini("[pytest]\nsim_seed = 7\n")
    assert header() == "7"
    monkeypatch.setenv("CROSSRAIL_SIM_SEED", "8")
    assert header() == "8"
    assert header("--sim-seed", "9") == "9"


def test_sim_runs_repeats_each_test_with_seeds_of_its_own(user: pytest.Pytester) -> None:
    run(user, "-k", "seed", "--sim-runs", "5", "--sim-seed", "1").assert_outcomes(passed=5, deselected=15)

    assert len(set(seeds(user))) == 5


def test_a_seed_that_is_no_number_is_refused_in_words(user: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSRAIL_SIM_SEED", "many")

    result = run(user)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*CROSSRAIL_SIM_SEED*'many'*whole number*"])


def test_a_coroutine_that_pytest_asyncio_takes_is_refused_in_words(user: pytest.Pytester) -> None:
    user.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")

    result = user.runpytest_subprocess("-p", "no:cacheprovider", "-k", "coroutine", timeout=PROGRAM_S)

    result.assert_outcomes(failed=1, deselected=3)
    result.stdout.fnmatch_lines(["*crossrail.sim.run()*"])
