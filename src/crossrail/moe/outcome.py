"""How a wait for another rank ended, and the error to raise if it was in vain."""

from __future__ import annotations

from typing import Literal, NamedTuple, cast

import crossrail as xr
from crossrail.errors import CrossrailError, EngineClosed, PeerLost, TransferError, WaitTimeout
from crossrail.moe.errors import PeerFailed, masked_out

Result = Literal["ready", "late", "left", "peer-lost", "masked-out", "failed", "engine-closed"]


class Outcome(NamedTuple):
    """rank: whom it is about; of no meaning where the result is "ready". "late", and our own: the thread that posts for
    us has not done so yet. detail: of the native half, or what that rank says of itself, or "".
    """

    result: Result
    rank: int
    detail: str = ""

    @classmethod
    def of_native(cls, result: str, rank: int, detail: str = "") -> Outcome:
        """From the native module's result, which has the same cases."""
        return cls(cast(Result, result), rank, detail)


def unposted_error(rank: int, half: str, timeout_s: float) -> WaitTimeout:
    """The error of a wait before which our own part was to be posted. rank: ours."""
    return WaitTimeout(
        f"this rank ({rank}) has not posted its own part yet, {timeout_s:g} s into its wait for the {half}. Nothing is "
        "lost: wait again. Next: see whether the threads that post (crossrail-moe, crossrail-work) get a core"
    )


def error_of(engine: xr.Engine, outcome: Outcome, address: xr.Address, half: str, timeout_s: float) -> CrossrailError:
    """The error to raise. address: of the rank. half: what it owed, "" if nothing."""
    result, rank, detail = outcome
    who = f"rank {rank} ({address.name!r}, pid {address.pid})"
    during = f" before its {half}" if half else ""
    if result == "engine-closed":
        return EngineClosed(f"engine {engine.name!r} was closed while it waited for {who}, {half}")
    if result == "left":
        text = f"{who} has closed its AllToAll{during}{detail and f': {detail}'}"
        return PeerFailed(text, rank=rank, has_left=True)
    if result == "masked-out":
        return masked_out()
    if result == "peer-lost":
        note = detail or engine.explain(address).note
        text = f"{who} was lost{during}: {note}. Next: make a new AllToAll without it"
        return PeerLost(text, op="moe", peer=address.name, status="peer-lost", detail=note)
    if result == "failed":
        return TransferError(f"a write to {who} failed{during}: {detail}", op="moe", peer=address.name, detail=detail)
    state = engine.peer_state(address)
    seen = f" ({note})" if state == "frozen" and (note := engine.explain(address).note) else ""
    why = f": {detail}" if detail else f"; its engine is {state}{seen}"
    return WaitTimeout(
        f"{who} has not sent its {half} within {timeout_s:g} s{why}. Nothing is "
        "lost: wait again. Next: see whether that rank makes the same calls as this one"
    )


def call_failed_error(rank: int, address: xr.Address, half: str, why: str) -> PeerFailed:
    """The error of a wait for what a rank was to send by a call that has failed there."""
    return PeerFailed(
        f"rank {rank} ({address.name!r}, pid {address.pid}) has not sent its {half}: {why}. Nothing is lost: wait "
        "again. Next: make that call again there, or close its AllToAll",
        rank=rank,
        has_left=False,
    )
