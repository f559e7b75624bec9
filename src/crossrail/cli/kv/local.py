"""Services as processes of this host, and a client of their router: for the demo and the benchmarks."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from crossrail._options import SECRET_VARIABLE
from crossrail.errors import CrossrailError
from crossrail.kv.messages import Sampling, Span

_START_TIMEOUT_S = 120.0  # several processes load a model at once
_ANSWER_TIMEOUT_S = 300.0
_EXIT_GRACE_S = 5.0
_LOOK_S = 0.02


class Processes:
    """The services, by name. They end when their standard input does, so none outlives this process."""

    def __init__(self, secret: str) -> None:
        self._environment = os.environ | {SECRET_VARIABLE: secret}
        self._by_name: dict[str, subprocess.Popen[bytes]] = {}
        self._killed: set[str] = set()

    def start(self, name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "crossrail", "kv", *arguments, "--name", name, "--until-stdin-closes"]
        self._by_name[name] = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,  # Ctrl-C goes to us alone; they end by their standard input
        )

    def first_line(self, name: str) -> str:
        """The first line that a service prints when it is ready."""
        stdout = self._by_name[name].stdout
        assert stdout is not None
        if not select.select([stdout], [], [], _START_TIMEOUT_S)[0]:
            raise CrossrailError(f"{name} said nothing within {_START_TIMEOUT_S:g} s")
        line = stdout.readline().decode().strip()
        if not line:
            raise CrossrailError(f"{name} ended at once, with exit code {self._by_name[name].wait(_EXIT_GRACE_S)}")
        return line

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """CrossrailError when it takes too long, or one of them ends meanwhile that was not killed here."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                raise CrossrailError(f"not within {_START_TIMEOUT_S:g} s: {what}")
            self.look(what)

    def look(self, what: str) -> None:
        """Waits a little. CrossrailError when one of them has ended that was not killed here, before `what`."""
        for name, process in self._by_name.items():
            if name not in self._killed and process.poll() is not None:
                raise CrossrailError(f"{name} ended with exit code {process.returncode} before {what}")
        time.sleep(_LOOK_S)

    def pid(self, name: str) -> int:
        return self._by_name[name].pid

    def kill(self, name: str) -> None:
        self._killed.add(name)
        self._by_name[name].kill()

    def close(self) -> None:
        """Nodes first, so that they can say goodbye to the router."""
        for process in reversed(self._by_name.values()):
            if process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(_EXIT_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


class Client:
    """A client of one router's HTTP front."""

    def __init__(self, url: str) -> None:
        self._place = url.removeprefix("http://")

    def get(self, path: str) -> bytes:
        with contextlib.closing(http.client.HTTPConnection(self._place, timeout=_ANSWER_TIMEOUT_S)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
            if response.status >= 400:
                raise CrossrailError(f"{path}: {response.status} {body.decode(errors='replace').strip()}")
            return body

    def nodes(self) -> list[dict[str, Any]]:
        nodes: list[dict[str, Any]] = json.loads(self.get("/v1/nodes"))["nodes"]
        return nodes

    def timeline(self, request: str) -> list[Span]:
        """The timeline of a request that has ended."""
        return msgspec.convert(json.loads(self.get(f"/v1/requests/{request}"))["end"]["timeline"], list[Span])

    def complete(self, prompt: str | list[int], sampling: Sampling) -> Iterator[dict[str, Any]]:
        """Events of a streamed completion. CrossrailError for what went wrong, also in the middle."""
        body = {
            "prompt": prompt, "max_tokens": sampling.max_tokens, "temperature": sampling.temperature,
            "top_p": sampling.top_p, "seed": sampling.seed, "stream": True, "ignore_eos": sampling.ignore_end,
        }  # fmt: skip
        with contextlib.closing(http.client.HTTPConnection(self._place, timeout=_ANSWER_TIMEOUT_S)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body))
            response = connection.getresponse()
            if response.status != 200:
                raise CrossrailError(f"{response.status} {response.read().decode(errors='replace')}")
            for line in response:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise CrossrailError(event["error"]["message"])
                yield event
