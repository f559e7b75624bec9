"""Asks an HTTP endpoint of a process nearby."""

from __future__ import annotations

import ipaddress
import urllib.request
from http.client import HTTPResponse
from typing import cast
from urllib.parse import urlsplit


def open_url(url: str, timeout_s: float) -> HTTPResponse:
    """Like urlopen, but asks this host directly: a proxy of the environment (http_proxy) has another 127.0.0.1."""
    handlers = [urllib.request.ProxyHandler({})] if _is_here(urlsplit(url).hostname or "") else []
    return cast("HTTPResponse", urllib.request.build_opener(*handlers).open(url, timeout=timeout_s))


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
