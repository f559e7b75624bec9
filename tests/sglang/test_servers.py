"""Two true servers, with SGLang's own schedulers and a model, against one that does both: same tokens; and failures."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.sglang.servers import Asked, Server
from tests.support.limits import eventually
from tests.support.ports import free_port
from tests.support.tiny_llama import make_model, prompt

_rooms = count(1000)
TOO_LONG = "The input (1100 tokens) is longer than the model's context length"


class Fleet(NamedTuple):
    folder: Path
    model: Path
    bootstrap_port: int
    alone: Server
    p: Server
    d: Server

    def room(self) -> dict[str, Any]:
        """What SGLang's router adds to both halves of a request."""
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": next(_rooms),
        }


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("sglang")
    model, port = make_model(folder / "model"), free_port()
    servers = {
        mode: Server(folder, model, mode or "alone", mode, port, is_guarded=mode == "prefill")
        for mode in (None, "prefill", "decode")
    }
    try:
        for server in servers.values():
            server.wait_ready()
        yield Fleet(folder, model, port, servers[None], servers["prefill"], servers["decode"])
    finally:
        for server in servers.values():
            server.kill()


def halves(fleet: Fleet, tokens: list[int]) -> tuple[Asked, Asked]:
    """As SGLang's router does: the request goes to both at once, and the decode server's answer is the one."""
    room = fleet.room()
    return Asked(fleet.p, tokens, **room), Asked(fleet.d, tokens, **room)


def expect(fleet: Fleet, seed: int, length: int = 50) -> None:
    """A hand-over that works, now."""
    tokens = prompt(seed, length)
    assert [half.result() for half in halves(fleet, tokens)][1] == fleet.alone.ask(tokens)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 63, 64, 65, 300])
def test_the_same_tokens(fleet: Fleet, length: int) -> None:
    """Shorter than a page, whole pages, one more; one chunk of prefill and several."""
    expect(fleet, length, length)


def test_the_same_tokens_of_many_at_once(fleet: Fleet) -> None:
    prompts = [prompt(400 + i, 1 + 13 * i) for i in range(16)]
    under_way = [halves(fleet, tokens) for tokens in prompts]
    for tokens, (_, decoded) in zip(prompts, under_way, strict=True):
        assert decoded.result() == fleet.alone.ask(tokens), len(tokens)


def test_the_same_tokens_from_ranks_to_one(fleet: Fleet) -> None:
    """A prefill server of TP 2: each rank has one of the two heads."""
    port = free_port()
    wide = Server(fleet.folder, fleet.model, "wide", "prefill", port, tp=2)
    try:
        wide.wait_ready()
        for length in (5, 130):
            tokens, room = prompt(700 + length, length), fleet.room() | {"bootstrap_port": port}
            asked = [Asked(server, tokens, **room) for server in (wide, fleet.d)]
            assert [one.result() for one in asked][1] == fleet.alone.ask(tokens)
    finally:
        wide.kill()


def test_aborted_at_the_decoder(fleet: Fleet) -> None:
    """It waits for what nobody prefills."""
    waiting = Asked(fleet.d, prompt(500, 50), rid="unwanted", **fleet.room())
    eventually(lambda: _aborted(fleet.d, waiting, "unwanted"), "it ends", timeout_s=60.0, pause_s=0.5)
    assert "aborted at the decoder" in waiting.result()
    expect(fleet, 501)


def test_aborted_at_the_prefiller(fleet: Fleet) -> None:
    waiting = Asked(fleet.p, prompt(510, 50), rid="undecoded", **fleet.room())
    eventually(lambda: _aborted(fleet.p, waiting, "undecoded"), "it ends", timeout_s=60.0, pause_s=0.5)
    assert "aborted at the prefiller" in waiting.result()
    expect(fleet, 511)


def test_what_the_prefill_server_alone_refuses_ends_at_the_decode_server_too(fleet: Fleet) -> None:
    where = fleet.room()
    waiting = Asked(fleet.d, prompt(515, 50), **where)
    assert TOO_LONG in fleet.p.ask(prompt(516, 1100), **where)
    assert f"the prefill server refused it: {TOO_LONG}" in waiting.result()
    expect(fleet, 517)


def test_what_the_decode_server_alone_refuses_ends_at_the_prefill_server_too(fleet: Fleet) -> None:
    where = fleet.room()
    waiting = Asked(fleet.p, prompt(518, 50), **where)
    assert TOO_LONG in fleet.d.ask(prompt(519, 1100), **where)
    assert f"the decode server refused it: {TOO_LONG}" in waiting.result()


def test_more_top_logprobs_than_sglang_hands_over_end_no_server(fleet: Fleet) -> None:
    """Its prefill scheduler would end at them."""
    where = fleet.room()
    asked = [
        Asked(one, prompt(515, 50), return_logprob=True, top_logprobs_num=129, **where) for one in (fleet.p, fleet.d)
    ]
    for half in asked:
        assert "top_logprobs_num=129 must be at most 128" in half.result()
    expect(fleet, 516)


def test_a_half_that_never_comes_to_the_prefill_server_is_not_waited_for(fleet: Fleet) -> None:
    assert "the prefill server has not got its half of the request" in fleet.d.ask(prompt(518, 50), **fleet.room())
    expect(fleet, 519)


def test_a_half_that_never_comes_to_a_decode_server_is_not_waited_for(fleet: Fleet) -> None:
    expect(fleet, 550)  # since then the prefill server knows that there is one, which tells what it has
    assert "no decode server has the other half of the request" in fleet.p.ask(prompt(551, 50), **fleet.room())
    expect(fleet, 552)


def test_halves_of_two_requests_in_one_room_fail(fleet: Fleet) -> None:
    """Both as long: nothing but their tokens tells them apart."""
    where = fleet.room()
    asked = [Asked(one, prompt(seed, 50), **where) for one, seed in ((fleet.p, 524), (fleet.d, 525))]
    for half in asked:
        assert "the decoder's prompt has other tokens than the one prefilled here" in half.result()
    expect(fleet, 526)


def _aborted(server: Server, request: Asked, rid: str) -> bool:
    server.post("abort_request", {"rid": rid})  # what is not there yet is not aborted: again
    return not request.is_alive()


def test_a_request_that_sglang_retracts_goes_on_with_kv_that_is_computed_again(fleet: Fleet) -> None:
    """By a prefill server with TLS and a key, which the decode server does not have."""
    tokens, sampling = prompt(520, 50), {"temperature": 0, "max_new_tokens": 900, "ignore_eos": True}
    whole = fleet.alone.ask(tokens, sampling_params=sampling)
    room, prefilled = fleet.room(), _prefilled(fleet)
    Asked(fleet.p, tokens, **room)
    running = Asked(fleet.d, tokens, sampling_params=sampling, **room)
    eventually(lambda: _retracted(fleet, running, prefilled + 2), "it is retracted", timeout_s=60.0, pause_s=0.1)
    assert running.result() == whole
    expect(fleet, 521)


def _retracted(fleet: Fleet, request: Asked, prefilled: int) -> bool:
    """Whether the prefill server has computed so many prompts."""
    assert request.is_alive() or _prefilled(fleet) >= prefilled, "it ended before it was retracted"
    fleet.d.post("pause_generation", {"mode": "retract"})  # what does not run yet is not retracted: again
    fleet.d.post("continue_generation", {})
    return _prefilled(fleet) >= prefilled


def _prefilled(fleet: Fleet) -> int:
    return fleet.p.text().count('"POST /generate HTTP/1.1" 200')


def test_memory_that_is_released_and_resumed(fleet: Fleet) -> None:
    for server in (fleet.p, fleet.d):
        for path in ("release_memory_occupation", "resume_memory_occupation"):
            assert server.post(path, {"tags": ["kv_cache"]})[0] == 200, server.text()[-3000:]
    eventually(lambda: _hands_over(fleet), "they find each other again", timeout_s=60.0, pause_s=0.5)
    expect(fleet, 531)


def _hands_over(fleet: Fleet) -> bool:
    return isinstance([half.result() for half in halves(fleet, prompt(530, 50))][1], list)


@pytest.mark.parametrize("room", [0, -1, 1 << 63])
def test_a_room_that_sglang_cannot_write_down_ends_no_server(fleet: Fleet, room: int) -> None:
    where = fleet.room() | {"bootstrap_room": room}
    for half in [Asked(server, prompt(540, 50), **where) for server in (fleet.p, fleet.d)]:
        assert f"bootstrap_room={room} must be in" in half.result()
    expect(fleet, 541)


def test_a_prefill_server_that_is_killed_and_others_in_its_place(fleet: Fleet) -> None:
    """One with another secret, none at all: who asks reads what is wrong, and the decode server goes on."""
    port, tokens = free_port(), prompt(600, 100)

    def room() -> dict[str, Any]:
        return fleet.room() | {"bootstrap_port": port}

    doomed = Server(fleet.folder, fleet.model, "doomed", "prefill", port)
    stranger = None
    try:
        where = room()
        asked = [Asked(server, tokens, **where) for server in (doomed.wait_ready(), fleet.d)]
        assert [one.result() for one in asked][1] == fleet.alone.ask(tokens)

        waiting = Asked(fleet.d, tokens, **room())
        doomed.kill()
        assert "exception room" in waiting.result()
        assert f"nobody listens at 127.0.0.1:{port}" in fleet.d.ask(tokens, **room())

        stranger = Server(fleet.folder, fleet.model, "stranger", "prefill", port, secret="another").wait_ready()
        assert "set the same CROSSRAIL_SECRET" in fleet.d.ask(tokens, **room())
    finally:
        for server in (doomed, stranger):
            if server is not None:
                server.kill()
    expect(fleet, 601)
