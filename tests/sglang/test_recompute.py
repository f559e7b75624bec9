"""Requests that SGLang has retracted: the prefill server computes their KV anew, as with SGLang's other backends."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from tests.sglang.conftest import Open
from tests.sglang.side import FAILED, SUCCESS, WAITING, Side, failure, send, until
from tests.support.limits import WAIT_S, eventually, never
from tests.support.ports import free_port

MINE, THEIRS = [3, 7, 1, 12], [0, 9, 4, 2]
TLS_ALERT = 0  # for Requests.answer: as a server with TLS answers HTTP
REQUEST = {"input_ids": [1, 2, 3], "bootstrap_room": 1, "sampling_params": {"max_new_tokens": 1}}


class Requests(ThreadingHTTPServer):
    """Where a prefill server takes requests. asked: path and body of each; `answer` and `may_answer` are the tests'."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, Any]] = []
        self.answer = 200
        self.may_answer = threading.Event()
        self.port = int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    server: Requests

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, json.loads(body)))
        self.server.may_answer.wait(WAIT_S)
        if self.server.answer == TLS_ALERT:
            self.wfile.write(bytes([21, 3, 1, 0, 2, 2, 40]))  # handshake_failure, for what does not begin as TLS
            return
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


def recompute(d: Side) -> Any:
    """SGLang asks behind send_metadata, in the scheduler's loop."""
    receiver = d.receiver(1)
    receiver.send_metadata(np.array(THEIRS, np.int32), 0)
    d.manager.submit_prefill_recompute(receiver, REQUEST)
    return receiver


def test_the_prefill_server_is_asked_and_its_kv_comes(open_side: Open, d: Side, requests: Requests) -> None:
    p = open_side("prefill", http_port=requests.port)
    receiver = recompute(d)
    eventually(lambda: requests.asked, "the prefill server is asked")
    assert requests.asked == [("/generate", REQUEST)]

    sender = p.sender(1)
    until(WAITING, sender)
    send(p, sender, "anew", MINE, 0)
    until(SUCCESS, sender, receiver)
    d.assert_holds("anew", THEIRS, 0)


def test_an_answer_that_comes_behind_the_kv_changes_nothing(open_side: Open, d: Side, requests: Requests) -> None:
    p = open_side("prefill", http_port=requests.port)
    requests.answer = 500
    receiver = recompute(d)
    sender = p.sender(1)
    until(WAITING, sender)
    send(p, sender, "anew", MINE, 0)
    until(SUCCESS, sender, receiver)
    requests.may_answer.set()
    never(lambda: receiver.poll() != SUCCESS, "it fails")


def test_a_prefill_server_that_refuses_fails_the_request(open_side: Open, d: Side, requests: Requests) -> None:
    open_side("prefill", http_port=requests.port)
    requests.answer = 400
    requests.may_answer.set()
    receiver = recompute(d)
    until(FAILED, receiver)
    reason = failure(receiver).failure_reason
    assert f"http://127.0.0.1:{requests.port}/generate answered 400: too long a prompt" in reason


def test_a_prefill_server_that_wants_a_key_says_so(open_side: Open, d: Side, requests: Requests) -> None:
    open_side("prefill", http_port=requests.port)
    requests.answer = 401
    requests.may_answer.set()
    receiver = recompute(d)
    until(FAILED, receiver)
    assert "answered 401: too long a prompt; it was asked without a key" in failure(receiver).failure_reason


def test_a_prefill_server_with_tls_fails_the_request(open_side: Open, d: Side, requests: Requests) -> None:
    open_side("prefill", http_port=requests.port)
    requests.answer = TLS_ALERT
    requests.may_answer.set()
    receiver = recompute(d)
    until(FAILED, receiver)
    assert "has it TLS (--ssl-certfile)? Retracted requests need one without" in failure(receiver).failure_reason


def test_a_prefill_server_that_is_not_there_fails_the_request(open_side: Open, d: Side) -> None:
    port = free_port()
    open_side("prefill", http_port=port)
    receiver = recompute(d)
    until(FAILED, receiver)
    words = f"its KV was not computed anew: nobody listens at http://127.0.0.1:{port}/generate ("
    assert words in failure(receiver).failure_reason


def test_one_rank_asks_for_all(open_side: Open, requests: Requests) -> None:
    open_side("prefill", http_port=requests.port)
    ranks = [open_side("decode", rank=rank, tp=2) for rank in (1, 0)]
    for side in ranks:
        recompute(side)
    eventually(lambda: requests.asked, "the prefill server is asked")
    never(lambda: len(requests.asked) > 1, "it is asked again")
