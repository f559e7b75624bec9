"""Peers that an engine has given up although they live: as they were frozen, or cut off, for longer than it waits."""

import asyncio
from collections.abc import Generator
from typing import Any

import pytest

import crossrail as xr
from crossrail.control.wire import EngineWire, Unreachable
from crossrail.kv import KvReceiver, SendJob


def give_up(monkeypatch: pytest.MonkeyPatch, wire: EngineWire, *addresses: bytes) -> set[bytes]:
    """Makes sends to these addresses fail until they are tried anew. Returns the set of those that still fail."""
    given_up, post = set(addresses), wire.post

    def post_to_those_that_are_there(to: bytes, packet: bytes) -> asyncio.Future[None]:
        if to not in given_up:
            return post(to, packet)
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        lost.set_exception(Unreachable("it is lost"))
        return lost

    monkeypatch.setattr(wire, "post", post_to_those_that_are_there)
    monkeypatch.setattr(wire, "is_lost", lambda address: address in given_up)
    monkeypatch.setattr(wire, "revive", given_up.discard)
    return given_up


class LostTransfer:
    """Ended because the engine has given its peer up."""

    def __await__(self) -> Generator[None, None, None]:
        raise xr.PeerLost("the decoder is lost: silent for 10.0 s")
        yield

    triggered_at = completed_at = None

    def cancel(self) -> None:
        """It has ended."""


def lose_writes(monkeypatch: pytest.MonkeyPatch, request: str) -> None:
    """Loses the writes of the SendJob of this name."""
    submit = SendJob._submit

    def submit_in_vain(job: SendJob, what: Any) -> None:
        if job.request != request:
            submit(job, what)
            return
        job._transfers.append(LostTransfer())
        job._submitted += 1

    monkeypatch.setattr(SendJob, "_submit", submit_in_vain)


def note_fences(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The writers that are fenced off from now on."""
    fence, fenced = KvReceiver.fence, []

    async def noted_fence(receiver: KvReceiver, writer: str, timeout_s: float) -> None:
        fenced.append(writer)
        await fence(receiver, writer, timeout_s)

    monkeypatch.setattr(KvReceiver, "fence", noted_fence)
    return fenced
