"""What commands say of arguments that cannot be, before they do anything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from crossrail.cli import memory
from crossrail.cli.main import main

OUTPUTS = [
    ["bench", "--json"],
    ["bench", "--plot"],
    ["bench", "--html"],
    ["bench", "run", "127.0.0.1:1", "--json"],
    ["sim", "--trace"],
    ["sim", "--log"],
    ["weights", "plan", "qwen3-235b", "-o"],
    ["weights", "sim", "qwen3-235b", "--json"],
    ["weights", "bench", "--json"],
]

PLAN = ["weights", "plan", "qwen3-235b", "--layers", "1", "--trainers", "2", "--targets", "1"]


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 2, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert not result.stdout
    return " ".join(result.stderr.split())


@pytest.mark.parametrize("command", OUTPUTS, ids=" ".join)
def test_file_that_cannot_be_written(command: list[str], tmp_path: Path) -> None:
    assert "there is no folder" in refused(*command, tmp_path / "missing" / "file")
    assert "is a directory" in refused(*command, tmp_path)
    assert "/proc/file" in refused(*command, "/proc/file")  # not by root either


@pytest.mark.parametrize("command", [["sim", "--log"], ["kv", "demo", "--out"]], ids=" ".join)
def test_place_that_cannot_be_looked_at(command: list[str], tmp_path: Path) -> None:
    too_long = tmp_path / ("x" * 300)

    assert "File name too long" in refused(*command, too_long)
    assert "File name too long" in refused(*command, too_long / "file")


@pytest.mark.parametrize("command", [["sim", "--log"], ["kv", "demo", "--out"]], ids=" ".join)
def test_place_where_not_even_root_can_write(command: list[str]) -> None:
    assert "cannot write in '/proc': " in refused(*command, "/proc/mine")


def test_file_that_can_be_written_is_as_it_was_until_it_is(tmp_path: Path) -> None:
    there, absent = tmp_path / "there", tmp_path / "absent"
    there.write_text("kept")
    for file in (there, absent):
        assert "is not known" in refused("weights", "plan", "no-model", "-o", file)
    assert there.read_text() == "kept"
    assert not absent.exists()


def test_disk_that_is_full_is_named() -> None:
    result = CliRunner().invoke(main, [*PLAN, "-o", "/dev/full"])
    assert (result.exit_code, result.stderr) == (1, "error: /dev/full: No space left on device\n")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            ["bench", "moe", "--ranks", "8", "--ranks", "2"],
            r"prefill with 8 ranks would use \S+ GiB of memory and 1\.0 GiB",
        ),
        (["demo", "--pool-bytes", "4GiB"], r"the demo would use \S+ GiB of memory and 1\.0 GiB"),
    ],
    ids=["bench moe", "demo"],
)
def test_more_memory_than_is_free(monkeypatch: pytest.MonkeyPatch, command: list[str], words: str) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 1 << 30)
    assert re.search(words, refused(*command))


def test_folder_that_cannot_be_stored_into() -> None:
    """Not for root either; said before anybody pushes."""
    assert "--dir '/proc': cannot write there: " in refused("serve", "--dir", "/proc")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--trainers", "0"], "trainers: 0; must be 2 or a multiple of it"),
        (["--targets", "-8"], "targets: -8; must be 8 or a multiple of it"),
        (["--trainers", "many"], "'many' is not a valid integer"),
    ],
)
def test_cluster_that_cannot_be(options: list[str], words: str) -> None:
    assert words in refused("weights", "plan", "qwen3-235b", *options)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nope", "not one of toy, qwen3, llama, deepseek, nor a directory"),
        ("no.such.module:model", "No module named 'no'"),
        ("builtins:nothing", "has no attribute 'nothing'"),
        ("builtins:dict", "returned an object of type dict"),
    ],
)
def test_model_that_cannot_be(model: str, words: str) -> None:
    assert words in refused("kv", "demo", "--model", model)


def test_transport_of_what_has_no_engine() -> None:
    assert "leave --transport out" in refused("bench", "moe", "--kernels", "--transport", "tcp")


SERVICES = [
    ["kv", "router", "--listen=127.0.0.1:0"],
    ["kv", "prefiller", "--router=http://127.0.0.1:1"],
    ["weights", "load", "/", "--targets=1"],
]


@pytest.mark.parametrize("command", SERVICES, ids=" ".join)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["17"], "'17' is neither 1 to 16 nor a list of interfaces or addresses"),
        (["2", "lo"], "a number of rails stands alone"),
    ],
    ids=["too many", "a number and a name"],
)
def test_rails_that_cannot_be(command: list[str], given: list[str], words: str) -> None:
    assert words in refused(*command, *(f"--rails={one}" for one in given))


@pytest.mark.parametrize("given", [["127.0.0.1,no-such"], ["127.0.0.1", "no-such"]], ids=["list", "repeated"])
def test_rails_of_a_service_are_a_list_as_those_of_other_commands(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is taken: what is refused is the second, and not both as one name."""
    monkeypatch.setenv("CROSSRAIL_SECRET", "of this test")
    assert "rails: 'no-such' is neither" in refused(*SERVICES[0], *(f"--rails={one}" for one in given))


@pytest.mark.parametrize("command", ["moe demo", "kv demo", "weights demo"])
def test_transport_that_cannot_be_is_refused_before_anything_starts(command: str) -> None:
    assert "transport is 'nope', must be 'auto'" in refused(*command.split(), "--transport", "nope")


@pytest.mark.parametrize("command", ["top", "kv top"])
@pytest.mark.parametrize("url", ["127.0.0.1:99999", "127.0.0.1:0", "ftp://host", "http://[::1", "http://", ":80"])
def test_url_that_cannot_be(command: str, url: str) -> None:
    assert "is no URL" in refused(*command.split(), url)


@pytest.mark.parametrize("command", [["doctor", "--only", ""], ["kv", "demo", "--prompt", ""]], ids=" ".join)
def test_empty_word_is_not_taken_for_none(command: list[str]) -> None:
    """As of a variable of a shell that is not set."""
    assert "is empty" in refused(*command)


def test_more_ranks_than_can_be_described() -> None:
    assert "is not in the range" in refused("weights", "plan", "qwen3-235b", "--trainers", 10**20)
