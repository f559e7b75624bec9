"""Messages of an engine are numbered once for its life: a second mailbox would seem to repeat the first one's."""

from __future__ import annotations

import pytest

import crossrail as xr
from crossrail.control.wire import EngineWire
from crossrail.weights.services.messages import mailbox
from tests.conftest import EngineFactory


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
