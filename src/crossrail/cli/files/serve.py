"""`crossrail serve`: receives what other shells push."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

import crossrail as xr
from crossrail._options import SECRET_VARIABLE
from crossrail._text import plain
from crossrail.cli import event_loop
from crossrail.cli.background import background_console
from crossrail.cli.console import bytes_progress
from crossrail.cli.files.inbox import Inbox
from crossrail.cli.files.server import Limits, Server
from crossrail.cli.meeting import DEFAULT_PORT, SCHEME, Meeting
from crossrail.cli.option_types import FloatRange, IntRange
from crossrail.cli.rendezvous import Published, publish
from crossrail.cli.service import rails_behind, rails_option, records_on_signal, secret_of, tls_options
from crossrail.errors import UsageError


@dataclass(frozen=True)
class Options:
    """Options of `crossrail serve`. listen: the port for pushers of other hosts; None: there are none."""

    directory: Path
    name: str | None
    listen: int | None
    rails: int | list[str]
    once: bool
    tls: xr.TlsConfig | None


def _announce(console: Console, published: Published, directory: Path, engine: xr.Engine, remote: str) -> None:
    plural = "rail" if engine.rails == 1 else "rails"
    lines = [
        f"serving {plain(str(directory))} as {published.name} over {engine.rails} {plural}. Push from another shell:",
        f"    crossrail push FILE {published.name}:",
    ]
    if remote:
        lines += ["or from another host:", f"    {remote}"]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    click.echo("Ctrl-C ends it.", err=True)


@contextlib.asynccontextmanager
async def _reachable(engine: xr.Engine, options: Options, secret: bytes) -> AsyncIterator[str]:
    """Answers pushers of other hosts, if that is wanted; yields what to type there."""
    if options.listen is None:
        yield ""
        return
    async with Meeting(options.listen, secret, engine.address) as meeting:
        host = engine.address.endpoints[0].rpartition(":")[0]
        # A secret that was drawn here is nowhere else; one of the user's is not for the screen.
        setting = "" if secret_of() else f"{SECRET_VARIABLE}={secret.decode()} "
        yield f"{setting}crossrail push FILE {SCHEME}{host}:{meeting.port}/"


def _engine_port(listen: int | None) -> int:
    """Firewalls want to know: the rails listen right behind the port for questions."""
    return listen + 1 if listen else 0


def _open_engine(options: Options, secret: bytes) -> xr.Engine:
    port = _engine_port(options.listen)
    with rails_behind("--listen", options.listen or 0):
        return xr.Engine("crossrail-serve", rails=options.rails, port=port, secret=secret, tls=options.tls)


async def _serve(options: Options, limits: Limits) -> bool:
    main_task = asyncio.current_task()
    assert main_task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main_task.cancel)
    secret = secret_of()
    if options.listen is not None and not secret:
        secret = secrets.token_hex(16).encode()
    with (
        background_console() as console,
        Inbox(options.directory) as inbox,
        _open_engine(options, secret) as engine,
        publish(options.name, engine.address) as published,
        bytes_progress(console) as progress,
    ):
        inbox.check_writable()
        async with _reachable(engine, options, secret) as remote:
            server = Server(engine, inbox, progress, limits)
            _announce(console, published, options.directory, engine, remote)
            return await server.run(once=options.once)


@click.command("serve")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=".",
    show_default="the current one",
    help="Directory to store files in; created if missing.",
)
@click.option("--name", help='Name to be found under [default: "inbox"].')
@click.option("--once", is_flag=True, help="Exit after the first push, with code 1 if it was not stored or never came.")
@click.option(
    "--listen",
    type=IntRange(0, 65534),
    is_flag=False,
    flag_value=DEFAULT_PORT,
    metavar="[PORT]",
    help="Serve other hosts too: those with the secret are answered on this port, and the rails use the ports after it "
    f"[without PORT: {DEFAULT_PORT}; 0: any].",
)
@rails_option
@click.option(
    "--pushes", type=IntRange(1, 1024), default=16, show_default=True, help="Maximum number of pushes at a time."
)
@click.option(
    "--idle-timeout-s",
    type=FloatRange(0.5, 86400),
    default=60.0,
    show_default=True,
    help="Seconds without data after which a push is aborted. A pusher on another host that does not answer at all is "
    "given up after 10 s.",
)
@tls_options
@records_on_signal()
def command(
    directory: Path,
    name: str | None,
    once: bool,
    listen: int | None,
    rails: int | list[str],
    pushes: int,
    idle_timeout_s: float,
    tls: xr.TlsConfig | None,
) -> None:
    """Receive files that you send with `crossrail push`, from this host or, with --listen, from others.

    A file appears under its name only when it is complete and its SHA-256 sum is correct. Existing files are kept
    unless the sender says --force. Nothing is ever stored outside the directory. Other hosts need the secret:
    CROSSRAIL_SECRET, or a random one that is printed.
    """
    try:
        directory.mkdir(exist_ok=True)
    except FileExistsError:
        raise UsageError(f"--dir {directory} is not a directory") from None
    except OSError as error:
        raise UsageError(f"--dir {directory} cannot be made: {error.strerror}") from None
    options = Options(directory.resolve(), name, listen, rails, once, tls)
    try:
        stored = event_loop.run(_serve(options, Limits(pushes, idle_timeout_s)))
    except asyncio.CancelledError:
        stored = not once  # SIGTERM: an orderly end, unless somebody waits for a file
    if not stored:
        raise click.exceptions.Exit(1)
