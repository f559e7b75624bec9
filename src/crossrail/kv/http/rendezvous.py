"""How nodes find a router: its HTTP front gives the address of its engine to whoever knows the secret."""

from __future__ import annotations

import asyncio
import hmac
from urllib.parse import urlsplit

from crossrail._extras import needs
from crossrail.errors import UsageError
from crossrail.kv.errors import RouterNotFound
from crossrail.kv.http.client_errors import client_error_text
from crossrail.kv.nodes.router_link import FindRouter

with needs(__name__, "'crossrail[kv]'"):
    import aiohttp

PATH = "/kv/router"
_TIMEOUT_S = 3.0
_ADDRESS_BYTES_MAX = 4096
_LINE_END = "\n"


def token(secret: bytes) -> str:
    """Proves to the HTTP front that the sender knows the secret. It grants nothing but the address."""
    return hmac.digest(secret, b"crossrail kv rendezvous", "sha256").hex()


def check_url(url: str) -> None:
    """UsageError for a URL that cannot be a router's: nodes would ask it for ever."""
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_whole = is_whole and not parts.query and not parts.fragment  # they would stand before our path
    except ValueError:
        parts, is_whole = urlsplit(""), False
    if parts.username is not None:  # where our own proof goes; the words do not repeat a password
        raise UsageError(
            "the router's URL has a user's name, which it does not take: nodes are known by the cluster's secret"
        )
    if not is_whole:
        raise UsageError(f"router is {url!r}, must be a URL as http://HOST:8000")


def find_by_http(url: str, secret: bytes) -> FindRouter:
    """Asks the router whose front is at `url` ("http://host:port") at each call: it may have been restarted."""

    async def find() -> bytes:
        headers = {"Authorization": f"Bearer {token(secret)}"}
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(url.rstrip("/") + PATH, headers=headers) as response,
            ):
                if response.status != 200:
                    said = (await response.content.read(500)).decode(errors="replace").strip()
                    # A router gives the reason in one line; anything else that listens there may answer with a page.
                    raise RouterNotFound(f"{url} answered {response.status}: {said.partition(_LINE_END)[0]}")
                return await response.content.read(_ADDRESS_BYTES_MAX)
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise RouterNotFound(f"{url}: {client_error_text(error)}") from None

    return find
