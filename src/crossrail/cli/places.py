"""HOST:PORT, parsed for all commands."""

from __future__ import annotations

import ipaddress
import re

from crossrail.errors import UsageError

_PORT_MAX = 65535
_PLACE = re.compile(r"(?:\[(?P<ipv6>[^\[\]]*)\]|(?P<host>[\w.%-]*))(?::(?P<port>[0-9]{1,9}))?")


def parse_place(
    text: str, *, default_port: int | None = None, port_min: int = 1, needs_host: bool = True
) -> tuple[str, int]:
    """`HOST:PORT` or `[IPV6]:PORT`; with a default_port also `HOST`, `[IPV6]` or `IPV6`; unless it needs a host also
    `:PORT`, whose host is empty. An IPv6 address may have a zone, as in fe80::1%eth0. UsageError for anything else.
    """
    if default_port is not None and _is_ipv6(text):
        return text, default_port
    match = _PLACE.fullmatch(text)
    if match is None or (match["port"] is None and default_port is None):
        raise UsageError(f"{text!r} is not {'' if default_port is None else 'HOST, '}HOST:PORT or [IPV6]:PORT")
    if match["ipv6"] is not None and not _is_ipv6(match["ipv6"]):
        raise UsageError(f"{text!r} is not HOST:PORT or [IPV6]:PORT: {match['ipv6']!r} is not an IPv6 address")
    host = match["ipv6"] or match["host"]
    if host.isdecimal():  # which the C library would take for an address, 80 for 0.0.0.80
        raise UsageError(f"{text!r} has a number as its host: write {'' if needs_host else ':PORT or '}HOST:PORT")
    if needs_host and not host:
        raise UsageError(f"{text!r} names no host: write HOST:PORT")
    port = int(match["port"] or default_port or 0)
    if not port_min <= port <= _PORT_MAX:
        raise UsageError(f"{text!r} is not HOST:PORT: the port must be {port_min} to {_PORT_MAX}")
    return host, port


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.IPv6Address(text).version == 6
    except ValueError:
        return False
