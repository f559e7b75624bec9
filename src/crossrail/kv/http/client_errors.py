"""Explains failed HTTP requests in an operator's terms: aiohttp's own messages name its classes and fields."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl

from crossrail._extras import needs

with needs(__name__, "'crossrail[kv]'"):
    import aiohttp


def client_error_text(error: BaseException) -> str:
    """Describes an error that aiohttp's client, or waiting for it, has raised."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {_why(error.os_error)}"
    if isinstance(error, asyncio.TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError):
        return "the connection was lost"
    return f"{type(error).__name__} {error}".rstrip()


def _why(error: OSError) -> str:
    """The system's message; asyncio's own shows the address in its place."""
    if error.errno is None or isinstance(error, socket.gaierror | ssl.SSLError):
        return error.strerror or str(error) or type(error).__name__
    return os.strerror(error.errno)
