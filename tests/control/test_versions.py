"""Nodes of two versions of crossrail: each hears of the other's, at once, and takes nothing from it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from crossrail import __version__
from crossrail.control.mailbox import Mailbox, OtherRelease
from crossrail.control.seal import OURS, VERSION, Sealer, Spoken
from crossrail.control.wire import EngineWire
from crossrail.kv import messages as kv
from crossrail.weights import WeightController, WeightMemory, WeightTrainer
from crossrail.weights import messages as weights
from tests.conftest import EngineFactory
from tests.support.limits import WAIT_S

LATER = Spoken(VERSION + 1, "9.8.7")
OF_OURS = f"version {VERSION} of control messages (crossrail {__version__})"
OF_LATER = f"version {VERSION + 1} of control messages (crossrail 9.8.7)"


async def test_both_sides_name_both_versions(open_engine: EngineFactory, caplog: pytest.LogCaptureFixture) -> None:
    here = Mailbox(EngineWire(open_engine("here")), b"secret", kv.LANGUAGE)
    there = Mailbox(EngineWire(open_engine("there")), b"secret", kv.LANGUAGE, spoken=LATER)
    here.start()
    there.start()

    with pytest.raises(OtherRelease) as caught:
        await here.ask(there.address, kv.Leave("node"), kv.Taken, WAIT_S)

    assert f"the other side speaks {OF_LATER}, this one {OF_OURS}: use one release" in str(caught.value)

    async def told_there() -> None:
        while f"the other side speaks {OF_OURS}, this one {OF_LATER}" not in caplog.text:
            await asyncio.sleep(0.002)

    await asyncio.wait_for(told_there(), WAIT_S)
    assert f"dropped a message of 'here': its sender speaks version {VERSION}, this side {OF_LATER}" in caplog.text
    dropped = there.dropped
    for asker, other in ((here, there), (there, here)):  # both know by now: nothing is sent
        with pytest.raises(OtherRelease):
            await asker.ask(other.address, kv.Leave("node"), kv.Taken, WAIT_S)
    assert there.dropped == dropped and not here.dropped
    for box in (here, there):
        await box.close()
        box.wire.close()  # type: ignore[attr-defined]


async def test_join_of_weights_is_refused(open_engine: EngineFactory) -> None:
    boxes = [
        Mailbox(EngineWire(open_engine("controller")), b"secret", weights._LANGUAGE, spoken=LATER),
        Mailbox(EngineWire(engine := open_engine("trainer")), b"secret", weights._LANGUAGE),
    ]
    for box in boxes:
        box.start()
    controller = WeightController(boxes[0])
    memory = WeightMemory(engine, "trainer", 0)
    memory.add("w", np.zeros(8, np.float32))
    async with WeightTrainer(boxes[1], memory) as trainer:
        with pytest.raises(OtherRelease, match=r"crossrail 9\.8\.7\), this one version"):
            await trainer.join(controller.address, WAIT_S)
    for box in boxes:
        await box.close()
        box.wire.close()  # type: ignore[attr-defined]


def test_only_sound_notices_of_other_versions_are_believed() -> None:
    here, there = (Sealer(b"s", name * 16, 4096, b"tests", spoken) for name, spoken in ((b"h", OURS), (b"t", LATER)))
    notice = there.notice(b"h" * 16)
    assert here.noticed(notice, b"t" * 16) == LATER
    assert here.noticed(notice, b"x" * 16) is None  # of another sender
    assert here.noticed(there.notice(b"x" * 16), b"t" * 16) is None  # to another engine
    assert there.noticed(notice, b"t" * 16) is None  # of its own version
    for index in range(len(notice)):
        assert here.noticed(notice[:index] + bytes([notice[index] ^ 1]) + notice[index + 1 :], b"t" * 16) is None
        assert here.noticed(notice[:index], b"t" * 16) is None
    long = Sealer(b"s", b"t" * 16, 4096, b"tests", Spoken(9, "\x1b[2J" + "x" * 100)).notice(b"h" * 16)
    assert here.noticed(long, b"t" * 16) == Spoken(9, "?[2J" + "x" * 28)
