"""Messages of an engine are numbered once for its life: a second mailbox would seem to repeat the first one's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import crossrail as xr
from crossrail.control.mailbox import NoAnswer
from crossrail.control.wire import EngineWire
from crossrail.weights.services import messages as m
from crossrail.weights.services.messages import mailbox
from tests.conftest import EngineFactory
from tests.support.limits import WAIT_S


async def test_second_mailbox_of_an_engine_is_refused(open_engine: EngineFactory) -> None:
    engine = open_engine("once")
    wire = EngineWire(engine)
    await mailbox(wire, b"secret").close()
    with pytest.raises(xr.UsageError, match="already has a mailbox"):
        mailbox(wire, b"secret")
    wire.close()
    with pytest.raises(xr.UsageError, match="'once' has already carried the messages of a service"):
        EngineWire(engine)


def test_start_outside_of_a_running_event_loop_is_refused(open_engine: EngineFactory) -> None:
    wire = EngineWire(open_engine("early"))
    with pytest.raises(xr.UsageError, match="its event loop has to be running"):
        mailbox(wire, b"secret").start()
    wire.close()


async def test_secret_may_be_text_as_that_of_an_engine(open_engine: EngineFactory) -> None:
    """The same one: who has it as text is understood by who has its bytes."""
    wires = [EngineWire(open_engine(name)) for name in ("text", "bytes")]
    told, asked = (
        mailbox(wire, secret) for wire, secret in zip(wires, ("s3cr\u00e9t", "s3cr\u00e9t".encode()), strict=True)
    )
    assert told._sealer._key == asked._sealer._key
    for box, wire in zip((told, asked), wires, strict=True):
        await box.close()
        wire.close()


@pytest.mark.parametrize(
    ("secret", "match"), [(b"", "has 0 bytes"), (None, "secret must be text or bytes, not None"), (7, "not int")]
)
async def test_refused_secret_leaves_the_wire_to_the_next_attempt(
    open_engine: EngineFactory, secret: Any, match: str
) -> None:
    wire = EngineWire(open_engine("again"))
    with pytest.raises(xr.UsageError, match=match):
        mailbox(wire, secret)

    await mailbox(wire, "right").close()
    wire.close()


async def test_what_is_asked_after_close_ends_at_once(open_engine: EngineFactory) -> None:
    """As by an update that goes on when everything is closed: nobody would hear an answer."""
    wire = EngineWire(open_engine("closed"))
    async with mailbox(wire, "right") as box:
        box.start()
    with pytest.raises(NoAnswer, match="this node is closing"):
        await asyncio.wait_for(box.ask(wire.address, m.RollCall(), m.Taken, 100 * WAIT_S), WAIT_S)
    wire.close()


async def test_mailbox_that_cannot_receive_at_first_says_so_and_tries_again(
    open_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the process has no descriptor left for the event loop's notifier."""
    wires = [EngineWire(open_engine(name)) for name in ("asks", "hears")]
    asks, hears = (mailbox(wire, b"secret") for wire in wires)
    packets, left = wires[1].packets, iter(range(2))

    def failing() -> AsyncIterator[tuple[bytes, bytes]]:
        if next(left, None) is not None:
            raise xr.TransportError("eventfd", 24, "cannot make a notifier: Too many open files")
        return packets()

    monkeypatch.setattr(wires[1], "packets", failing)

    async def hear(_sender: bytes, _question: m.RollCall) -> m.Taken:
        return m.Taken()

    hears.handle(m.RollCall, hear)
    for box in (asks, hears):
        box.start()
    await asks.ask(hears.address, m.RollCall(), m.Taken, WAIT_S)
    assert caplog.text.count("nothing can be received now, and it is tried again: eventfd: cannot make") == 1
    for box, wire in zip((asks, hears), wires, strict=True):
        await box.close()
        wire.close()
