"""Engines for tests of misbehaving tcp peers, and what these tests ask of them."""

from typing import Any

import crossrail as xr
from tests.support import sealing
from tests.support.limits import WAIT_S

TCP = {"transport": "tcp", "rails": ["127.0.0.1"]}


def events_of(engine: xr.Engine) -> list[xr.EngineEvent]:
    events: list[xr.EngineEvent] = []
    engine.on_event(events.append)
    return events


def still_serves(target: xr.Engine, **options: Any) -> None:
    """An honest newcomer gets through. options: of its engine, such as secret or tls."""
    with xr.Engine("newcomer", **TCP, **options) as newcomer:
        region = target.alloc(100)
        newcomer.submit_write(newcomer.alloc(100), region.descriptor, imm=9).wait(WAIT_S)
        target.imm_counter(9).wait(1, WAIT_S)
        region.close(WAIT_S)


def region_id(region: xr.Region) -> int:
    return sealing.region_id_of(region.descriptor.to_bytes())


def descriptor_of(region: xr.Region, owner: xr.Address) -> bytes:
    """A descriptor of the region that names another owner."""
    data, address = region.descriptor.to_bytes(), owner.to_bytes()
    return sealing.with_owner(data, address)
