"""`crossrail kv`, as an operator runs it: processes of their own, killed and stopped in the middle."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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


class Services:
    """A router and nodes in processes."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("wb")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.place = ""

    def start(self, role: str, name: str, *arguments: str, secret: str = SECRET) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "crossrail", "kv", role, "--name", name, "--until-stdin-closes", *arguments]
        process = self._processes[name] = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=REPOSITORY,
            env=os.environ | {"CROSSRAIL_SECRET": secret},
        )
        return process

    def add_router(self) -> None:
        arguments = ["--listen", "127.0.0.1:0", "--heartbeat-s", "0.1", "--lease-s", "3"]
        process = self.start("router", "router", *arguments)
        assert process.stdout is not None
        self.place = process.stdout.readline().decode().strip().rpartition("//")[2]

    def add(self, role: str, name: str, **options: str) -> subprocess.Popen[bytes]:
        words = [word for pair in (OPTIONS | options).items() for word in ("--model-option", "=".join(pair))]
        chunk = ["--chunk-tokens", "128"] if role == "prefiller" else []
        return self.start(
            role, name, "--router", f"http://{self.place}", "--probe-s", "0.3", "--silent-s", "1.5", *chunk, *words
        )

    def get(self, path: str) -> Any:
        with closing(http.client.HTTPConnection(self.place, timeout=WAIT_S)) as connection:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {node["node"]: node for node in self.get("/v1/nodes")["nodes"]}

    def joined(self, *names: str) -> None:
        eventually(lambda: set(self.nodes()) >= set(names), f"{names} joined", 2 * WAIT_S, 0.05)

    def signal(self, name: str, number: int) -> None:
        self._processes[name].send_signal(number)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait(WAIT_S)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        self._log.close()


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    made = Services(tmp_path / "stderr")
    try:
        made.add_router()
        yield made
    finally:
        made.close()
    complaints = (tmp_path / "stderr").read_text()
    assert "Traceback" not in complaints and "leaked" not in complaints, complaints


class Asking(threading.Thread):
    """A client with a request under way."""

    def __init__(self, services: Services) -> None:
        super().__init__(daemon=True)
        self._place = services.place
        self.status = 0
        self.answer: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0.9, "seed": 11, "ignore_eos": True}
        with closing(http.client.HTTPConnection(self._place, timeout=2 * WAIT_S)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body))
            response = connection.getresponse()
            self.status, self.answer = response.status, json.loads(response.read())

    def tokens(self) -> list[int]:
        self.join(2 * WAIT_S)
        assert self.status == 200, (self.status, self.answer)
        tokens: list[int] = self.answer["choices"][0]["token_ids"]
        return tokens


async def monolithic() -> list[int]:
    model = open_model("toy", OPTIONS | {"token_us": "0"})
    layout = model.layout
    cache = [[layout.layer_view(np.zeros(layout.layer_bytes, np.uint8)) for _ in range(layout.layers)]]
    prompt = ToyTokenizer().encode(PROMPT)
    return [token async for token in generate(model, cache, prompt, np.arange(layout.pages), SAMPLING)]


def busy_prefiller(services: Services) -> str:
    def busy() -> list[str]:
        nodes = services.nodes().values()
        return [node["node"] for node in nodes if node["role"] == "prefiller" and node["queued_tokens"]]

    eventually(busy, "a prefiller works on the prompt", pause_s=0.02)
    return busy()[0]


def all_pages_free(services: Services, *names: str) -> bool:
    nodes = services.nodes()
    return all(nodes[name]["pages_free"] == nodes[name]["pages_total"] for name in names)


async def test_killed_prefiller_costs_time_and_nothing_else(services: Services) -> None:
    for role, name in (("prefiller", "p0"), ("prefiller", "p1"), ("decoder", "d0")):
        services.add(role, name)
    services.joined("p0", "p1", "d0")
    asking = Asking(services)
    killed = busy_prefiller(services)
    services.signal(killed, signal.SIGKILL)
    assert asking.tokens() == await monolithic()
    left = "p1" if killed == "p0" else "p0"
    eventually(lambda: set(services.nodes()) == {left, "d0"}, "the killed one is no member", pause_s=0.05)
    eventually(lambda: all_pages_free(services, left, "d0"), "all pages are free", pause_s=0.05)
    assert Asking(services).tokens() == await monolithic()


async def test_stopped_prefiller_is_passed_over_and_harmless_when_it_goes_on(services: Services) -> None:
    for role, name in (("prefiller", "p0"), ("prefiller", "p1"), ("decoder", "d0")):
        services.add(role, name)
    services.joined("p0", "p1", "d0")
    asking = Asking(services)
    stopped = busy_prefiller(services)
    services.signal(stopped, signal.SIGSTOP)
    assert asking.tokens() == await monolithic()
    services.signal(stopped, signal.SIGCONT)
    services.joined("p0", "p1")
    eventually(lambda: all_pages_free(services, "p0", "p1", "d0"), "all pages are free", pause_s=0.05)
    assert Asking(services).tokens() == await monolithic()


def test_killed_decoder_ends_its_request_in_words(services: Services) -> None:
    for role, name in (("prefiller", "p0"), ("decoder", "d0")):
        services.add(role, name)
    services.joined("p0", "d0")
    asking = Asking(services)
    busy_prefiller(services)
    services.signal("d0", signal.SIGKILL)
    asking.join(2 * WAIT_S)
    assert asking.status == 502
    assert "its decoder is gone: node 'd0' died or closed" in asking.answer["error"]["message"]
    eventually(lambda: all_pages_free(services, "p0"), "the prefiller's pages are free", pause_s=0.05)


async def test_terminated_node_finishes_what_it_has_and_leaves(services: Services) -> None:
    prefiller = services.add("prefiller", "p0")
    decoder = services.add("decoder", "d0")
    services.joined("p0", "d0")
    asking = Asking(services)
    busy_prefiller(services)
    services.signal("d0", signal.SIGTERM)
    assert asking.tokens() == await monolithic()
    services.signal("p0", signal.SIGTERM)
    assert (decoder.wait(WAIT_S), prefiller.wait(WAIT_S)) == (0, 0)
    assert services.nodes() == {}


def test_node_that_does_not_fit_says_why_and_ends(services: Services, tmp_path: Path) -> None:
    services.add("prefiller", "p0")
    services.joined("p0")
    odd = services.add("decoder", "d0", dtype="float32")
    assert odd.wait(WAIT_S) == 1
    words = (tmp_path / "stderr").read_text()
    assert re.search(r"dtype: ours float32, theirs float16", words), words


def test_demo_shows_equal_tokens(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "crossrail", "kv", "demo", "--kill", "--prompt-tokens", "700", "--out", "made"]
    run = subprocess.run(
        [*command, "--token-us", "150"], capture_output=True, text=True, timeout=50, cwd=tmp_path, env=os.environ
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "ok: 48 tokens, equal to those of one node alone" in run.stdout
    assert "killed prefiller-" in run.stdout
    assert "another prefiller" in (tmp_path / "made" / "timeline.svg").read_text()
    assert json.loads((tmp_path / "made" / "timeline.json").read_text())["traceEvents"]


def test_service_without_a_secret_is_refused(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "CROSSRAIL_SECRET"}
    command = [sys.executable, "-m", "crossrail", "kv", "router"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, cwd=tmp_path, env=environment)
    assert run.returncode == 2 and "a secret that all nodes share is needed" in run.stderr


def test_package_alone_imports_none_of_it() -> None:
    source = (
        "import sys, crossrail; print([n for n in ('msgspec', 'aiohttp', 'prometheus_client') if n in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=WAIT_S)
    assert run.stdout == "[]\n", run.stdout + run.stderr
