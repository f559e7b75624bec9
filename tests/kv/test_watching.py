"""Whether KV that is missing can still come: what a decoder finds out, and how often it looks."""

import asyncio

import pytest

from crossrail.control.deadlines import in_time
from crossrail.kv import messages as m
from crossrail.kv.nodes.watching import Watch, lost_before_arrival
from tests.support.kv_net import Net
from tests.support.limits import WAIT_S

NEVER_S = 100 * WAIT_S


async def never() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("is_lost_before", [True, False])
async def test_end_of_the_writer_is_seen_without_a_probe(is_lost_before: bool) -> None:
    net = Net()
    mailbox, writer = m.mailbox(net.wire("decoder"), b"s3cret"), net.wire("prefiller")
    mailbox.start()
    if is_lost_before:
        writer.kill()
    watch = Watch(mailbox, writer.address, "prefiller 'p'", "r", 1, probe_s=NEVER_S, timeout_s=NEVER_S)
    waiting = asyncio.ensure_future(lost_before_arrival(never(), [watch], asyncio.Event()))
    if not is_lost_before:
        await asyncio.sleep(0)
        writer.kill()

    assert await in_time(waiting, WAIT_S) == "prefiller 'p' died or closed"

    assert not net.carried
    await mailbox.close()


async def test_silent_writer_is_lost_at_its_deadline() -> None:
    net = Net()
    mailbox, writer = m.mailbox(net.wire("decoder"), b"s3cret", resend_s=0.01), net.wire("prefiller")
    mailbox.start()
    writer.freeze()
    watch = Watch(mailbox, writer.address, "prefiller 'p'", "r", 1, probe_s=0.01, timeout_s=0.1)

    said = await in_time(lost_before_arrival(never(), [watch], asyncio.Event()), WAIT_S)

    assert said == "prefiller 'p' has not answered for 0.1 s"
    await mailbox.close()


async def test_what_has_arrived_leaves_nobody_waiting() -> None:
    net = Net()
    mailbox, writer = m.mailbox(net.wire("decoder"), b"s3cret"), net.wire("prefiller")
    before = asyncio.all_tasks()
    watch = Watch(mailbox, writer.address, "prefiller 'p'", "r", 1, probe_s=NEVER_S, timeout_s=NEVER_S)

    assert await lost_before_arrival(asyncio.sleep(0), [watch], asyncio.Event()) == ""

    assert asyncio.all_tasks() == before
    await mailbox.close()
