"""What a prefill server refuses before its ranks hear of it: its decoder hears it too, and does not wait in vain."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from crossrail.integrations.sglang import bootstrap, front, hooks
from crossrail.integrations.sglang.prefill import PrefillSide
from tests.sglang.side import FAILED, SUCCESS, WAITING, Side, failure, send, until
from tests.support.limits import eventually

MINE, THEIRS = [3, 7, 1, 12], [0, 9, 4, 2]


class Front:
    """As SGLang's TokenizerManager: it answers, and then raises. closed: its generators that have been closed."""

    def __init__(self, server: Any, *answers: Any) -> None:
        self.bootstrap_server = server
        self._answers = answers
        self.closed = 0

    async def generate_request(self, request: Any, _: Any = None) -> AsyncIterator[Any]:
        try:
            for answer in self._answers:
                if isinstance(answer, Exception):
                    raise answer
                yield answer
        finally:
            self.closed += 1


async def answers(server: Any, room: Any, *said: Any) -> list[Any]:
    """What the client gets, through the hook."""
    request = SimpleNamespace(bootstrap_room=room)
    return [one async for one in front.watched(Front.generate_request, Front(server, *said), request, None)]


def ask(receiver: Any) -> None:
    receiver.send_metadata(np.array(THEIRS, np.int32), 0)


@pytest.mark.parametrize("when", ["before it asks", "after it has asked"])
async def test_a_decoder_hears_what_the_front_refused(server: Any, p: Side, d: Side, when: str) -> None:
    receiver = d.receiver(1)
    if when == "after it has asked":
        ask(receiver)
        eventually(lambda: p.manager.core.prefiller._early, "it has asked")
    with pytest.raises(ValueError, match="too long"):
        await answers(server, 1, ValueError("too long"))
    prefiller = p.manager.core.prefiller
    eventually(lambda: prefiller._refusals, "the rank has heard of it")
    if when == "before it asks":
        ask(receiver)
    until(FAILED, receiver)
    assert "the prefill server refused it: too long" in failure(receiver).failure_reason


async def test_a_decoder_that_comes_later_hears_it_too(server: Any, p: Side, d: Side) -> None:
    prefiller: PrefillSide = p.manager.core.prefiller
    ended = {"meta_info": {"finish_reason": {"type": "abort", "message": "the queue is full"}}}
    assert await answers(server, [1, 2], ended) == [ended]
    eventually(lambda: len(prefiller._refusals) == 2, "the rank has heard of it")
    receivers = [d.receiver(room) for room in (1, 2)]
    until(FAILED, *receivers)
    for receiver in receivers:
        assert "refuses: the prefill server refused it: the queue is full" in failure(receiver).failure_reason


async def test_a_rank_that_has_the_room_knows_better(server: Any, p: Side, d: Side) -> None:
    """It failed for its client alone, or another request of that number has come since."""
    sender, receiver = p.sender(1), d.receiver(1)
    with pytest.raises(ValueError, match="gone"):
        await answers(server, 1, ValueError("the client is gone"))
    eventually(lambda: p.manager.core.prefiller._refusals, "the rank has heard of it")
    ask(receiver)
    until(WAITING, sender)
    send(p, sender, "all the same", MINE, 0)
    until(SUCCESS, sender, receiver)
    d.assert_holds("all the same", THEIRS, 0)


@pytest.mark.parametrize("room", [None, 0, -1, 1 << 63, "x", [None]])
async def test_what_is_no_room_is_nobodys(server: Any, room: Any) -> None:
    with pytest.raises(ValueError, match="malformed"):
        await answers(server, room, ValueError("malformed"))
    assert not server._server._refusals._latest


async def test_what_ends_well_is_not_told(server: Any) -> None:
    good = [{"meta_info": {"finish_reason": reason}} for reason in (None, {"type": "length", "length": 1})]
    assert await answers(server, 1, *good, [good[0]]) == [*good, [good[0]]]
    assert not server._server._refusals._latest


async def test_a_front_of_another_backend_is_left_alone() -> None:
    for other in (None, SimpleNamespace()):
        watched = front.watched(Front.generate_request, Front(other), None)
        assert watched.__qualname__ == "Front.generate_request"
        await watched.aclose()


async def test_a_client_that_hangs_up_closes_the_request_at_once(server: Any) -> None:
    watched_front = Front(server, "token", "token")
    generator = front.watched(Front.generate_request, watched_front, SimpleNamespace(bootstrap_room=1))
    assert await anext(generator) == "token"
    await generator.aclose()
    assert watched_front.closed == 1


def test_refusals_are_sealed_and_told_for_a_while() -> None:
    refusals = bootstrap.Refusals(b"ours")
    refusals.add(7, "too long", 10.0)
    [refused] = bootstrap.refusals_of(refusals.to_line(15.0, 6.0), b"ours")
    assert (refused.room, refused.why) == (7, "too long")
    assert bootstrap.refusals_of(refusals.to_line(17.0, 6.0), b"ours") == []
    for line in (refusals.to_line(15.0, 6.0), "OK", "", "é"):
        with pytest.raises(bootstrap.NoInstance, match="something else than crossrail's"):
            bootstrap.refusals_of(line, b"theirs")


def test_the_front_is_hooked_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(hooks, "_hooked", set())
    targets: list[str] = []
    monkeypatch.setattr(HookRegistry, "register", lambda target, *_: targets.append(target))
    monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: None)
    monkeypatch.delitem(sys.modules, front.MODULE, raising=False)
    assert not front.hook_front()
    monkeypatch.setitem(sys.modules, front.MODULE, ModuleType(front.MODULE))
    assert front.hook_front() and front.hook_front()
    assert targets == [f"{front.MODULE}.TokenizerManager.generate_request"]
