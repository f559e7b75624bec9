"""What commands say of arguments that cannot be, before they do anything."""

from __future__ import annotations

import ipaddress
import re
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from crossrail.cli import memory
from crossrail.cli.main import main
from crossrail.cli.service import name_of_host
from tests.conftest import EngineFactory
from tests.support.ports import free_port

OUTPUTS = [
    ["bench", "--json"],
    ["bench", "--plot"],
    ["bench", "--html"],
    ["bench", "run", "127.0.0.1:1", "--json"],
    ["sim", "--trace"],
    ["sim", "--log"],
    ["sim", "--json"],
    ["topo", "--json"],
    ["doctor", "--json"],
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
    if "--json" not in command:  # whose file may be left out
        assert "'--only' is an option where the name of a file belongs" in refused(*command, "--only", "tcp")


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
        (["--trainers", "many"], "'many' is not a valid whole number"),
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


# --- where to listen, and whom to reach ---


def test_port_alone_is_no_host() -> None:
    """The C library takes 80 for the address 0.0.0.80."""
    assert "write :PORT or HOST:PORT" in refused("bench", "serve", "--bind", "80")
    assert "write HOST:PORT" in refused("bench", "run", "80")
    assert "write HOST:PORT" in refused("bench", "run", ":80")


def test_host_that_is_none_is_told_of_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSRAIL_SECRET", "of this test")
    assert "--listen: 'a..b' is not the name of a host" in refused("kv", "router", "--listen", "a..b:8126")


def test_address_of_another_host_is_written_as_a_url() -> None:
    assert "[::1]:7312/x: another host is tcp://[::1]:7312/" in refused("push", __file__, "[::1]:7312/x")
    assert "http:// leads to no crossrail serve; another host is tcp://" in refused("push", __file__, "http://h:7312/x")


def test_name_of_no_serve_is_told_with_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    said = CliRunner().invoke(main, ["push", __file__, "inbox:"])
    assert said.exit_code == 1
    assert f"no crossrail serve of this user named 'inbox' is known in {tmp_path}/crossrail" in said.stderr
    assert "XDG_RUNTIME_DIR" in said.stderr


def test_port_of_rails_that_is_taken_is_told_by_the_option() -> None:
    """Two of `serve --listen`: the engine's own error names a parameter of Python's."""
    port = free_port(neighbours=1) + 1
    with socket.create_server(("", port)):
        for option in ("serve", "--listen"), ("bench", "serve", "--transport=tcp", "--bind"):
            value = str(port - 1) if option[0] == "serve" else f":{port - 1}"
            said = CliRunner().invoke(main, [*option, value])
            assert said.exit_code == 1 and f"{option[-1]} {port - 1}: cannot listen on " in said.stderr
            assert "choose another PORT, the rails use those from PORT+1 on" in said.stderr


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_all_addresses_are_told_as_one_that_can_be_reached(host: str, open_engine: EngineFactory) -> None:
    name = name_of_host(host, open_engine(transport="tcp"))
    assert ipaddress.ip_address(name.strip("[]")).is_unspecified is False
    assert name_of_host("fe80::1", open_engine()) == "[fe80::1]"
