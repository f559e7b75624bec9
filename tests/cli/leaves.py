"""All commands of the command line, found by walking it: a new one is tested without being named anywhere."""

from __future__ import annotations

from collections.abc import Iterator

import click

from crossrail.cli.main import main


def groups_and_leaves() -> Iterator[tuple[list[str], click.Command]]:
    """Words after `crossrail`, and the command that they name; the group itself first, with no words."""
    yield from _below(main, [], None)


def _below(
    command: click.Command, words: list[str], parent: click.Context | None
) -> Iterator[tuple[list[str], click.Command]]:
    yield words, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=words[-1] if words else "crossrail", parent=parent)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _below(found, [*words, name], context)


def with_arguments(command: click.Command, *, but: click.Parameter | None = None) -> list[str]:
    """One word for each argument that a command cannot do without, and the required options; but: not for this one."""
    words = []
    for parameter in command.params:
        if parameter.required and parameter is not but:
            words += ([] if isinstance(parameter, click.Argument) else [parameter.opts[0]]) + ["word"]
    return words
