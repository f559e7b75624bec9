"""How a router or a node is rejected for good: its `refused` raises why, to whoever awaits it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from crossrail.errors import CrossrailError

log = logging.getLogger("crossrail.kv")

Refuse = Callable[[CrossrailError], None]


def refuse(refused: asyncio.Future[None], why: CrossrailError) -> None:
    """Sets `refused`. Only the first reason is kept."""
    log.error("%s", why)
    if not refused.done():
        refused.set_exception(why)
        refused.exception()  # mark as retrieved: its owner may never look
