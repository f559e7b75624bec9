"""Requests of SGLang's that crossrail cannot serve: these fail, with words, and the schedulers go on."""

from __future__ import annotations

import pytest

from tests.sglang.side import FAILED, WAITING, Side, ask, failure, hand_over, until
from tests.support.limits import eventually


@pytest.mark.parametrize("room", [0, -3, 1 << 63])
def test_rooms_that_sglang_cannot_write_down(p: Side, d: Side, room: int) -> None:
    sender, receiver = p.sender(room), d.receiver(room)
    ask(receiver)
    for one in (sender, receiver):
        assert one.poll() == FAILED
        assert f"bootstrap_room={room} must be in 1..9223372036854775807" in failure(one).failure_reason


def test_the_largest_room(p: Side, d: Side) -> None:
    hand_over(p, d, "largest", (1 << 63) - 1)


def test_samples_of_one_request_share_a_room(p: Side, d: Side) -> None:
    """All fail for that reason, though SGLang aborts the others at the prefiller as soon as the first has failed."""
    sender = p.sender(1)
    receivers = [d.receiver(1)]
    ask(receivers[0])
    until(WAITING, sender)
    receivers.append(d.receiver(1))
    sender.abort()
    until(FAILED, sender, *receivers)
    for receiver in receivers:
        assert "with n > 1, SGLang gives all samples of a request the same room" in failure(receiver).failure_reason
    hand_over(
        p, d, "another room", 2
    )  # this one the decoder gave up, which the prefiller may hear when it is over there


def test_a_decoder_that_asks_twice_for_a_room_fails_there_too(p: Side, d: Side) -> None:
    receivers = [d.receiver(1)]
    d.manager.core.decoder._pulls.clear()  # else it says so itself
    receivers.append(d.receiver(1))
    sender = p.sender(1)
    for receiver in receivers:
        ask(receiver)
    until(FAILED, sender, *receivers)
    assert "with n > 1, SGLang gives all samples of a request the same room" in failure(sender).failure_reason


def test_a_request_whose_decoder_gave_up_as_sglang_began_to_compute_it_leaves_nothing(p: Side, d: Side) -> None:
    """Between SGLang's poll and its init."""
    sender, receiver = p.sender(1), d.receiver(1)
    ask(receiver)
    until(WAITING, sender)
    receiver.abort()
    until(FAILED, receiver, sender)
    sender.init(4, 0)
    hand_over(p, d, "the same room again")


@pytest.mark.parametrize("released", ["prefill", "decode"])
def test_memory_that_sglang_releases_and_takes_back(p: Side, d: Side, released: str) -> None:
    """/release_memory_occupation: pages are unmapped, and others are there when it is resumed."""
    hand_over(p, d, "before")
    side = p if released == "prefill" else d
    old = side.manager.core
    side.manager.deregister_buffer_to_engine()
    assert old.node.engine.closed and all(region.closed for region in old.node._regions)
    for memory in d.planes:
        memory[:] = 0

    if released == "prefill":
        eventually(lambda: not d.manager.try_ensure_parallel_info(p.address), "the decoder knows that it is gone")
        sender = p.sender(2)
        assert sender.poll() == FAILED and "POST /resume_memory_occupation" in failure(sender).failure_reason
    else:
        assert p.address not in d.manager.prefill_info_table and not d.manager.try_ensure_parallel_info(p.address)
        receiver = d.conn.CrossrailKVReceiver(d.manager, d.address, 2)
        receiver.abort()  # as SGLang does when it has not found the prefiller
        assert receiver.poll() == FAILED and "POST /resume_memory_occupation" in failure(receiver).failure_reason

    side.manager.register_buffer_to_engine()
    hand_over(p, d, "after", 3)
