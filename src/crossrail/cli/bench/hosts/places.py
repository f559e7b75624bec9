"""Parses HOST:PORT on the command line and defines where the two sides meet."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import threading
from urllib.parse import urlsplit

import click

import crossrail as xr
from crossrail.cli.meeting import SCHEME, Kind, Meeting
from crossrail.errors import CrossrailError

DEFAULT_PORT = 7320
BENCH = Kind(b"XRMB", "crossrail bench serve", "crossrail bench serve --bind :{port}")
_START_S = 10.0
_HOST = re.compile(r"[A-Za-z0-9._:%-]*")


def place(text: str, *, port_min: int, needs_host: bool = False) -> tuple[str, int]:
    """`HOST`, `HOST:PORT`, `[IPv6]:PORT`; unless it needs a host, also `:PORT`, whose host is empty."""
    try:
        parts = urlsplit(SCHEME + text.removeprefix(SCHEME))
        port = DEFAULT_PORT if parts.port is None else parts.port
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not HOST:PORT: {error}") from None
    rest = parts.query or parts.fragment or parts.path not in ("", "/")
    if rest or parts.username is not None or _HOST.fullmatch(parts.hostname or "") is None:
        raise click.BadParameter(f"{text!r} is not HOST:PORT")
    if not port_min <= port <= 65535:
        raise click.BadParameter(f"{text!r}: the port must be {port_min} to 65535")
    host = parts.hostname or ""
    if host.isdecimal():  # which the C library would take for an address, 80 for 0.0.0.80
        ways = f"HOST:{host}" if needs_host else f":{host} or HOST:{host}"
        raise click.BadParameter(f"{text!r} is a number: for a port, write {ways}")
    if needs_host and not host:
        raise click.BadParameter(f"{text!r} names no host: write HOST:{port}")
    return host, port


def bind_place(text: str) -> tuple[str, int]:
    """The type of --bind. Port 0: any. An empty host: all addresses."""
    return place(text, port_min=0)


def target_place(text: str) -> tuple[str, int]:
    """The type of HOST:PORT."""
    return place(text, port_min=1, needs_host=True)


def is_loopback(host: str) -> bool:
    """Whether an address, or localhost, leads back to this host only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def loopback_rails(host: str) -> list[str]:
    """The rail of an engine that is reached by that host."""
    return ["::1" if host == "::1" else "127.0.0.1" if host == "localhost" else host]


class MeetingThread:
    """A Meeting on a loop and a thread of its own, for a command that blocks. A context manager."""

    def __init__(self, host: str, port: int, secret: bytes, address: xr.Address) -> None:
        self._meeting = Meeting(port, secret, address, host=host or None, kind=BENCH)
        self._started = threading.Event()
        self._stop: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._error: Exception | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="crossrail-meeting", daemon=True)
        self.port = 0

    def __enter__(self) -> MeetingThread:
        self._thread.start()
        if not self._started.wait(_START_S):
            raise CrossrailError(f"could not listen within {_START_S:g} s")
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_START_S)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with self._meeting as meeting:
                self.port = meeting.port
                self._started.set()
                await self._stop.wait()
        except Exception as error:  # passed on to whoever waits for the start
            self._error = error
            self._started.set()
