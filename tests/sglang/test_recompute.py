"""Requests that SGLang has retracted: the prefill server computes their KV again, as with SGLang's other backends."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from crossrail.integrations.instance import sealed_line
from crossrail.integrations.sglang.bootstrap import token
from crossrail.integrations.sglang.recompute import _PURPOSE, PATH, OwnServer, _Wanted
from tests.sglang.conftest import Open
from tests.sglang.side import FAILED, MINE, SECRET, SUCCESS, THEIRS, WAITING, Side, failure, send, until
from tests.support.limits import WAIT_S, eventually, never
from tests.support.ports import free_port

conn = importlib.import_module("crossrail.integrations.sglang.conn")  # by conftest.py SGLang's names are there
REQUEST = {"input_ids": [1, 2, 3], "bootstrap_room": 1, "sampling_params": {"max_new_tokens": 1}}


class Requests(ThreadingHTTPServer):
    """Where a prefill server takes requests. asked: path, key and body of each; `answer` and `may_answer` are the
    tests'.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, str | None, Any]] = []
        self.answer = 200
        self.may_answer = threading.Event()
        self.port = int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    server: Requests

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, self.headers["Authorization"], json.loads(body)))
        self.server.may_answer.wait(WAIT_S)
        self.send_response(self.server.answer)
        self.end_headers()
        self.wfile.write(b"too long a prompt")

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def requests() -> Iterator[Requests]:
    server = Requests()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.may_answer.set()
    server.shutdown()
    thread.join(WAIT_S)
    server.server_close()


@pytest.fixture
def serving(serving: Any, requests: Requests) -> Any:
    serving.port, serving.api_key = requests.port, "of its clients"
    return serving


def recompute(d: Side, request: dict[str, Any] = REQUEST) -> Any:
    """SGLang asks behind send_metadata, in the scheduler's loop."""
    receiver = d.receiver(1)
    receiver.send_metadata(np.array(THEIRS, np.int32), 0)
    d.manager.submit_prefill_recompute(receiver, request)
    return receiver


def compute(p: Side, receiver: Any) -> None:
    """What the prefill server does with the request."""
    sender = p.sender(1)
    until(WAITING, sender)
    send(p, sender, "again", MINE, 0)
    until(SUCCESS, sender, receiver)


def test_the_prefill_server_is_asked_and_its_kv_comes(p: Side, d: Side, requests: Requests) -> None:
    """By its bootstrap server, which has its key."""
    receiver = recompute(d)
    eventually(lambda: requests.asked, "the prefill server is asked")
    assert requests.asked == [("/generate", "Bearer of its clients", REQUEST)]
    compute(p, receiver)
    d.assert_holds("again", THEIRS, 0)


def test_an_answer_that_comes_behind_the_kv_changes_nothing(p: Side, d: Side, requests: Requests) -> None:
    requests.answer = 500
    receiver = recompute(d)
    compute(p, receiver)
    requests.may_answer.set()
    never(lambda: receiver.poll() != SUCCESS, "it fails")


def test_a_prefill_server_that_refuses_fails_the_request(p: Side, d: Side, address: str, requests: Requests) -> None:
    requests.answer = 400
    requests.may_answer.set()
    receiver = recompute(d)
    until(FAILED, receiver)
    reason = failure(receiver).failure_reason
    assert f"its KV was not computed again: http://{address}/recompute answered 400: too long a prompt" in reason


def test_a_prefill_server_that_takes_no_requests_fails_the_request(
    p: Side, d: Side, server: Any, requests: Requests
) -> None:
    server._server._server = OwnServer(f"http://127.0.0.1:{free_port()}")
    receiver = recompute(d)
    until(FAILED, receiver)
    assert "/recompute answered 502: ClientConnectorError" in failure(receiver).failure_reason


def test_a_bootstrap_server_that_is_gone_fails_the_request(p: Side, d: Side, server: Any) -> None:
    receiver = d.receiver(1)
    server.close()
    d.manager.submit_prefill_recompute(receiver, REQUEST)
    until(FAILED, receiver)
    assert "its KV was not computed again: nobody listens at" in failure(receiver).failure_reason


@pytest.mark.parametrize("has", ["lora_id", "multimodal_inputs", "input_embeds", "positional_embed_overrides"])
def test_kv_that_depends_on_more_than_its_tokens_is_not_computed_without_it(
    p: Side, d: Side, requests: Requests, has: str
) -> None:
    """SGLang's request to the prefill server has the tokens alone: the KV would be of another request."""
    request = SimpleNamespace(**{has: "of the client"})
    receiver = recompute(d, conn.payload_of(lambda _: REQUEST, request))
    until(FAILED, receiver)
    assert "which SGLang does not send to the prefill server again" in failure(receiver).failure_reason
    assert not requests.asked
    assert conn.payload_of(lambda _: REQUEST, SimpleNamespace(**{has: None})) is REQUEST


async def test_strangers_have_nothing_computed(server: Any, address: str, requests: Requests) -> None:
    """Who does not know the secret, and who says again what another has said."""
    secret, url = SECRET.encode(), f"http://{address}{PATH}"
    known = {"Authorization": f"Bearer {token(secret)}"}
    line = sealed_line(msgspec.msgpack.encode(_Wanted(1, msgspec.json.encode(REQUEST))), secret, _PURPOSE)
    requests.may_answer.set()
    async with aiohttp.ClientSession() as session:
        for headers, body, status in (
            ({}, line, 401),
            (known, "x", 403),
            (known, sealed_line(b"x", secret, _PURPOSE), 403),
            (known, line, 200),
            (known, line, 403),
        ):
            async with session.post(url, data=body, headers=headers) as answer:
                assert answer.status == status
    assert len(requests.asked) == 1


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        ({"host": "0.0.0.0"}, "http://127.0.0.1:30000"),
        ({"host": "::", "ssl_certfile": "server.pem"}, "https://[::1]:30000"),
        ({"host": "10.0.0.1", "api_key": "k"}, "http://10.0.0.1:30000"),
    ],
)
def test_where_the_own_server_is_asked(monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], url: str) -> None:
    said = SimpleNamespace(**{"port": 30000, "ssl_certfile": None, "api_key": None} | flags)
    monkeypatch.setattr(conn, "get_serving", lambda: said)
    assert conn.own_server() == OwnServer(url, said.api_key)


def test_one_rank_asks_for_all(open_side: Open, p: Side, requests: Requests) -> None:
    ranks = [open_side("decode", rank=rank, tp=2) for rank in (1, 0)]
    for side in ranks:
        recompute(side)
    eventually(lambda: requests.asked, "the prefill server is asked")
    never(lambda: len(requests.asked) > 1, "it is asked again")
