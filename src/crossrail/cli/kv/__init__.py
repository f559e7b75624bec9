"""`crossrail kv`: the group of commands. Each is imported when it runs; all need the extra `crossrail[kv]`."""

from __future__ import annotations

import importlib

import click

from crossrail.errors import UsageError

_COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "Prompt in, tokens out, from several processes, checked against one node alone."),
    "router": ("router", "Take requests over HTTP and give them to prefillers and decoders."),
    "prefiller": ("nodes", "Run prompts and write their KV to decoders."),
    "decoder": ("nodes", "Have prompts' KV sent here and generate tokens."),
    "top": ("top", "Show a router's nodes and what they do."),
}


class _Group(click.Group):
    """A command NAME is the attribute NAME of its module."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        try:
            module = importlib.import_module(f"crossrail.cli.kv.{_COMMANDS[cmd_name][0]}")
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("crossrail"):
                raise
            raise UsageError(f"crossrail kv needs {error.name}: pip install 'crossrail[kv]'") from None
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_Group)
def command() -> None:
    """Disaggregated prefill and decode of a model."""
