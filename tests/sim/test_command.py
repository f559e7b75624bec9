"""`crossrail sim`, as a user runs it."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from crossrail.sim.scenarios import SCENARIOS
from tests.cli.test_commands import COMMAND, crossrail, failed, succeeded
from tests.support.limits import PROGRAM_S
from tests.support.process import REPOSITORY, run_script

OWN = "tests.sim.own_scenarios"
ODD = f"{OWN}:odd"


def sim(*arguments: object) -> tuple[int, str]:
    run = crossrail("sim", *arguments)
    assert "Traceback" not in run.stderr, run.stderr
    return run.returncode, run.stdout


def test_a_run_is_summed_up_in_a_table() -> None:
    text = succeeded(crossrail("sim", "--scenario", "pair", "--seed", 7))

    for word in ("pair", "virtual", "works", "both ways", "Gb/s", "ok", "seed 7"):
        assert word in text, f"no {word} in:\n{text}"


def test_what_a_run_prints_is_shown_and_standard_error_may_be_closed() -> None:
    command = [*COMMAND, "sim", "--scenario", f"{OWN}:talks", "--seed", "1"]
    run = subprocess.run(
        ["sh", "-c", '"$@" 2>&-', "sh", *command], stdout=subprocess.PIPE, text=True, timeout=PROGRAM_S, cwd=REPOSITORY,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}, check=False,
    )  # fmt: skip

    assert (run.returncode, run.stdout.count("says something")) == (0, 1), run.stdout


def test_many_runs_are_one_line_and_many_seeds() -> None:
    text = succeeded(crossrail("sim", "--scenario", "pair", "--scenario", "slow-rail", "--seed", 1, "--runs", 3))

    assert re.search(r"pair +. +3 ", text)
    assert re.search(r"slow-rail +. +3 ", text)
    assert "seeds 1 to 3" in text


def test_list_names_every_scenario() -> None:
    text = succeeded(crossrail("sim", "--list"))

    assert [line.split()[0] for line in text.splitlines()] == list(SCENARIOS)


def test_a_failure_ends_in_status_1_and_the_command_that_replays_it() -> None:
    status, text = sim("--scenario", ODD, "--seed", 3)

    assert status == 1
    assert "the seed is odd" in text
    replay = re.search(r"replay: crossrail (sim .*)", text)
    assert replay is not None
    assert replay[1].startswith(f"sim --scenario {ODD} --seed 3 ")


def test_of_many_runs_the_failing_seeds_are_told() -> None:
    status, text = sim("--scenario", ODD, "--seed", 2, "--runs", 4)

    assert status == 1
    assert "--seed 3" in text
    assert "--seed 5" in text
    assert "--seed 4" not in text
    assert "2 failed" in text


def test_json_has_every_run() -> None:
    status, text = sim("--scenario", ODD, "--seed", 2, "--runs", 2, "--json")

    content = json.loads(text)
    assert (status, content["format"], content["ok"]) == (1, 1, False)
    assert [(run["seed"], run["ok"], run["failures"]) for run in content["runs"]] == [
        (2, True, []),
        (3, False, ["the seed is odd"]),
    ]
    assert "--seed 3" in content["runs"][1]["replay"]
    assert all(run["digest"] for run in content["runs"])


def test_trace_and_log_are_of_the_first_failing_run(tmp_path: Path) -> None:
    trace, log = tmp_path / "trace.json", tmp_path / "log"

    status, _ = sim("--scenario", ODD, "--seed", 2, "--runs", 4, "--trace", trace, "--log", log)

    assert status == 1
    assert json.loads(trace.read_text())["otherData"] == {"title": f"{ODD}, seed 3"}
    assert log.exists()


def test_trace_of_engines_whose_names_have_spaces(tmp_path: Path) -> None:
    status, text = sim("--scenario", f"{OWN}:named_in_words", "--seed", 1, "--trace", tmp_path / "trace.json")

    assert status == 1, text
    assert "engine-open decoder 0" in (tmp_path / "trace.json").read_text()


@pytest.mark.parametrize(("seed", "status"), [(1, 1), (2, 2)])
def test_checks_that_failed_are_status_1_also_where_the_picture_is_refused(
    tmp_path: Path, seed: int, status: int
) -> None:
    script = """
        import sys
        from crossrail.cli.main import main
        from crossrail.errors import UsageError
        from crossrail.sim import timeline
        def refuse(*_, **__):
            raise UsageError("no picture of that")
        timeline.write_chrome_trace = refuse
        main(["sim", *sys.argv[1:]])
    """
    run = run_script(script, "--scenario", ODD, "--seed", str(seed), "--trace", str(tmp_path / "trace.json"))

    assert run.returncode == status, run.stderr
    assert ("the seed is odd" in run.stdout) == (status == 1)
    assert "error: no picture of that" in run.stderr


def test_the_log_of_one_seed_is_the_same_to_the_byte(tmp_path: Path) -> None:
    logs = [tmp_path / "first", tmp_path / "second"]
    for log in logs:
        succeeded(crossrail("sim", "--scenario", "paged-push", "--seed", 5, "--log", log))

    assert logs[0].stat().st_size > 10_000
    assert logs[0].read_bytes() == logs[1].read_bytes()


def test_the_log_is_the_same_in_any_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("PYTHONUTF8", "0")
    monkeypatch.setenv("PYTHONCOERCECLOCALE", "0")

    succeeded(crossrail("sim", "--scenario", f"{OWN}:named_abroad", "--seed", 5, "--log", tmp_path / "log"))

    assert "h\N{LATIN SMALL LETTER O WITH CIRCUMFLEX}te" in (tmp_path / "log").read_text("utf-8")


def test_twice_compares_two_runs_of_a_seed() -> None:
    assert sim("--scenario", "pair", "--seed", 1, "--twice")[0] == 0

    status, text = sim("--scenario", f"{OWN}:differs", "--seed", 1, "--twice")

    assert status == 1
    assert "two event logs" in text


def test_a_run_that_crashes_is_told_and_the_others_go_on() -> None:
    status, text = sim("--scenario", f"{OWN}:crashes", "--seed", 1, "--runs", 6, "--jobs", 2, "--json")

    content = json.loads(text)
    assert status == 1
    assert [run["seed"] for run in content["runs"]] == [1, 2, 3, 4, 5, 6]
    assert [run["failures"] for run in content["runs"] if not run["ok"]] == [["its process was ended by SIGABRT"]]
    assert "--seed 3" in content["runs"][2]["replay"]


def test_a_single_run_that_crashes_is_told_with_its_seed_and_where_it_was(tmp_path: Path) -> None:
    run = crossrail("sim", "--scenario", f"{OWN}:crashes", "--seed", 3)
    assert run.returncode == 1
    assert "1 failed" in run.stdout and "its process was ended by SIGABRT" in run.stdout and "--seed 3" in run.stdout
    assert "in crashes" in run.stderr and "own_scenarios.py" in run.stderr

    replay = crossrail("sim", "--scenario", f"{OWN}:crashes", "--seed", 3, "--trace", tmp_path / "trace.json")
    assert replay.returncode == 1 and "its process was ended by SIGABRT" in replay.stdout
    assert f"error: no event log of {OWN}:crashes, seed 3: its process was ended by SIGABRT" in replay.stderr


def test_a_drawn_seed_is_told_to_who_interrupts_the_run() -> None:
    with subprocess.Popen(
        [*COMMAND, "sim", "--scenario", f"{OWN}:takes_long"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PROGRAM_S)
    assert process.returncode == 130 and re.fullmatch(r"\nseed \d+\n\ninterrupted\n", errors)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "--scenario is missing"),
        (["--scenario", "flood"], "--scenario flood is not known"),
        (["--scenario", "no.such.module:flood"], "No module named"),
        (["--scenario", f"{OWN}:flood"], "has no attribute"),
        (["--scenario", f"{OWN}:no_coroutine"], "is not a coroutine function"),
        (["--scenario", "pair", "--jobs", "0"], "--jobs"),
        (["--scenario", "pair", "--runs", "0"], "--runs"),
        (["--scenario", "pair", "--seed", "-1"], "-1 is not in the range"),
        (["--scenario", "pair", "--seed", "x"], "'x' is not a valid whole number"),
    ],
)
def test_nonsense_is_refused_in_words(arguments: list[str], complaint: str) -> None:
    run = crossrail("sim", *arguments)

    assert run.returncode == 2
    assert complaint in failed(run)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("def flood(:", "SyntaxError"), ("import nothing.at.all", "No module named"), ("1 / 0", "ZeroDivisionError")],
)
def test_a_module_that_cannot_be_imported_is_its_owners_affair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, complaint: str
) -> None:
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    run = crossrail("sim", "--scenario", "broken:flood")

    assert run.returncode == 2
    told = failed(run)
    assert complaint in told
    assert "a mistake in crossrail" not in told


def test_every_scenario_is_told_in_the_documentation() -> None:
    text = Path(__file__).parents[2].joinpath("docs", "simulator.md").read_text()

    for name in SCENARIOS:
        assert f"`{name}`" in text
