"""`--json [FILE]` is one habit: without a file the JSON is all that standard output gets, with one all is shown too."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from crossrail.cli.main import main
from tests.cli.test_commands import COMMAND, crossrail, succeeded
from tests.support.limits import PROGRAM_S

# With what people would see.
COMMANDS = {
    "topo": (["topo"], "CPU"),
    "doctor": (["doctor", "--only", "crossrail"], "crossrail"),
    "kv sim": (["kv", "sim", "--layers", "1"], "a layer's transfer, in ms"),
    "moe sim": (["moe", "sim", "--cluster", "cx7", "--shape", "decode", "--ranks", "16"], "medians of all ranks"),
    "weights sim": (
        ["weights", "sim", "qwen3-235b", "--layers", "1", "--trainers", "2", "--targets", "1", "--way", "needed"],
        "times the bound",
    ),
}
SILENT = ("topo", "doctor")  # what they have to say is in the JSON, and takes no time


def run(arguments: list[str]) -> Result:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("name", COMMANDS)
def test_without_a_file_it_is_all_of_standard_output(name: str) -> None:
    arguments, _ = COMMANDS[name]

    assert json.loads(run([*arguments, "--json"]).stdout)


def test_minus_is_standard_output_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert json.loads(run(["topo", "--json", "-"]).stdout)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in SILENT])
def test_what_people_are_told_goes_to_standard_error_then(name: str) -> None:
    arguments, shown = COMMANDS[name]

    assert shown in run([*arguments, "--json"]).stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_with_a_file_all_is_shown_too(name: str, tmp_path: Path) -> None:
    arguments, shown = COMMANDS[name]
    file = tmp_path / "out.json"

    assert shown in run([*arguments, "--json", str(file)]).stdout

    assert json.loads(file.read_text())


# A benchmark prints a line for each figure: it ends with the reader of those, and keeps what it has.
READ_LINE_BY_LINE = {
    "sim": ["sim", "--scenario", "pair", "--seed", "1", "--jobs", "1"],
    "bench moe": ["bench", "moe", "--kernels", "--quick", "--runs", "1", "--shape", "decode", "--ranks", "2"],
}


@pytest.mark.parametrize("name", [*COMMANDS, *READ_LINE_BY_LINE])
def test_file_is_saved_though_the_reader_of_the_output_goes_away(name: str, tmp_path: Path) -> None:
    """As with `| head -1`."""
    arguments = READ_LINE_BY_LINE.get(name) or COMMANDS[name][0]
    file, errors = tmp_path / "out.json", tmp_path / "errors"

    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            [*COMMAND, *arguments, "--json", file], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr
        ) as process,
    ):
        assert process.stdout and os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        process.wait(PROGRAM_S)

    assert json.loads(file.read_text())
    assert "Traceback" not in errors.read_text()


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in SILENT])
def test_what_was_found_is_shown_though_the_file_cannot_be_written(name: str) -> None:
    arguments, shown = COMMANDS[name]

    result = CliRunner().invoke(main, [*arguments, "--json", "/dev/full"])

    assert result.exit_code == 1
    assert shown in result.stdout
    assert "/dev/full: No space left on device" in result.stderr


def test_option_behind_it_is_no_file() -> None:
    assert "write-64k-w1 " in run(["bench", "--json", "--list"]).stdout


def test_sim_likewise(tmp_path: Path) -> None:
    options, file = ["--scenario", "pair", "--seed", 1, "--jobs", 1], tmp_path / "out.json"

    alone = json.loads(succeeded(crossrail("sim", *options, "--json")))
    shown = succeeded(crossrail("sim", *options, "--json", file))

    assert "seed 1" in shown
    assert json.loads(file.read_text()).keys() == alone.keys()


def test_bench_writes_json_to_a_pipe() -> None:
    options = ["--only", "write-64k-w1", "--quick", "--runs", "1", "--pool-bytes", "64M"]

    assert json.loads(succeeded(crossrail("bench", *options, "--json")))["results"]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("cpu", "cpu is a topic: crossrail doctor --only cpu"),
        ("node7.example", "For the way to node7.example: crossrail doctor --peer node7.example"),
    ],
)
def test_word_behind_doctors_json_that_is_no_file(
    word: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    result = CliRunner().invoke(main, ["doctor", "--json", word])

    assert result.exit_code == 2
    assert meant in result.stderr and f"{word}.json" in result.stderr
    assert list(tmp_path.iterdir()) == []
