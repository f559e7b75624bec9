"""Where the two sides of a measurement meet."""

from __future__ import annotations

import asyncio
import ipaddress
import threading

import click

import crossrail as xr
from crossrail.cli.meeting import SCHEME, Kind, Meeting
from crossrail.cli.places import parse_place
from crossrail.errors import CrossrailError, UsageError

DEFAULT_PORT = 7320
BENCH = Kind(b"XRMB", "crossrail bench serve", "crossrail bench serve --bind :{port}")
_START_S = 10.0


def bind_place(text: str) -> tuple[str, int]:
    """The type of --bind. Port 0: any. An empty host: all addresses."""
    return _place(text, port_min=0, needs_host=False)


def target_place(text: str) -> tuple[str, int]:
    """The type of HOST:PORT."""
    return _place(text, port_min=1, needs_host=True)


def _place(text: str, *, port_min: int, needs_host: bool) -> tuple[str, int]:
    authority = text.removeprefix(SCHEME).removesuffix("/")
    try:
        return parse_place(authority, default_port=DEFAULT_PORT, port_min=port_min, needs_host=needs_host)
    except UsageError as error:
        raise click.BadParameter(str(error)) from None


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
