"""`crossrail kv demo`: router, prefillers and decoder in processes of their own, a prompt, and a check of its tokens.

This process only starts them and speaks HTTP, as any client does. Then it runs the same prompt through the same model
in this process alone and compares the tokens. With --kill the prefiller that works on the prompt is killed in the
middle: the tokens must be the same.
"""

from __future__ import annotations

import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import numpy as np
from rich.console import Console

from crossrail._text import plain
from crossrail.cli import event_loop
from crossrail.cli.console import open_console
from crossrail.cli.group import require
from crossrail.cli.kv.common import open_model, open_tokenizer, parse_options, tokenizer_of
from crossrail.cli.kv.local import Client, Processes
from crossrail.cli.kv.picture import show_timeline
from crossrail.cli.service import check_transport
from crossrail.cli.text import format_count
from crossrail.errors import CrossrailError, UsageError
from crossrail.kv.messages import Sampling
from crossrail.kv.model import Model, Tokens, generate

_CHUNK_TOKENS = 256
_DECODER_PAGE_TOKENS = "32"
_SMALLEST_VOCABULARY = 64  # of models without a tokenizer
_PROMPT_SHOWN = 60  # characters
_TEXT = "The quick brown fox jumps over the lazy dog. "


@dataclass(frozen=True)
class _Plan:
    """prompt: text, or token ids where the tokenizer is "none"."""

    prompt: str | list[int]
    prefillers: int
    decoders: int
    sampling: Sampling
    model: str
    model_options: dict[str, str]
    tokenizer: str
    transport: str

    def tokens(self) -> Tokens:
        tokenizer = open_tokenizer(self.tokenizer)
        if tokenizer is not None and isinstance(self.prompt, str):
            return tokenizer.encode(self.prompt)
        return np.array(self.prompt, np.int32)


def _start(processes: Processes, plan: _Plan, console: Console) -> Client:
    of_router = ["--listen", "127.0.0.1:0", "--heartbeat-s", "0.1", "--tokenizer", plan.tokenizer]
    processes.start("router", "router", *of_router, "--transport", plan.transport)
    url = processes.first_line("router").split()[-1]
    client = Client(url)
    common = ["--router", url, "--transport", plan.transport, "--probe-s", "0.3", "--model", plan.model]
    for index in range(plan.prefillers):
        words = ["--chunk-tokens", str(_CHUNK_TOKENS), *common, *_words(plan.model_options)]
        processes.start(f"prefiller-{index}", "prefiller", *words)
    for index in range(plan.decoders):
        # Pages of another size, to show that the two sides need not agree.
        words = [*common, *_words({"page_tokens": _DECODER_PAGE_TOKENS} | plan.model_options)]
        processes.start(f"decoder-{index}", "decoder", *words)
    wanted = plan.prefillers + plan.decoders
    processes.until(lambda: len(client.nodes()) == wanted, f"{wanted} nodes have joined")
    console.print(f"router at {url}; " + ", ".join(f"{node['node']}" for node in client.nodes()))
    return client


def _words(options: dict[str, str]) -> list[str]:
    return [word for key, value in options.items() for word in ("--model-option", f"{key}={value}")]


def _kill_the_busy_one(client: Client, processes: Processes, console: Console, is_over: Event) -> None:
    """is_over: all tokens have arrived, or none will."""

    def busy() -> list[str]:
        return [n["node"] for n in client.nodes() if n["role"] == "prefiller" and n["queued_tokens"] > 0]

    while not (names := busy()):
        if is_over.is_set():
            raise CrossrailError(
                "--kill: no prefiller was seen at work before all tokens were there, so none was killed. Next: a "
                "longer prompt (--prompt-tokens), or a slower toy (--token-us)"
            )
        processes.look("a prefiller works on the prompt")
    name = names[0]
    processes.kill(name)
    console.print(f"[red]killed[/red] {name} (pid {processes.pid(name)}) in the middle of the prompt")


@dataclass
class _Outcome:
    """The outcome of one run. first_s: until its first token."""

    tokens: list[int] = field(default_factory=list)
    first_s: float = 0.0
    request: str = ""


def _generate(client: Client, plan: _Plan, console: Console) -> _Outcome:
    """Shows the prompt, and the tokens as they come."""
    console.print("[bold]prompt:[/bold]", end=" ")
    console.print(_shortened(plan), markup=False, highlight=False)
    console.print("[bold]tokens:[/bold]", end=" ")
    begun = time.monotonic()
    outcome = _Outcome()
    for event in client.complete(plan.prompt, plan.sampling):
        if not outcome.tokens:
            outcome.first_s = time.monotonic() - begun
        choice = event["choices"][0]
        outcome.tokens += choice["token_ids"]
        outcome.request = event["id"]
        console.print(choice["text"], end="", markup=False, highlight=False)
    console.print()
    return outcome


def _shortened(plan: _Plan) -> str:
    text = plan.prompt if isinstance(plan.prompt, str) else " ".join(map(str, plan.prompt))
    beginning = text if len(text) <= _PROMPT_SHOWN else f"{text[:_PROMPT_SHOWN]}..."
    return f"{plain(beginning)} ({format_count(len(plan.tokens()), 'token')})"


def _check_prompt(prompt: str) -> None:
    if not prompt:
        raise UsageError("--prompt is empty")
    try:
        prompt.encode()
    except UnicodeEncodeError:  # bytes that are none come from the shell as surrogates
        raise UsageError("--prompt is not UTF-8") from None


def _monolithic(model: Model, plan: _Plan) -> _Outcome:
    """Runs the same prompt through the same model in this process, in chunks of the same length."""
    layout = model.layout
    cache = [
        [layout.layer_view(np.zeros(layout.layer_bytes, np.uint8)) for _ in range(layout.layers)]
        for _ in range(layout.tp)
    ]

    async def run() -> _Outcome:
        outcome = _Outcome()
        prompt = plan.tokens()
        begun = time.monotonic()
        pages = np.arange(layout.pages)
        async for token in generate(model, cache, prompt, pages, plan.sampling, chunk_tokens=_CHUNK_TOKENS):
            outcome.first_s = outcome.first_s or time.monotonic() - begun
            outcome.tokens.append(token)
        return outcome

    return event_loop.run(run())


def _write_timeline(client: Client, request: str, out: Path, console: Console) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "timeline.json").write_bytes(client.get(f"/v1/requests/{request}/trace"))
    (out / "timeline.svg").write_bytes(client.get(f"/v1/requests/{request}/timeline.svg"))
    console.print(
        f"timeline: {out / 'timeline.svg'} (picture), {out / 'timeline.json'} (chrome://tracing)", soft_wrap=True
    )


def demo(
    model: str,
    model_options: tuple[str, ...],
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
    out: Path | None,
) -> None:
    """The command; commands.py has its options and its help."""
    require("kv demo", "kv", "aiohttp")  # here rather than in each process that it starts
    check_transport(transport)
    if prompt is not None:
        _check_prompt(prompt)
    tokenizer = tokenizer_of(model)
    text: str | list[int] = prompt or (_TEXT * (prompt_tokens // len(_TEXT) + 1))[:prompt_tokens]
    if tokenizer == "none":
        if prompt:
            raise UsageError(f"model {model!r} has no tokenizer: --prompt has no meaning, --prompt-tokens has")
        text = np.random.default_rng(seed).integers(0, _SMALLEST_VOCABULARY, prompt_tokens).tolist()
    options = {"tp": str(tp)} | ({"token_us": f"{token_us:g}"} if model == "toy" else {})
    plan = _Plan(
        text,
        prefillers,
        decoders,
        Sampling(max_tokens, temperature, seed=seed, ignore_end=True),
        model,
        options | parse_options(model_options),
        tokenizer,
        transport,
    )
    alone_model = open_model(
        plan.model, plan.model_options
    )  # first: what is wrong with it is then told once, and at once
    console = open_console()
    processes = Processes(secrets.token_hex(16))
    try:
        client = _start(processes, plan, console)
        with ThreadPoolExecutor(1) as beside:
            is_over = Event()
            killing = beside.submit(_kill_the_busy_one, client, processes, console, is_over) if kills else None
            try:
                outcome = _generate(client, plan, console)
            finally:
                is_over.set()
            if killing is not None:
                killing.result()
        show_timeline(client.timeline(outcome.request), console)
        if out is not None:
            _write_timeline(client, outcome.request, out, console)
    finally:
        processes.close()
    alone = _monolithic(alone_model, plan)
    if outcome.tokens != alone.tokens:
        raise CrossrailError(f"the {len(outcome.tokens)} tokens are not those of one node alone")
    first_ms, alone_ms = outcome.first_s * 1e3, alone.first_s * 1e3
    console.print(f"first token after {first_ms:.0f} ms; of one node alone, in one process, {alone_ms:.0f} ms")
    console.print(f"[green]ok[/green]: {len(outcome.tokens)} tokens, equal to those of one node alone")
