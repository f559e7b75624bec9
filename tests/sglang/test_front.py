"""What a prefill server refuses before its ranks hear of it: its decoder hears it too, and does not wait in vain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from crossrail.errors import UsageError
from crossrail.integrations.sglang import bootstrap, front, halves, hooks
from crossrail.integrations.sglang.prefill import PrefillSide
from tests.sglang.conftest import Open
from tests.sglang.side import FAILED, SECRET, WAITING, Side, ask, failure, finish, until
from tests.support.limits import WAIT_S, eventually, never
from tests.support.ports import free_port


class Front:
    """As SGLang's TokenizerManager: it answers, and then raises. closed: its generators that have been closed."""

    def __init__(self, server: Any, *answers: Any) -> None:
        self.bootstrap_server = server
        self._answers = answers
        self.disaggregation_mode: Any = None
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
    finish(p, d, sender, receiver, "all the same")


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"top_logprobs_num": 129}, "top_logprobs_num=129 must be at most 128"),
        ({"top_logprobs_num": [5, None, 200]}, "top_logprobs_num=200"),
        ({"sampling_params": {"n": 2}}, "with n > 1, SGLang gives all samples of a request the same room"),
        ({"sampling_params": [{"n": 1}, {"n": 3}]}, "with n > 1"),
        ({"return_sampling_mask": True}, "return_sampling_mask needs SGLANG_ENABLE_DISAGG_SAMPLING_MASK=1"),
        ({"return_sampling_mask": [False, True]}, "return_sampling_mask needs"),
    ],
)
async def test_what_would_end_a_scheduler_never_reaches_it(server: Any, asked: dict[str, Any], why: str) -> None:
    one = Front(server, "token")
    request = SimpleNamespace(bootstrap_room=1, **asked)
    with pytest.raises(ValueError, match=why):
        async for _ in front.watched(Front.generate_request, one, request):
            pass
    assert not one.closed, "it has not begun"
    eventually(lambda: server._server._halves._latest, "the decoder hears it")


@pytest.mark.parametrize(
    ("request_has", "rooms"),
    [
        ({"bootstrap_room": 7}, [7]),
        ({"bootstrap_room": 7, "text": "a text", "input_ids": None}, [7]),
        ({"bootstrap_room": 7, "text": ["a", "b"]}, [7, 8]),
        ({"bootstrap_room": 7, "input_ids": [1, 2, 3]}, [7]),
        ({"bootstrap_room": 7, "input_ids": [[1], [2], [3]]}, [7, 8, 9]),
        ({"bootstrap_room": [7, None, 5], "text": ["a", "b", "c"]}, [7, 5]),
        ({"bootstrap_room": None}, []),
    ],
)
def test_the_rooms_of_a_batch(request_has: dict[str, Any], rooms: list[int]) -> None:
    assert front.rooms_of(SimpleNamespace(**request_has)) == rooms


@pytest.mark.parametrize("most", [None, 0, 128, [None, 128], []])
async def test_what_a_scheduler_has_room_for_passes(server: Any, most: Any) -> None:
    params = {"sampling_params": {"n": 1}, "bootstrap_room": 1}
    assert not front.unservable(SimpleNamespace(top_logprobs_num=most, return_sampling_mask=None, **params))


@pytest.mark.parametrize("room", [None, 0, -1, 1 << 63, "x", [None]])
async def test_what_is_no_room_is_nobodys(server: Any, room: Any) -> None:
    with pytest.raises(ValueError, match="malformed"):
        await answers(server, room, ValueError("malformed"))
    assert not server._server._halves._latest


async def test_what_ends_well_is_not_told(server: Any) -> None:
    good = [{"meta_info": {"finish_reason": reason}} for reason in (None, {"type": "length", "length": 1})]
    assert await answers(server, 1, *good, [good[0]]) == [*good, [good[0]]]
    assert not server._server._halves._latest


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


def test_refusals_are_sealed() -> None:
    told = [halves.refusal(7, "too long")]
    line = halves.to_line(told, b"ours")
    assert halves.from_line(line, b"ours") == told
    for wrong in (line, "OK", "", "é"):
        with pytest.raises(UsageError):
            halves.from_line(wrong, b"theirs")
    overdue = halves.Overdue([7], 30.0)
    assert halves.Overdue.from_line(overdue.to_line(b"ours"), b"ours") == overdue
    for wrong in (overdue.to_line(b"theirs"), halves.to_line(told, b"ours")):
        with pytest.raises(UsageError):
            halves.Overdue.from_line(wrong, b"ours")
        with pytest.raises(UsageError):
            halves.Held.from_line(wrong, b"ours")


def test_what_is_told_is_told_for_a_while() -> None:
    known = halves.Halves()
    known.add(halves.refusal(7, "too long"), 10.0)
    assert [refused.room for refused in known.recent(15.0, 6.0)] == [7]
    assert known.recent(17.0, 6.0) == []


def test_a_room_that_never_came_is_refused_once_for_all_ranks() -> None:
    known, overdue = halves.Halves(), halves.Overdue([7, 8], 30.0)
    known.look_for(overdue, 10.0, 6.0)
    assert not known.recent(10.0, 6.0), "nobody tells what comes"
    known.sees_all = True
    known.come(8)
    for now_s in (10.0, 11.0):
        known.look_for(overdue, now_s, 6.0)
    [refused] = known.recent(11.0, 6.0)
    assert refused.room == 7 and "which its decode server has had for over 30 s" in refused.why
    known.look_for(overdue, 17.0, 6.0)
    assert len(known.recent(17.0, 6.0)) == 1, "a rank that missed it asks again"


@pytest.mark.parametrize("has", ["been announced", "pages"])
def test_a_decoder_does_not_wait_for_a_half_that_never_comes(server: Any, open_side: Open, d: Side, has: str) -> None:
    server._server.watch()
    p, receiver = open_side("prefill", options={"other_half_s": 0.2}), d.receiver(1)
    if has == "pages":
        ask(receiver)
    until(FAILED, receiver)
    assert "the prefill server has not got its half of the request" in failure(receiver).failure_reason
    sender, again = p.sender(2), d.receiver(2)
    ask(again)
    finish(p, d, sender, again, "the next")


async def test_a_half_that_has_come_may_take_long(server: Any, open_side: Open, d: Side) -> None:
    """It waits in SGLang's front, which is paused or has to read a long text."""
    server._server.watch()
    p, receiver = open_side("prefill", options={"other_half_s": 0.2}), d.receiver(1)
    assert await answers(server, 1, "token") == ["token"]
    never(lambda: receiver.poll() == FAILED, "it fails")
    sender = p.sender(1)
    ask(receiver)
    until(WAITING, sender)


# --- the decode server's ---


async def refused_by_decoder(address: str, monkeypatch: pytest.MonkeyPatch, room: Any, *said: Any) -> None:
    """What a decode server's front does with a request."""
    one, of_room = decode_front(address, monkeypatch, *said)
    request = of_room(room)
    if isinstance(room, list):
        request.bootstrap_host = [request.bootstrap_host] * len(room)
    with contextlib.suppress(ValueError):
        async for _ in front.watched(Front.generate_request, one, request):
            pass
    while tasks := set(front._Decode._telling):
        await asyncio.wait(tasks)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_prefiller_hears_what_the_decode_servers_front_refused(
    server: Any, address: str, p: Side, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    senders = [p.sender(room) for room in (1, 2)] if when == "before" else []
    await refused_by_decoder(address, monkeypatch, [1, 2], ValueError("the queue is full"))
    eventually(lambda: len(p.manager.core.prefiller._refusals) == 2, "the rank has heard of it")
    senders = senders or [p.sender(room) for room in (1, 2)]
    until(FAILED, *senders)
    assert failure(senders[1]).failure_reason == "the decode server refused it: the queue is full"


async def test_a_decoder_that_has_the_room_knows_better(
    server: Any, address: str, p: Side, d: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = p.sender(1), d.receiver(1)
    eventually(lambda: p.manager.core.prefiller._awaited, "it is announced")
    await refused_by_decoder(address, monkeypatch, 1, ValueError("the client is gone"))
    eventually(lambda: p.manager.core.prefiller._refusals, "the rank has heard of it")
    ask(receiver)
    finish(p, d, sender, receiver, "all the same")


async def test_a_decode_server_tells_nobody_of_what_ends_well(
    server: Any, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await refused_by_decoder(address, monkeypatch, 1, {"meta_info": {"finish_reason": {"type": "stop"}}})
    await refused_by_decoder(address, monkeypatch, 0, ValueError("no room"))
    await refused_by_decoder(f"{front._NO_HOST}:1", monkeypatch, 1, ValueError("a health check"))
    assert not server._server._halves._latest


async def test_a_prefill_server_that_is_gone_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "crossrail.sglang")
    await refused_by_decoder(f"127.0.0.1:{free_port()}", monkeypatch, 1, ValueError("the queue is full"))
    assert "does not hear that it was refused: nobody listens" in caplog.text


def decode_front(address: str, monkeypatch: pytest.MonkeyPatch, *said: Any) -> tuple[Front, Callable[[int], Any]]:
    """A decode server's front, and a request of a room to it."""
    host, _, port = address.partition(":")
    disagg = SimpleNamespace(disaggregation_transfer_backend="crossrail", disaggregation_bootstrap_port=int(port))
    monkeypatch.setattr("sglang.srt.runtime_context.get_disagg", lambda: disagg)
    one = Front(None, *said)
    one.disaggregation_mode = SimpleNamespace(value="decode")
    return one, lambda room: SimpleNamespace(bootstrap_room=room, bootstrap_host=host, bootstrap_port=None)


async def test_a_prefiller_does_not_wait_for_a_half_that_no_decode_server_has(
    server: Any, open_side: Open, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = open_side("prefill", options={"other_half_s": 0.2})
    one, of_room = decode_front(address, monkeypatch, "token", "token")
    has, lost = p.sender(1), p.sender(2)
    under_way = front.watched(Front.generate_request, one, of_room(1))
    assert await anext(under_way) == "token"

    await ended(lost)
    assert "no decode server has the other half of the request" in failure(lost).failure_reason
    assert list(server._server._halves._held) == [1]

    await under_way.aclose()  # as its server's end does
    await ended(has)
    assert "no decode server has the other half of the request" in failure(has).failure_reason
    assert not any(front._Decode._held.values())


async def ended(sender: Any) -> None:
    async def look() -> None:
        while sender.poll() != FAILED:
            await asyncio.sleep(0.02)

    await asyncio.wait_for(look(), WAIT_S)


async def test_a_half_that_a_decoder_has_taken_in_may_take_long(
    server: Any, open_side: Open, d: Side, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for pages. Who told of it may be gone."""
    p = open_side("prefill", options={"other_half_s": 0.2})
    sender, receiver = p.sender(1), d.receiver(1)
    eventually(lambda: p.manager.core.prefiller._awaited, "it is announced")
    await bootstrap.tell_held(address, [3], SECRET.encode(), 5.0)
    never(lambda: sender.poll() == FAILED, "it fails")
    ask(receiver)
    finish(p, d, sender, receiver, "all the same")


async def test_a_request_that_no_client_waits_for_is_not_told(
    server: Any, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, of_room = decode_front(address, monkeypatch)
    await front.watched(Front.generate_request, one, of_room(1)).aclose()
    assert not front._Decode._held and not front._Decode._telling


def test_what_no_decode_server_has_is_refused_once_for_all_ranks() -> None:
    known, overdue = halves.Halves(), halves.Overdue([], 30.0, [7, 8])
    known.look_for(overdue, 10.0, 6.0)
    assert not known.recent(10.0, 6.0), "nobody tells what decode servers have"
    known.hold(halves.Held([8]), 20.0)
    known.look_for(overdue, 50.0, 6.0)
    assert not known.recent(50.0, 6.0), "another one may not have told yet"
    known.hold(halves.Held([8]), 50.0)
    for now_s in (50.5, 51.0):
        known.look_for(overdue, now_s, 6.0)
    [refused] = known.recent(51.0, 6.0)
    assert refused.room == 7 and refused.by_decoder and "for over 30 s" in refused.why
    known.look_for(overdue, 81.0, 6.0)
    assert [refused.room for refused in known.recent(81.0, 6.0)] == [7, 8], "its decode server tells nothing any more"


async def test_more_rooms_than_a_line_has_are_told(server: Any, address: str) -> None:
    rooms = [(1 << 63) - 1 - i for i in range(halves.HELD_MAX + 1)]
    await bootstrap.tell_held(address, rooms, SECRET.encode(), 5.0)
    assert sorted(server._server._halves._held) == sorted(rooms)
    with pytest.raises(bootstrap.NoInstance, match="403"):
        await bootstrap.tell_held(address, [1], b"another", 5.0)
    assert 1 not in server._server._halves._held


async def test_strangers_refuse_nothing(server: Any, address: str) -> None:
    with pytest.raises(bootstrap.NoInstance, match="403"):
        await bootstrap.tell_refused(address, 1, "no", b"another", 5.0)
    assert not server._server._halves._latest


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
