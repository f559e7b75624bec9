"""errors.md has a section for each class that crossrail raises, and none for others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import crossrail as xr
from crossrail._events import LEVELS
from crossrail.cli.main import main
from crossrail.errors import error_texts
from crossrail.kv import NoPages
from tests.support.process import REPOSITORY

SOURCES = Path(REPOSITORY) / "src"
SECTION = re.compile(r"^### (\S+)\n`(\w+)`", re.MULTILINE)


def raised() -> Iterator[tuple[str, str]]:
    """(module, name) of all subclasses of CrossrailError, read from the sources: some need vLLM to be imported."""
    bases: dict[tuple[str, str], list[str]] = {}
    for file in sorted(SOURCES.rglob("*.py")):
        module = ".".join(file.relative_to(SOURCES).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[module, node.name] = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    errors = {"CrossrailError"}
    while more := {name for (_, name), of in bases.items() if errors & set(of)} - errors:
        errors |= more
    return (key for key, of in bases.items() if key[1] == "CrossrailError" or errors & set(of))


def code_of(module: str, name: str) -> str:
    """As Python makes it of a class of that name in that module."""
    if name == "CrossrailError":
        return xr.CrossrailError.error_code
    return type(name, (xr.CrossrailError,), {"__module__": module}).error_code


def test_each_error_has_its_section() -> None:
    sections = dict(SECTION.findall((SOURCES / "crossrail" / "errors.md").read_text()))
    assert sections == {code_of(module, name): name for module, name in raised()}


@pytest.mark.parametrize(
    ("kind", "code"), [(xr.PeerLost, "peer-lost"), (xr.UsageError, "usage-error"), (NoPages, "kv-no-pages")]
)
def test_code_of_a_class(kind: type[xr.CrossrailError], code: str) -> None:
    assert kind.error_code == code


def test_errors_of_users_keep_the_code_of_their_base() -> None:
    class MyOwn(xr.PeerLost):
        pass

    assert MyOwn("gone").docs == xr.PeerLost("").docs


def test_an_error_has_its_section_with_it() -> None:
    """Not the name of a file that only the repository has."""
    assert xr.PeerLost("gone").docs.startswith("`PeerLost`: this engine cannot reach the peer")
    assert "(docs/memory-promise.md)" not in (text := xr.WaitTimeout("late").docs) and "](" not in text
    assert "Who wrote to my pages? (docs/flight-recorder.md)" in xr.LateWrite("r", 0, 1, b"", 1).docs


@pytest.mark.parametrize("code", ["kv-no-pages", "NoPages"])
def test_section_is_printed(code: str) -> None:
    done = CliRunner().invoke(main, ["error", code])
    assert done.exit_code == 0
    assert done.stdout.startswith("kv-no-pages\n`NoPages`: too few pages are free now")


def test_name_of_a_class_has_one_code() -> None:
    """Whoever catches, or looks up, an error by the name of its class means one."""
    codes: dict[str, set[str]] = {}
    for module, name in raised():
        codes.setdefault(name, set()).add(code_of(module, name))
    assert {name: of for name, of in codes.items() if len(of) > 1} == {}


@pytest.mark.parametrize(
    "code",
    [
        "PeerLost",
        "peer-lost",
        "PEER-LOST",
        "peer_lost",
        "peer lost",
        "crossrail.errors.PeerLost: write of 8 bytes to 'a' (pid 7) failed: the peer is stalled",
        "engine 'a': peer-lost of peer 'b': no answer",
    ],
)
def test_code_is_found_however_it_is_written(code: str) -> None:
    assert CliRunner().invoke(main, ["error", code]).stdout.startswith("peer-lost\n")


def test_all_codes_are_listed() -> None:
    listed = [line.split()[0] for line in CliRunner().invoke(main, ["error"]).stdout.splitlines()]
    assert listed == list(error_texts()) and "peer-lost" in listed


@pytest.mark.parametrize("columns", ["40", "80"])
def test_each_code_is_listed_with_what_it_means_in_a_line(columns: str) -> None:
    lines = CliRunner(env={"COLUMNS": columns}).invoke(main, ["error"]).stdout.splitlines()
    longest = max(map(len, error_texts())) + 2
    assert max(map(len, lines)) <= max(int(columns), longest + 12)
    (line,) = [line for line in lines if line.startswith("kv-no-pages ")]
    assert line.split(maxsplit=1)[1].startswith("too few ")


def test_section_fits_the_terminal_and_keeps_its_words() -> None:
    narrow = CliRunner(env={"COLUMNS": "50"}).invoke(main, ["error", "peer-lost"]).stdout
    assert max(map(len, narrow.splitlines())) <= 50
    assert "\n- **" in narrow and "`crossrail doctor" in narrow
    assert narrow.split()[1:] == error_texts()["peer-lost"].split()


@pytest.mark.parametrize("code", ["stalled", "peer-frozen"])
def test_event_of_the_log_is_explained(code: str) -> None:
    assert CliRunner().invoke(main, ["error", code]).stdout.startswith(f"{code}\nAn event")


def test_each_event_has_a_section() -> None:
    assert set(LEVELS) <= set(error_texts())


def test_words_list_the_codes_that_they_belong_to() -> None:
    done = CliRunner().invoke(main, ["error", "same", "secret"])
    assert done.exit_code == 0
    codes = [line.split()[0] for line in done.stdout.splitlines()]
    assert "peer-lost" in codes and "kv-no-pages" not in codes


def test_code_that_is_not_there() -> None:
    done = CliRunner().invoke(main, ["error", "nonsense"])
    assert done.exit_code == 2 and "'nonsense' is no error code; `crossrail error` lists" in done.stderr
