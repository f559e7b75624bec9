"""Why a wait for another rank ended without what it waited for, in words."""

from __future__ import annotations

import crossrail as xr
from crossrail.errors import CrossrailError, EngineClosed, PeerLost, TransferError, UsageError, WaitTimeout
from crossrail.moe.errors import masked_out


def trouble(
    engine: xr.Engine, result: str, rank: int, address: xr.Address, half: str, timeout_s: float, detail: str = ""
) -> CrossrailError:
    """What to raise. result: as the native half says it; half: what was due of the rank, "" where nothing was."""
    who = f"rank {rank} ({address.name!r}, pid {address.pid})"
    during = f" before its {half}" if half else ""
    if result == "engine-closed":
        return EngineClosed(f"engine {engine.name!r} was closed while it waited for {who}, {half}")
    if result == "left":
        return UsageError(f"{who} has closed its AllToAll{during}{detail and f': {detail}'}")
    if result == "masked-out":
        return masked_out()
    if result == "peer-lost":
        note = detail or engine.explain(address).note
        text = f"{who} was lost{during}: {note}. Next: make a new AllToAll without it"
        return PeerLost(text, op="moe", peer=address.name, status="peer-lost", detail=note)
    if result == "failed":
        return TransferError(f"a write to {who} failed{during}: {detail}", op="moe", peer=address.name, detail=detail)
    return WaitTimeout(
        f"{who} has not sent its {half} within {timeout_s:g} s; its engine is {engine.peer_state(address)}. Nothing is "
        "lost: wait again. Next: see whether that rank makes the same calls as this one"
    )
