"""What requests and tokens cost router, prefillers and decoders in processor time, whatever the model computes.

    python benchmarks/kv_services.py
    python benchmarks/kv_services.py --at-once 200 --tokens 256 --whole

Processes of this machine, and a client of bare sockets. Processor time is what the kernel counts for each process, user
and system, so other programs on the machine disturb it little, as long as they do not take its caches.

A measure has two parts: requests of one token, which say what a request costs, and as many of --tokens tokens, whose
further tokens say what a token costs. Both with prompts of --prompt-tokens tokens, all of them different. The model
computes nothing, and is as a GPU that runs all of a decoder's requests in one batch: each gets a token every --step-ms.
"""

import argparse
import asyncio
import json
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from crossrail.cli.kv.local import Client, Processes
from crossrail.kv import KvLayout
from crossrail.kv.model import Cache, Logits, Pages, Tokens, check_vocabulary

ROLES = ("router", "prefiller", "decoder")
_VOCABULARY = 256


class Paced:
    """A Model of no numbers: step() returns to all that wait in it once every step_s."""

    name = "paced"
    end_tokens: frozenset[int] = frozenset()
    tail_bytes = 0

    def __init__(self, step_s: float) -> None:
        self.layout = KvLayout(layers=1, pages=16384, page_tokens=16, kv_heads=1, head_dim=8, dtype="float32")
        self._step_s = step_s
        self._logits = np.zeros(_VOCABULARY, np.float32)
        self._next: asyncio.Future[None] | None = None

    def check(self, prompt: Tokens, max_tokens: int) -> None:
        check_vocabulary(prompt, _VOCABULARY)

    async def prefill(
        self, cache: Cache, tokens: Tokens, start: int, pages: Pages, layer_done: Callable[[], None]
    ) -> bytes:
        layer_done()
        return b""

    async def step(self, cache: Cache, token: int, position: int, pages: Pages, tail: bytes) -> tuple[Logits, bytes]:
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            loop.call_later(self._step_s, self._end_step)
        await asyncio.shield(self._next)
        return self._logits, tail

    def _end_step(self) -> None:
        ended, self._next = self._next, None
        assert ended is not None
        ended.set_result(None)


def paced(step_ms: str) -> Paced:
    """What `--model kv_services:paced` makes."""
    return Paced(float(step_ms) / 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, default=64, help="requests under way at a time")
    parser.add_argument("--requests", type=int, default=256, help="of each part of a round")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--whole", action="store_true", help="answers in one piece, not streamed")
    parser.add_argument("--nodes", type=int, default=2, help="prefillers, and decoders")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the model: the pause between two tokens")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    processes = Processes(secrets.token_hex(16))
    try:
        measure(args, start(processes, args), processes)
    finally:
        processes.close()


def start(processes: Processes, args: argparse.Namespace) -> str:
    processes.start("router", "router", "--listen", "127.0.0.1:0", "--transport", args.transport)
    url = processes.first_line("router").split()[-1]
    words = ["--model", "kv_services:paced", "--model-option", f"step_ms={args.step_ms}"]
    for role in ROLES[1:]:
        for number in range(args.nodes):
            processes.start(f"{role}-{number}", role, "--router", url, "--transport", args.transport, *words)
    client = Client(url)
    processes.until(lambda: len(client.nodes()) == 2 * args.nodes, "all nodes have joined")
    return url


def measure(args: argparse.Namespace, url: str, processes: Processes) -> None:
    per_request: dict[str, list[float]] = {role: [] for role in ROLES}
    per_token: dict[str, list[float]] = {role: [] for role in ROLES}
    rates, first_s, events = [], [], []
    for round_index in range(args.rounds + 1):
        one, _, _ = part(args, url, processes, 1)
        all_, wall_s, loaded = part(args, url, processes, args.tokens)
        if round_index == 0:
            continue  # connects, faults memory in
        rates.append(args.requests * args.tokens / wall_s)
        first_s += loaded.first_s
        events.append(loaded.events / (args.requests * args.tokens))
        for role in ROLES:
            per_request[role].append(one[role] / args.requests)
            per_token[role].append((all_[role] - one[role]) / (args.requests * (args.tokens - 1)))
    how = "whole" if args.whole else f"streamed, {statistics.median(events):.2f} events a token"
    print(
        f"{args.at_once} at once of {args.prompt_tokens} + {args.tokens} tokens, medians of {args.rounds} rounds: "
        f"{how}, {statistics.median(rates):.0f} tokens/s, answers begin after {statistics.median(first_s) * 1e3:.1f} ms"
    )
    for role in ROLES:
        print(
            f"{role:10} {statistics.median(per_request[role]) * 1e3:7.3f} ms a request "
            f"{statistics.median(per_token[role]) * 1e6:7.1f} us a token"
        )


def part(
    args: argparse.Namespace, url: str, processes: Processes, tokens: int
) -> tuple[dict[str, float], float, "Loaded"]:
    """Processor time of each role, the wall's, and what the clients saw."""
    before, begun_s = cpu_s(args, processes), time.monotonic()
    loaded = asyncio.run(load(args, url.removeprefix("http://"), tokens))
    wall_s, after = time.monotonic() - begun_s, cpu_s(args, processes)
    return {role: after[role] - before[role] for role in ROLES}, wall_s, loaded


@dataclass
class Loaded:
    """first_s: until each answer began, which a streamed one does with its first token."""

    first_s: list[float] = field(default_factory=list)
    events: int = 0


async def load(args: argparse.Namespace, place: str, tokens: int) -> Loaded:
    host, _, port = place.rpartition(":")
    draw = np.random.default_rng(secrets.randbits(32))
    bodies = iter(
        [
            body_of(draw.integers(0, 256, args.prompt_tokens).tolist(), tokens, not args.whole)
            for _ in range(args.requests)
        ]
    )
    loaded = Loaded()
    await asyncio.gather(*(one_client(host, int(port), bodies, loaded) for _ in range(args.at_once)))
    return loaded


def body_of(prompt: list[int], tokens: int, is_stream: bool) -> bytes:
    about = {"prompt": prompt, "max_tokens": tokens, "stream": is_stream, "ignore_eos": True, "seed": 1}
    body = json.dumps(about).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Length: %d\r\n\r\n" % len(body) + body


async def one_client(host: str, port: int, bodies: Iterator[bytes], loaded: Loaded) -> None:
    """One request behind the other, on one connection; the answer's end is looked for, and no more of it."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
    for body in bodies:
        begun_s = time.monotonic()
        writer.write(body)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"{head!r} {await reader.read(1000)!r}")
        loaded.first_s.append(time.monotonic() - begun_s)
        if b"chunked" in head.lower():
            answer = await reader.readuntil(b"\r\n0\r\n\r\n")
            loaded.events += answer.count(b"data: {")
        else:
            await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
    writer.close()


def cpu_s(args: argparse.Namespace, processes: Processes) -> dict[str, float]:
    """Processor time of each role since it was started, all of its processes together."""
    names = {role: [f"{role}-{number}" for number in range(args.nodes)] for role in ROLES[1:]} | {"router": ["router"]}
    return {role: sum(process_s(processes.pid(name)) for name in names[role]) for role in ROLES}


def process_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")  # utime, stime


if __name__ == "__main__":
    main()
