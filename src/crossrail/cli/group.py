"""A group of commands that are imported when they run: help costs no more than their one-line texts."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping

import click

from crossrail.errors import UsageError


def require(command: str, extra: str, *modules: str) -> None:
    """UsageError that names the extra of `crossrail COMMAND` if one of the modules is not installed."""
    for module in modules:
        if not _is_installed(module):
            raise UsageError(f"crossrail {command} needs {module}: pip install 'crossrail[{extra}]'")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # sys.modules says that it must not be imported
        return False


class LazyGroup(click.Group):
    """Of `crossrail NAME`, in crossrail.cli.NAME, which may need the extra `crossrail[NAME]`."""

    def __init__(
        self, name: str, about: str, lazy: Mapping[str, tuple[str, str]], hidden: frozenset[str] = frozenset()
    ) -> None:
        """lazy: of each command its module, whose attribute it is by its name, and its text. hidden: without help."""
        super().__init__(name, help=about)
        self._package = name
        self._lazy = lazy
        self._hidden = hidden

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in self._lazy if name not in self._hidden]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return None
        package = self._package
        try:
            module = importlib.import_module(f"crossrail.cli.{package}.{self._lazy[cmd_name][0]}")
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("crossrail"):
                raise
            if ctx.resilient_parsing:  # a shell that completes: the name is there, its options are not known
                return click.Command(cmd_name, help=self._lazy[cmd_name][1])
            raise UsageError(f"crossrail {package} needs {error.name}: pip install 'crossrail[{package}]'") from None
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._lazy[name][1]) for name in self.list_commands(ctx)])
