"""The two sides in processes of their own: as SGLang runs them, and as they die."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.sglang.child import ROOT, START_S, Child
from tests.sglang.conftest import Open
from tests.sglang.side import FAILED, MINE, SUCCESS, THEIRS, WAITING, Side, ask, failure, hand_over, send, until
from tests.support.limits import eventually, never

Start = Callable[..., Child]


@pytest.fixture
def start(server: Any, address: str) -> Iterator[Start]:
    started: list[Child] = []

    def start_one(mode: str, **options: Any) -> Child:
        started.append(Child(mode, address, **options))
        return started[-1]

    yield start_one
    for child in started:
        child.close()


def test_between_two_processes(start: Start) -> None:
    p, d = start("prefill"), start("decode")
    p.call("open", 7)
    d.call("open", 7)
    d.call("ask", 7, THEIRS, 1)
    p.call("until", 7, WAITING)
    p.call("init", 7, 4, 5)
    p.call("compute", "apart", MINE, 5)
    for page in MINE:
        p.call("send", 7, [page])
    d.call("until", 7, SUCCESS)
    p.call("until", 7, SUCCESS)
    d.call("assert_holds", "apart", THEIRS, 1)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_server_that_ends_complains_of_nothing(address: str, mode: str) -> None:
    """SGLang takes no manager down: what it has ends with the interpreter."""
    command = [sys.executable, "-m", "tests.sglang.child", mode, address]
    environment = {**os.environ, "CROSSRAIL_SGLANG_OPTIONS": '{"transport": "shm"}'}
    ended = subprocess.run(
        command, input="", capture_output=True, text=True, cwd=ROOT, env=environment, timeout=START_S
    )
    assert ended.returncode == 0
    assert "mailbox" not in ended.stderr


def test_a_prefiller_that_is_killed(start: Start, open_side: Open) -> None:
    p, d = start("prefill"), open_side("decode")
    receiver = half_way(p, d)
    p.kill()
    until(FAILED, receiver)
    overwritten(d)


def test_a_decoder_that_is_killed(start: Start, open_side: Open) -> None:
    p, d = open_side("prefill"), start("decode")
    sender = p.sender(7)
    d.call("open", 7)
    d.call("ask", 7, THEIRS, 1)
    until(WAITING, sender)
    d.kill()
    until(FAILED, sender)
    assert "decoder" in failure(sender).failure_reason


@pytest.mark.parametrize("room", ["is open at the prefiller", "comes later"])
def test_a_decoder_that_is_killed_before_it_has_pages(start: Start, open_side: Open, room: str) -> None:
    """Its request may wait for pages there for long; nobody waits for it at the prefiller, once it has ended."""
    p = open_side("prefill")
    sender = p.sender(7) if room == "is open at the prefiller" else None
    announced(start, p).kill()
    if sender is None:
        eventually(lambda: not p.manager.core.prefiller._awaited, "it knows that its decoder has ended")
        sender = p.sender(7)
    until(FAILED, sender)
    assert failure(sender).failure_reason == "its decoder is gone"


def test_a_decoder_that_is_killed_takes_no_room_with_it_that_another_has_asked_for(
    start: Start, open_side: Open
) -> None:
    """A router may try the same number with another one."""
    p, d = open_side("prefill"), open_side("decode")
    doomed = announced(start, p)
    sender, receiver = p.sender(7), d.receiver(7)
    ask(receiver)
    until(WAITING, sender)
    doomed.kill()
    eventually(lambda: not p.manager.core.prefiller._awaited, "it knows that the other has ended")
    send(p, sender, "of another", MINE, 0)
    until(SUCCESS, sender, receiver)
    d.assert_holds("of another", THEIRS, 0)


def test_a_decoder_that_is_killed_spoils_no_number_of_a_room_that_has_ended(start: Start, open_side: Open) -> None:
    p, d = open_side("prefill"), open_side("decode")
    doomed = announced(start, p)
    hand_over(p, d, "before", 7)
    doomed.kill()
    eventually(lambda: not p.manager.core.prefiller._awaited, "it knows that the other has ended")
    hand_over(p, d, "after", 7)


def test_a_frozen_prefiller_is_shut_out(start: Start, open_side: Open) -> None:
    """Its pages are given up without its word, and what it sends when it goes on lands nowhere."""
    p, d = start("prefill"), open_side("decode", options={"prefiller_timeout_s": 0.5})
    receiver = half_way(p, d)
    p.signal(signal.SIGSTOP)
    until(FAILED, receiver)
    for memory in d.planes:
        memory[THEIRS] = 1
    p.signal(signal.SIGCONT)
    p.call("send", 7, MINE[2:])
    p.call("until", 7, FAILED)
    assert not any((memory[THEIRS] != 1).any() for memory in d.planes)


def test_a_prefiller_that_stood_still_hears_of_what_was_given_up_meanwhile(
    start: Start, open_side: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client would wait for bootstrap_s: nobody comes for that room."""
    caplog.set_level(logging.INFO, "crossrail.sglang")
    p, receiver = frozen_with_a_room(start, open_side, prefiller_timeout_s=1.0)
    receiver.abort()
    until(FAILED, receiver)
    eventually(lambda: "room 7, given up: no answer" in caplog.text, "the prefiller was told in vain")
    p.signal(signal.SIGCONT)
    p.call("until", 7, FAILED)
    assert "the decoder gave it up" in p.call("failure", 7)


def test_a_prefiller_that_stood_still_when_it_was_asked_hears_that_it_was_given_up(
    start: Start, open_side: Open
) -> None:
    """Whether or not it gets the question when it goes on. Its client would wait for bootstrap_s."""
    p, receiver = frozen_with_a_room(start, open_side, prefiller_timeout_s=0.5)
    ask(receiver)
    until(FAILED, receiver)
    p.signal(signal.SIGCONT)
    p.call("until", 7, FAILED)
    assert f"the decoder gave it up: {failure(receiver).failure_reason}" == p.call("failure", 7)


def announced(start: Start, p: Side) -> Child:
    """A decoder that has a room and no pages for it yet."""
    d = start("decode")
    d.call("open", 7)
    eventually(lambda: p.manager.core.prefiller._awaited, "the prefiller knows whose it is")
    return d


def frozen_with_a_room(start: Start, open_side: Open, prefiller_timeout_s: float) -> tuple[Child, Any]:
    """A frozen prefiller, and the receiver of a room that it has open."""
    p, d = start("prefill"), open_side("decode", options={"prefiller_timeout_s": prefiller_timeout_s})
    p.call("open", 6)
    ask(d.receiver(6))
    p.call("until", 6, WAITING)  # each knows the other
    p.call("open", 7)
    receiver = d.receiver(7)
    p.signal(signal.SIGSTOP)
    return p, receiver


def half_way(p: Child, d: Side) -> Any:
    """Two of four pages are sent."""
    p.call("open", 7)
    receiver = d.receiver(7)
    ask(receiver)
    p.call("until", 7, WAITING)
    p.call("init", 7, 4, 5)
    p.call("compute", "half", MINE, 5)
    p.call("send", 7, MINE[:2])
    return receiver


def overwritten(d: Side) -> None:
    for memory in d.planes:
        memory[THEIRS] = 1
    never(lambda: any((memory[THEIRS] != 1).any() for memory in d.planes), "something landed after Failed was said")
