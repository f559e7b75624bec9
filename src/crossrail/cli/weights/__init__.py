"""`crossrail weights`: the group of commands, each imported when it runs; all need the extra `crossrail[weights]`."""

from __future__ import annotations

import importlib

import click

from crossrail.errors import UsageError

_COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("plan", "Plan who sends what to whom, for a well-known model or from inventories."),
    "show": ("show", "Show a plan, compare it with another, draw it."),
    "sim": ("sim", "Simulate an update of hundreds of GPUs, and say what bounds it."),
}


class _Group(click.Group):
    """A command NAME is the attribute NAME of its module."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        try:
            module = importlib.import_module(f"crossrail.cli.weights.{_COMMANDS[cmd_name][0]}")
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("crossrail"):
                raise
            raise UsageError(f"crossrail weights needs {error.name}: pip install 'crossrail[weights]'") from None
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_Group)
def command() -> None:
    """Weight updates from trainers to inference ranks."""
