"""Each `crossrail ...` of README.md and docs/ is a command that there is, with options that it has."""

from __future__ import annotations

import re

import click
import pytest

from crossrail.cli.main import main
from tests.documentation.blocks import pages

_FENCED = re.compile(r"^```[a-z]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LINE = re.compile(r"^(?:[A-Z_]+=\S+ )*crossrail ([^`\n#]+)", re.MULTILINE)
_INLINE = re.compile(r"`crossrail ([^`\n#]+)")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def commands(text: str) -> list[str]:
    return [line for block in _FENCED.findall(text) for line in _LINE.findall(block)] + _INLINE.findall(text)


def unknown(line: str) -> set[str]:
    """Words of it that are neither a command of ours nor an option of that."""
    command: click.Command = main
    words = line.split()
    while isinstance(command, click.Group) and words and re.fullmatch(r"[a-z]+", words[0]):
        if (inner := command.get_command(click.Context(command), words[0])) is None:
            return {words[0]}
        command, words = inner, words[1:]
    has = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return set(_OPTION.findall(" ".join(words))) - has - {"--help"}


def test_commands_are_there() -> None:
    lines = [(name, line) for name, text in pages().items() for line in commands(text)]
    assert len(lines) > 100
    assert {(name, line): words for name, line in lines if (words := unknown(line))} == {}


@pytest.mark.parametrize("line", ["nonsense", "bench --nonsense", "kv nonsense --help", "doctor --only cpu --nonsense"])
def test_command_that_is_not_there_is_seen(line: str) -> None:
    assert {word.strip("-") for word in unknown(line)} == {"nonsense"}
