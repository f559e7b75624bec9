"""`crossrail kv` in processes of their own, and clients of theirs."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import numpy as np

from crossrail.cli.kv.common import open_model
from crossrail.kv.messages import Sampling
from crossrail.kv.model import generate
from crossrail.kv.toy import ToyTokenizer
from tests.support.limits import WAIT_S, eventually
from tests.support.process import REPOSITORY

SECRET = "of these tests"
PROMPT = "A process may die at any moment, and its peers had better know what to do. " * 12
OPTIONS = {"layers": "4", "pages": "256", "token_us": "300"}  # 900 tokens: a second
SAMPLING = Sampling(16, temperature=0.9, seed=11, ignore_end=True)


def model_options(**options: str) -> list[str]:
    """Command-line options: those common to all tests, with these replaced."""
    return [word for pair in (OPTIONS | options).items() for word in ("--model-option", "=".join(pair))]


class Services:
    """A router and nodes in processes. membership: in etcd; empty: in the router.

    prefiller_timeout_s: on a machine so slow that live prefillers are silent for longer, they are given up again and
    again. environments: variables, by name of the process.
    """

    def __init__(
        self, log: Path, transport: str = "auto", membership: str = "", prefiller_timeout_s: float = 1.5
    ) -> None:
        self._log_file = log
        self._log = log.open("wb")
        self._prefiller_timeout_s = prefiller_timeout_s
        self._transport = transport
        self._membership = membership
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.place = ""
        self.environments: dict[str, dict[str, str]] = {}

    def start(
        self, role: str, name: str, *arguments: str, secret: str = SECRET, stdout: int | IO[bytes] = subprocess.PIPE
    ) -> subprocess.Popen[bytes]:
        words = [role, "--name", name, "--transport", self._transport, "--until-stdin-closes", *arguments]
        words += ["--membership", self._membership] if self._membership else []
        command = [sys.executable, "-m", "crossrail", "kv", *words]
        process = self._processes[name] = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=self._log,
            cwd=REPOSITORY,
            env=os.environ | {"CROSSRAIL_SECRET": secret} | self.environments.get(name, {}),
        )
        return process

    def add_router(self, *more: str) -> None:
        """At the place of the one before, if there was one."""
        arguments = [
            "--listen",
            self.place or "127.0.0.1:0",
            "--heartbeat-s",
            "0.1",
            "--lease-s",
            str(2 * self._prefiller_timeout_s),
            *more,
        ]
        process = self.start("router", "router", *arguments)
        assert process.stdout is not None
        self.place = process.stdout.readline().decode().strip().rpartition("//")[2]

    def add(self, role: str, name: str, **options: str) -> subprocess.Popen[bytes]:
        words = model_options(**options)
        chunk = ["--chunk-tokens", "128"] if role == "prefiller" else []
        router = [] if self._membership else ["--router", f"http://{self.place}"]
        return self.start(
            role,
            name,
            "--probe-s",
            "0.3",
            "--prefiller-timeout-s",
            str(self._prefiller_timeout_s),
            *router,
            *chunk,
            *words,
        )

    def get(self, path: str) -> Any:
        with closing(http.client.HTTPConnection(self.place, timeout=WAIT_S)) as connection:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {node["node"]: node for node in self.get("/v1/nodes")["nodes"]}

    def joined(self, *names: str) -> None:
        eventually(lambda: set(self.nodes()) >= set(names), f"{names} joined", 3 * WAIT_S, 0.05)

    def signal(self, name: str, number: int) -> None:
        self._processes[name].send_signal(number)

    def wait(self, name: str) -> int:
        """Waits for the process to end; returns its exit status."""
        return self._processes[name].wait(WAIT_S)

    def desert(self, name: str) -> subprocess.Popen[bytes]:
        """Closes its standard input, as if its parent had died."""
        process = self._processes[name]
        assert process.stdin is not None
        process.stdin.close()
        return process

    def restore(self, nodes: Mapping[str, str]) -> None:
        """Whatever became of them before: the router and these nodes, by name their roles, run and have joined."""
        for name, process in list(self._processes.items()):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
            else:
                self.kill(name)
        if "router" not in self._processes:
            self.add_router()
        for name, role in nodes.items():
            if name not in self._processes:
                self.add(role, name)
        self.joined(*nodes)

    def complaints(self) -> str:
        """Everything that they have written to stderr."""
        return self._log_file.read_text()

    def kill(self, name: str) -> None:
        """At once; also one that is stopped, or has ended."""
        process = self._processes.pop(name)
        process.kill()
        process.wait(WAIT_S)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def close(self) -> None:
        for name in list(self._processes):
            self.kill(name)
        self._log.close()


async def monolithic(sampling: Sampling = SAMPLING) -> list[int]:
    model = open_model("toy", OPTIONS | {"token_us": "0"})
    layout = model.layout
    cache = [[layout.layer_view(np.zeros(layout.layer_bytes, np.uint8)) for _ in range(layout.layers)]]
    prompt = ToyTokenizer().encode(PROMPT)
    return [token async for token in generate(model, cache, prompt, np.arange(layout.pages), sampling)]


def all_pages_free(services: Services, *names: str) -> bool:
    nodes = services.nodes()
    return all(nodes[name]["pages_free"] == nodes[name]["pages_total"] for name in names)


def busy_prefiller(services: Services) -> str:
    """A prefiller that works on a prompt."""
    found: list[str] = []

    def busy() -> bool:
        nodes = services.nodes().values()
        found.extend(node["node"] for node in nodes if node["role"] == "prefiller" and node["queued_tokens"])
        return bool(found)

    eventually(busy, "a prefiller works on the prompt", pause_s=0.02)
    return found[0]


async def killed_prefiller_costs_time_and_nothing_else(services: Services) -> None:
    """With prefillers p0 and p1 and a decoder d0, in the middle of a request."""
    asking = Asking(services)
    killed = busy_prefiller(services)
    services.signal(killed, signal.SIGKILL)
    assert asking.result() == await monolithic()
    left = "p1" if killed == "p0" else "p0"
    eventually(lambda: set(services.nodes()) == {left, "d0"}, "the killed one is no member", pause_s=0.05)
    eventually(lambda: all_pages_free(services, left, "d0"), "all pages are free", pause_s=0.05)
    assert Asking(services).result() == await monolithic()


class Asking(threading.Thread):
    """A client with a streaming request in progress.

    trouble: why it was cut off or refused. error: an error that the router sent in the stream.
    """

    def __init__(self, services: Services, sampling: Sampling = SAMPLING, request: str = "") -> None:
        super().__init__(daemon=True)
        self._place = services.place
        self._sampling = sampling
        self._request = request
        self.tokens: list[int] = []
        self.trouble = self.error = ""
        self.start()

    def run(self) -> None:
        sampling = self._sampling
        body = {
            "prompt": PROMPT, "max_tokens": sampling.max_tokens, "temperature": sampling.temperature,
            "seed": sampling.seed, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        headers = {"X-Request-Id": self._request} if self._request else {}
        try:
            with closing(http.client.HTTPConnection(self._place, timeout=2 * WAIT_S)) as connection:
                connection.request("POST", "/v1/completions", json.dumps(body), headers)
                response = connection.getresponse()
                if response.status != 200:
                    self.trouble = f"{response.status} {response.read().decode()}"
                    return
                self.trouble = "the stream was cut off"
                for line in response:
                    self._take(line)
        except (OSError, http.client.HTTPException) as error:
            self.trouble = f"{type(error).__name__} {error}"

    def result(self) -> list[int]:
        self.join(2 * WAIT_S)
        assert not self.is_alive() and not self.trouble and not self.error, self.error or self.trouble or "no end"
        return self.tokens

    def _take(self, line: bytes) -> None:
        if line == b"data: [DONE]\n":
            self.trouble = ""
        if line.startswith(b"data: {"):
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                self.error = event["error"]["message"]
            else:
                self.tokens += event["choices"][0]["token_ids"]
