"""What commands share that open an engine for others to reach: options, the secret, flight recordings on a signal."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

import crossrail as xr
from crossrail._files import SECRET_BYTES_MAX, read_at_most
from crossrail._options import SECRET_VARIABLE
from crossrail.cli.option_types import rails
from crossrail.errors import CrossrailError, TransportError, UsageError
from crossrail.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, TlsConfig, exposure_of_key

log = logging.getLogger("crossrail.cli.service")

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def together(*decorators: Decorator) -> Decorator:
    """Several options as one decorator, shown in this order."""

    def apply(fn: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            fn = decorator(fn)
        return fn

    return apply


def tls_options(fn: Callable[..., Any]) -> Callable[..., Any]:
    """--tls-cert and its like, or what the environment says. The command gets a TlsConfig or None as `tls`."""
    file = click.Path(dir_okay=False, path_type=Path)

    @functools.wraps(fn)
    def with_tls(*arguments: Any, tls_cert: Path | None, tls_key: Path | None, tls_ca: Path | None, **rest: Any) -> Any:
        tls = _tls(tls_cert, tls_key, tls_ca)
        # Commands keep the log to themselves; of this their user is to know.
        if tls is not None and (words := exposure_of_key(tls.key)):
            click.echo(f"warning: {words}", err=True)
        return fn(*arguments, tls=tls, **rest)

    return together(
        click.option(
            "--tls-cert", type=file, help=f"TLS on TCP: this side's certificate, PEM [default: {CERT_VARIABLE}]."
        ),
        click.option("--tls-key", type=file, help=f"Its private key [default: {KEY_VARIABLE}]."),
        click.option("--tls-ca", type=file, help=f"The CA that both sides trust [default: {CA_VARIABLE}]."),
    )(with_tls)


def _tls(cert: Path | None, key: Path | None, ca: Path | None) -> TlsConfig | None:
    files = {"--tls-cert": cert, "--tls-key": key, "--tls-ca": ca}
    given = [name for name, path in files.items() if path is not None]
    if cert is not None and key is not None and ca is not None:
        return TlsConfig(cert, key, ca)
    if given:
        missing = next(name for name in files if name not in given)
        raise UsageError(f"{given[0]} is given and {missing} is not: TLS needs a certificate, its key and a CA")
    return TlsConfig.from_environment()


def transport_option(default: str = "auto") -> Decorator:
    """--transport of a command that opens engines."""
    return click.option(
        "--transport", default=default, show_default=True, help="Transport of the engines: auto, shm, tcp, verbs, ofi."
    )


rails_option = click.option(
    "--rails", type=rails, default="1", show_default=True, help="Rails to open, or their interfaces."
)


def check_transport(transport: str) -> None:
    """Reports an invalid transport once, and early: before a command starts processes whose engines use it."""
    with xr.Engine("check", transport=transport):
        pass


def _merged(_context: click.Context, _of: click.Parameter, given: tuple[int | list[str], ...]) -> int | list[str]:
    """`--rails eth0,eth1` and `--rails eth0 --rails eth1` are the same."""
    if len(given) <= 1:
        return given[0] if given else 1
    lists = [names for names in given if not isinstance(names, int)]
    if len(lists) < len(given):
        raise click.BadParameter("a number of rails stands alone, without names or another number")
    return [name for names in lists for name in names]


engine_options = together(
    transport_option(),
    click.option(
        "--rails",
        type=rails,
        multiple=True,
        callback=_merged,
        help="Rails to open, or their interfaces [default: 1]; may be repeated.",
    ),
    click.option(
        "--secret-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help=f"File with the shared secret [default: {SECRET_VARIABLE}].",
    ),
)


def secret_of(file: Path | None = None) -> bytes:
    """The secret in the file, which must have one, else in the environment, else an empty one. It is never an argument:
    others can read command lines.
    """
    if file is None:
        return os.environb.get(SECRET_VARIABLE.encode(), b"")
    secret = read_at_most(file, SECRET_BYTES_MAX, "secret").strip()
    if not secret:
        raise UsageError(f"--secret-file {file} is empty")
    return secret


def read_secret(file: Path | None) -> bytes:
    """Like secret_of(). UsageError without a secret: anybody who reaches a node without one could give it work."""
    secret = secret_of(file)
    if not secret:
        raise UsageError(f"a secret that all nodes share is needed: --secret-file, or {SECRET_VARIABLE}")
    return secret


@contextlib.contextmanager
def rails_behind(option: str, port: int) -> Iterator[None]:
    """Wraps the opening of an engine whose rails listen after that option's port: if one is taken, the error names the
    option.
    """
    try:
        yield
    except TransportError as error:
        if error.code != errno.EADDRINUSE:
            raise
        raise CrossrailError(
            f"{option} {port}: {error.text}; choose another PORT, the rails use those from PORT+1 on"
        ) from None


def name_of_host(host: str, engine: xr.Engine) -> str:
    """The name for the URL of a service that listens on `host`: for all addresses ("", 0.0.0.0) a rail's."""
    if host in ("", "0.0.0.0", "::"):
        endpoints = engine.address.endpoints
        host = endpoints[0].rpartition(":")[0].strip("[]") if endpoints else socket.gethostname()
    return f"[{host}]" if ":" in host else host


@contextlib.contextmanager
def records_on_signal() -> Iterator[None]:
    """While this is open, or around a function that it decorates, SIGUSR2 has flight recordings written.

    A model of the user's may have taken the signal before: it keeps it, and the log says that there are no recordings.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(xr.dump_on_signal())
        except UsageError as error:
            log.warning("SIGUSR2 writes no flight recording: %s", error)
        yield
