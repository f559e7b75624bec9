"""A click group whose commands are imported when they run: its help costs no more than their one-line texts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any, cast

import click
from click.shell_completion import CompletionItem

from crossrail import _interrupt
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


def body(extra: str, module: str, name: str) -> Callable[..., None]:
    """The function of a command whose options are elsewhere: help need not import numpy. extra: of
    `crossrail[extra]`.
    """
    found = getattr(_loaded(extra, module), name)
    assert callable(found)
    return cast("Callable[..., None]", found)


def _loaded(extra: str, module: str) -> ModuleType:
    """UsageError if what it needs is not installed."""
    try:
        return _interrupt.load(module)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("crossrail"):
            raise
        raise UsageError(f"crossrail {extra} needs {error.name}: pip install 'crossrail[{extra}]'") from None


def say_what_is_meant(ctx: click.Context, word: str, names: Collection[str]) -> None:
    """Fails where the word is no command's name, and is close to one."""
    if not ctx.resilient_parsing and word not in names:
        import difflib  # only where it is needed

        if close := difflib.get_close_matches(word, names, n=1):
            ctx.fail(f"No such command {word!r}; did you mean {close[0]!r}?")


class LazyGroup(click.Group):
    """The group `crossrail NAME`, in crossrail.cli.NAME, which may need the extra `crossrail[NAME]`."""

    def __init__(self, name: str, about: str, lazy: Mapping[str, tuple[str, str]], **more: Any) -> None:
        """lazy: of each command its module, whose attribute it is by its name, or "module:attribute", and its text.
        more: of a click.Group that does something itself.
        """
        super().__init__(name, help=about, **more)
        self._package = name
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which a newcomer needs them."""
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return None
        place, _, attribute = self._lazy[cmd_name][0].partition(":")
        try:
            module = self.load(place)
        except UsageError:
            if ctx.resilient_parsing:  # a shell that completes: the name exists, its options are unknown
                return click.Command(cmd_name, help=self._lazy[cmd_name][1])
            raise
        command = getattr(module, attribute or cmd_name)
        assert isinstance(command, click.Command)
        return command

    def load(self, place: str) -> ModuleType:
        """The module of a command. UsageError if what it needs is not installed."""
        return _loaded(self._package, f"crossrail.cli.{self._package}.{place}")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        say_what_is_meant(ctx, args[0], self._lazy)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        begun = ((name, text) for name, (_, text) in self._lazy.items() if name.startswith(incomplete))
        items = [CompletionItem(name, help=text) for name, text in begun]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._lazy.items()])
