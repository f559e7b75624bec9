"""Engines on this host's loopback addresses, and a peer in another process that is warm."""

from typing import Any

import crossrail as xr
from tests.support.limits import WAIT_S
from tests.support.node import RemoteEngine
from tests.support.operations import Operations
from tests.support.patterns import pattern
from tests.support.process import PeerProcess

NBYTES = 3_000_001


def loopback(transport: str, rail_count: int) -> dict[str, Any]:
    """An engine's options."""
    return {"transport": transport, "rails": [f"127.0.0.{rail + 1}" for rail in range(rail_count)]}


def warmed_up(engine: xr.Engine, child: PeerProcess, **options: object) -> tuple[RemoteEngine, Operations]:
    """Both lanes of every rail connected, then idle."""
    there = child.open(**options)
    there.receive(4, 2000)
    there.call("discard_messages")
    mine, remote = engine.register(pattern(1, NBYTES)), there.memory(NBYTES, "private", fill=1)
    engine.submit_write(mine, remote.descriptor).wait(WAIT_S)
    engine.submit_write(mine, remote.descriptor, 8).wait(WAIT_S)
    return there, Operations(engine, mine, [remote.descriptor], imm=5)
