"""`crossrail kv demo`: a router, prefillers and a decoder in processes of their own, a prompt, and the proof.

This process only starts them and speaks HTTP, as any client does. Then it runs the same prompt through the same model
by itself, with nothing moved anywhere, and compares the tokens. With --kill the prefiller that works on the prompt is
killed in the middle: the tokens must be the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from crossrail.cli.kv.common import open_model
from crossrail.engine import SECRET_VARIABLE
from crossrail.errors import CrossrailError
from crossrail.kv.messages import Sampling
from crossrail.kv.model import generate
from crossrail.kv.toy import ToyTokenizer

_START_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 120.0
_EXIT_GRACE_S = 5.0
_LOOK_S = 0.02
_CHUNK_TOKENS = 256
_TEXT = "The quick brown fox jumps over the lazy dog. "


@dataclass(frozen=True)
class _Plan:
    prompt: str
    prefillers: int
    decoders: int
    sampling: Sampling
    model_options: dict[str, str]
    transport: str


class _Processes:
    """The services, by name. They end when their standard input does, so none outlives this process."""

    def __init__(self, secret: str) -> None:
        self._environment = os.environ | {SECRET_VARIABLE: secret}
        self._by_name: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "crossrail", "kv", *arguments, "--name", name, "--until-stdin-closes"]
        self._by_name[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._environment
        )

    def first_line(self, name: str) -> str:
        """What a service says once it is there."""
        stdout = self._by_name[name].stdout
        assert stdout is not None
        if not select.select([stdout], [], [], _START_TIMEOUT_S)[0]:
            raise CrossrailError(f"{name} said nothing within {_START_TIMEOUT_S:g} s")
        line = stdout.readline().decode().strip()
        if not line:
            raise CrossrailError(f"{name} ended at once, with exit code {self._by_name[name].wait(_EXIT_GRACE_S)}")
        return line

    def pid(self, name: str) -> int:
        return self._by_name[name].pid

    def kill(self, name: str) -> None:
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


class _Client:
    """One router's HTTP front."""

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

    def complete(self, plan: _Plan) -> Iterator[dict[str, Any]]:
        """Events of a streamed completion. CrossrailError for what went wrong, also in the middle."""
        sampling = plan.sampling
        body = {
            "prompt": plan.prompt, "max_tokens": sampling.max_tokens, "temperature": sampling.temperature,
            "top_p": sampling.top_p, "seed": sampling.seed, "stream": True, "ignore_eos": True,
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


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise CrossrailError(f"not within {_START_TIMEOUT_S:g} s: {what}")
        time.sleep(_LOOK_S)


def _start(processes: _Processes, plan: _Plan, console: Console) -> _Client:
    processes.start(
        "router", "router", "--listen", "127.0.0.1:0", "--heartbeat-s", "0.1", "--transport", plan.transport
    )
    url = processes.first_line("router").split()[-1]
    client = _Client(url)
    options = [word for key, value in plan.model_options.items() for word in ("--model-option", f"{key}={value}")]
    common = ["--router", url, "--transport", plan.transport, "--probe-s", "0.3", *options]
    for index in range(plan.prefillers):
        processes.start(f"prefiller-{index}", "prefiller", "--chunk-tokens", str(_CHUNK_TOKENS), *common)
    for index in range(plan.decoders):
        processes.start(f"decoder-{index}", "decoder", *common)
    wanted = plan.prefillers + plan.decoders
    _until(lambda: len(client.nodes()) == wanted, f"{wanted} nodes have joined")
    console.print(f"router at {url}; " + ", ".join(f"{node['node']}" for node in client.nodes()))
    return client


def _kill_the_busy_one(client: _Client, processes: _Processes, console: Console) -> None:
    def busy() -> list[str]:
        return [n["node"] for n in client.nodes() if n["role"] == "prefiller" and n["queued_tokens"] > 0]

    _until(lambda: bool(busy()), "a prefiller works on the prompt")
    name = busy()[0]
    processes.kill(name)
    console.print(f"[red]killed[/red] {name} (pid {processes.pid(name)}) in the middle of the prompt")


@dataclass
class _Outcome:
    """Of one run. first_s: until its first token."""

    tokens: list[int] = field(default_factory=list)
    first_s: float = 0.0
    request: str = ""


def _generate(client: _Client, plan: _Plan, console: Console) -> _Outcome:
    """Shows the tokens as they come."""
    begun = time.monotonic()
    outcome = _Outcome()
    for event in client.complete(plan):
        if not outcome.tokens:
            outcome.first_s = time.monotonic() - begun
        choice = event["choices"][0]
        outcome.tokens += choice["token_ids"]
        outcome.request = event["id"]
        console.print(choice["text"], end="", markup=False, highlight=False)
    console.print()
    return outcome


def _monolithic(plan: _Plan) -> _Outcome:
    """The same prompt through the same model in this process, in chunks of the same length."""
    model = open_model("toy", plan.model_options)
    layout = model.layout
    cache = [
        [layout.layer_view(np.zeros(layout.layer_bytes, np.uint8)) for _ in range(layout.layers)]
        for _ in range(layout.tp)
    ]

    async def run() -> _Outcome:
        outcome = _Outcome()
        prompt = ToyTokenizer().encode(plan.prompt)
        begun = time.monotonic()
        pages = np.arange(layout.pages)
        async for token in generate(model, cache, prompt, pages, plan.sampling, chunk_tokens=_CHUNK_TOKENS):
            outcome.first_s = outcome.first_s or time.monotonic() - begun
            outcome.tokens.append(token)
        return outcome

    return asyncio.run(run())


def _show_timeline(client: _Client, request: str, out: Path, console: Console) -> None:
    spans = json.loads(client.get(f"/v1/requests/{request}"))["end"]["timeline"]
    table = Table(title="where the time went")
    for column in ("what", "from ms", "for ms"):
        table.add_column(column, justify="left" if column == "what" else "right")
    layers = [span for span in spans if "prefiller: layer" in span["name"]]
    for span in (span for span in spans if span not in layers):
        table.add_row(span["name"], f"{span['begin_s'] * 1e3:.2f}", f"{span['length_s'] * 1e3:.2f}")
    if layers:
        longest_ms = max(span["length_s"] for span in layers) * 1e3
        table.add_row(
            f"{len(layers)} transfers of a layer", f"{layers[0]['begin_s'] * 1e3:.2f}", f"<= {longest_ms:.2f}"
        )
    console.print(table)
    out.mkdir(parents=True, exist_ok=True)
    (out / "timeline.json").write_bytes(client.get(f"/v1/requests/{request}/trace"))
    (out / "timeline.svg").write_bytes(client.get(f"/v1/requests/{request}/timeline.svg"))
    console.print(f"timeline: {out / 'timeline.svg'} (picture), {out / 'timeline.json'} (chrome://tracing)")


@click.command()
@click.option("--prompt", help="By default a sentence repeated to --prompt-tokens.")
@click.option("--prompt-tokens", default=2000, show_default=True)
@click.option("--max-tokens", default=48, show_default=True)
@click.option("--temperature", default=0.8, show_default=True, help="0: greedy.")
@click.option("--seed", default=7, show_default=True)
@click.option("--prefillers", default=2, show_default=True)
@click.option("--decoders", default=1, show_default=True)
@click.option("--token-us", default=40.0, show_default=True, help="How long a layer takes for each token of a prompt.")
@click.option("--tp", default=1, show_default=True, help="Ranks of each node.")
@click.option("--transport", default="auto", show_default=True)
@click.option("--kill", "kills", is_flag=True, help="Kill the prefiller at work in the middle.")
@click.option("--out", default="kv-demo", show_default=True, type=click.Path(file_okay=False, path_type=Path))
def demo(
    prompt: str | None,
    prompt_tokens: int,
    max_tokens: int,
    temperature: float,
    seed: int,
    prefillers: int,
    decoders: int,
    token_us: float,
    tp: int,
    transport: str,
    kills: bool,
    out: Path,
) -> None:
    """Prompt in, tokens out, from several processes; checked against one node alone. The model is a toy."""
    text = prompt or (_TEXT * (prompt_tokens // len(_TEXT) + 1))[:prompt_tokens]
    plan = _Plan(
        text,
        prefillers,
        decoders,
        Sampling(max_tokens, temperature, seed=seed, ignore_end=True),
        {"token_us": f"{token_us:g}", "tp": str(tp)},
        transport,
    )
    console = Console()
    processes = _Processes(secrets.token_hex(16))
    try:
        client = _start(processes, plan, console)
        with ThreadPoolExecutor(1) as beside:
            killing = beside.submit(_kill_the_busy_one, client, processes, console) if kills else None
            outcome = _generate(client, plan, console)
            if killing is not None:
                killing.result()
        _show_timeline(client, outcome.request, out, console)
    finally:
        processes.close()
    alone = _monolithic(plan)
    if outcome.tokens != alone.tokens:
        raise CrossrailError(f"the {len(outcome.tokens)} tokens are not those of one node alone")
    first_ms, alone_ms = outcome.first_s * 1e3, alone.first_s * 1e3
    console.print(f"first token after {first_ms:.0f} ms; of one node alone, in one process, {alone_ms:.0f} ms")
    console.print(f"[green]ok[/green]: {len(outcome.tokens)} tokens, equal to those of one node alone")
