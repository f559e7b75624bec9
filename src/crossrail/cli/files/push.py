"""`crossrail push FILE TARGET`: writes a file into the memory of a `crossrail serve`, which stores it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click
from rich.markup import escape

import crossrail as xr
from crossrail._text import plain, rate_text
from crossrail.cli.console import bytes_progress, open_console
from crossrail.cli.files import wire
from crossrail.cli.files.pusher import Pusher
from crossrail.cli.rendezvous import resolve
from crossrail.cli.service import rails_option, secret_of, tls_options
from crossrail.cli.source import SourceFile
from crossrail.cli.text import format_bytes, gb_per_s
from crossrail.errors import UsageError

_MESSAGES_HELD = 2 * wire.SLOTS_MAX


def destination(dst: str, source: Path) -> str:
    """As with cp: an empty one, or a directory with its slash, keeps the file's own name. UsageError for what cannot be
    sent to a serve.
    """
    path = dst + source.name if dst == "" or dst.endswith("/") else dst
    try:
        nbytes = len(path.encode())
    except UnicodeEncodeError:
        raise UsageError(
            f"DST is {os.fsencode(path)!r}, must be UTF-8: give it a name, as in TARGET = inbox:NAME"
        ) from None
    if nbytes > wire.PATH_BYTES_MAX:
        raise UsageError(f"DST has {nbytes} bytes and may have {wire.PATH_BYTES_MAX}")
    return path


def _push(
    source: SourceFile,
    server: xr.Address,
    dst: str,
    rails: int | list[str],
    tls: xr.TlsConfig | None,
    *,
    force: bool,
    quiet: bool,
) -> None:
    console = open_console(quiet=quiet)
    with (
        xr.Engine(rails=rails, tls=tls) as engine,
        engine.submit_recvs(_MESSAGES_HELD, wire.MESSAGE_BYTES_MAX) as pool,
        bytes_progress(console) as progress,
    ):
        begun = time.monotonic()
        engine.connect(server)
        # Not shown before the server has agreed: a refusal is one line, without a bar stuck at 0.
        task = progress.add_task(plain(source.path.name), total=source.nbytes, visible=False)
        done = Pusher(engine, pool, server, source).run(
            dst,
            force=force,
            on_accepted=lambda: progress.update(task, visible=True),
            on_stored=lambda nbytes: progress.advance(task, nbytes),
        )
        seconds = time.monotonic() - begun
    if not quiet:
        _warn_of_changes(source)
    console.print(
        f"[green]stored[/green] as {escape(done.path)}: {format_bytes(source.nbytes)}, "
        f"{rate_text(gb_per_s(source.nbytes, seconds))}, SHA-256 ok {done.sha256}",
        soft_wrap=True,
    )


def _warn_of_changes(source: SourceFile) -> None:
    name = plain(str(source.path))
    if source.has_more():
        click.echo(f"warning: {name} has grown; the {source.nbytes} bytes before are stored", err=True)
    elif source.has_changed():
        click.echo(
            f"warning: {name} was written to meanwhile; what is stored may be a mixture: push it again", err=True
        )


@click.command("push")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("target")
@click.option("--force", is_flag=True, help="Replace the file if it already exists.")
@rails_option
@click.option("--quiet", "-q", is_flag=True, help="Print nothing unless the push fails.")
@tls_options
def command(
    file: Path, target: str, force: bool, rails: int | list[str], quiet: bool, tls: xr.TlsConfig | None
) -> None:
    """Push FILE to your `crossrail serve`.

    TARGET is NAME:DST on this host, or tcp://HOST:PORT/DST on another. `crossrail serve` prints it when it starts,
    and with --listen also the CROSSRAIL_SECRET that it requires. DST is a path in the served directory. If it is
    empty or ends with a slash, the file keeps its name.
    """
    with SourceFile(file) as source:
        server, dst = resolve(target, secret_of())
        _push(source, server, destination(dst, file), rails, tls, force=force, quiet=quiet)
