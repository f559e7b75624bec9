"""`crossrail weights`: the group of commands, each imported when it runs; all need the extra `crossrail[weights]`."""

from __future__ import annotations

import importlib

import click

from crossrail.errors import UsageError

_COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "Trainers update inference ranks, in processes of their own, checked bit for bit."),
    "rl": ("rl", "A small Qwen3-MoE learns under FSDP2 and is served in bf16 with TP 2 and in fp8, updated each step."),
    "bench": ("bench", "Measure updates on this machine beside memcpy, and beside gathering and broadcasting."),
    "plan": ("plan", "Plan who sends what to whom, for a well-known model or from inventories."),
    "show": ("show", "Show a plan, compare it with another, draw it."),
    "sim": ("sim", "Simulate an update of hundreds of GPUs, and say what bounds it."),
    "play": ("play", "One process of demo and bench."),
}
_HIDDEN = {"play"}


class _Group(click.Group):
    """A command NAME is the attribute NAME of its module."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in _COMMANDS if name not in _HIDDEN]

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
            formatter.write_dl([(name, _COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=_Group)
def command() -> None:
    """Weight updates from trainers to inference ranks."""
