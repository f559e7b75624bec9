"""The top command group: its commands, and how our errors become one clear line and an exit code."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import IO, Any

import click

from crossrail import _interrupt
from crossrail._text import plain
from crossrail.cli.group import LazyGroup
from crossrail.cli.text import clipped, said_of
from crossrail.errors import UsageError

# Exit codes: 0 done, 1 it failed, 2 wrong usage (click's own), 130 interrupted (128 + SIGINT, as shells have it).
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_LINE_ENDS = re.compile(r"\s*[\r\n]\s*")

# The modules load rich, numpy and the like, so only the one that runs is imported.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo.command:command", "Move a real file between two processes and check it."),
    "serve": ("files.serve:command", "Receive files that `crossrail push` sends."),
    "push": ("files.push:command", "Push a file to a `crossrail serve`."),
    "bench": ("bench.command:command", "Measure the engine against the limits of this machine."),
    "sim": (
        "sim.command:command",
        "Run whole systems on simulated NICs, with faults; every run can be replayed from its seed.",
    ),
    "doctor": ("doctor:command", "Find what would make transfers slow, impossible or unsafe here."),
    "topo": ("topo:command", "Show the GPUs and NICs, and which NICs serve which device."),
    "top": ("top:command", "Show rails, peers and transfers of engines in another process, live."),
    "trace": ("trace:command", "Show what an engine did last, from its flight recorder."),
    "kv": (
        "kv:command",
        "Serve a model with disaggregated prefill and decode: router, prefiller, decoder, demo, top.",
    ),
    "weights": (
        "weights:command",
        "Update inference ranks from trainers: demo, rl, load, bench, plan, show, sim.",
    ),
    "moe": (
        "moe:command",
        "Run a mixture-of-experts model with its experts spread over processes, or simulate one: demo, sim.",
    ),
    "explain": ("explain:command", "Show how bytes would reach a `crossrail serve`, and why."),
    "error": ("error:command", "Explain an error code and what to do about it."),
}


class CommandGroup(LazyGroup):
    """`crossrail` itself: turns what its commands raise into one line and an exit code."""

    def __init__(self, name: str, help: str, **more: Any) -> None:  # noqa: A002 - as click names it
        super().__init__(name, help, COMMANDS, **more)

    def load(self, place: str) -> ModuleType:
        """Without an extra: what every command needs comes with the package."""
        return _interrupt.load(f"crossrail.cli.{place}")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Like click's, with one-line errors. --help and --version print from here, perhaps to a full disk."""
        _interrupt.begin()  # until invoke(): click would answer an interrupt by "Aborted!" and 1
        try:
            with one_line_complaints():
                return super().parse_args(ctx, args)
        except BrokenPipeError:
            raise  # click's own
        except OSError as error:
            click.echo(said_of(_named(error)), err=True)
            ctx.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what it raises becomes one line on stderr and an exit code."""
        try:
            _interrupt.over()
            with one_line_complaints():
                result = super().invoke(ctx)
            if sys.stdout is not None:  # our parent may have closed it
                sys.stdout.flush()  # what is still in it must fail here, if it does
            _interrupt.begin()  # it ends, as above
        except (click.exceptions.Exit, click.Abort, click.ClickException):
            _interrupt.begin()
            raise  # click's own ways to end
        except KeyboardInterrupt:
            _interrupt.begin()  # once more ends it on the spot, and not in the middle of some __del__
            click.echo("\ninterrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:
            # The reader of our output went away (`crossrail bench | head`): nobody is left to tell.
            _drop_output()
            ctx.exit(1)
        except Exception as error:
            _interrupt.begin()
            said = said_of(_named(error) if isinstance(error, OSError) else error)
            if ctx.params.get("debug"):
                traceback.print_exc()
            click.echo(said, err=True)
            ctx.exit(EXIT_USAGE if isinstance(error, UsageError) else 1)
        return result


def _drop_output() -> None:
    """Discards what standard output still holds: Python would try again at exit, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _named(error: OSError) -> OSError:
    """Names standard output as the file that failed, if it did (full, for example), and drops what it still holds."""
    try:
        if sys.stdout is not None:
            if error.filename is None and (getattr(sys.stdout, "write_through", False) or error.errno == errno.ENOSPC):
                sys.stdout.write("\n")  # unbuffered, or of a long text, it has kept nothing that could fail once more
            sys.stdout.flush()
    except OSError as again:
        _drop_output()
        if error.filename is None and error.errno == again.errno:
            return OSError(error.errno, error.strerror, "standard output")
    return error


@contextmanager
def one_line_complaints() -> Iterator[None]:
    """click's errors become one line, like ours: theirs have four, and repeat what was given, however long it is."""
    try:
        yield
    except click.ClickException as error:
        # With click 8.2 that is help, which is shown instead of a complaint.
        if isinstance(error, Complaint) or type(error).__name__ == "NoArgsIsHelpError":
            raise
        raise Complaint(error) from None


class Complaint(click.ClickException):
    """An error message of click's, in a line that says where to read on."""

    def __init__(self, error: click.ClickException) -> None:
        words = _LINE_ENDS.sub(" ", error.format_message()).strip().removesuffix(".")
        context = getattr(error, "ctx", None)
        hint = "" if context is None else f" [see {context.command_path} --help]"
        super().__init__(f"error: {clipped(plain(words))}{hint}")
        self.exit_code = error.exit_code  # type: ignore[misc]  # of the class to click, and 2 or 1 by its kinds

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(self.message, file=file, err=True)


@contextmanager
def quiet_log() -> Iterator[None]:
    """Commands say themselves what became of a peer; of the engine's log they let only errors through."""
    log = logging.getLogger("crossrail")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)  # a command may run inside a program with a log of its own


@contextmanager
def lenient_streams() -> Iterator[None]:
    """Characters that a stream cannot encode, such as an arrow in ASCII or a non-UTF-8 file name, become "?"."""
    changed = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    before = [stream.errors for stream in changed]
    for stream in changed:
        stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        for stream, errors in zip(changed, before, strict=True):
            if not stream.closed:
                stream.reconfigure(errors=errors)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error, not only its message.")
@click.version_option(package_name="crossrail", prog_name="crossrail")
@click.pass_context
def main(ctx: click.Context, debug: bool) -> None:  # noqa: ARG001 - invoke() reads it from ctx
    """Move tensors and files between processes, point to point, over whatever connects them."""
    ctx.with_resource(lenient_streams())
    ctx.with_resource(quiet_log())
