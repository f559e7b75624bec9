"""What disaggregation adds to the time to first token: `./dev run python benchmarks/kv_first_token.py [--help]`.

Router, prefiller and decoder are processes of this host, asked over HTTP; "alone" is the same model in this process, in
chunks of the same length. Either run has one step for the last prompt token, so the paper's extra decode pass is in
both. A round measures together, alone, alone, together, since machines drift, each with a prompt of its own so that no
prefix is known; "added" is the median over rounds of the ratio of the sums, less 1. --null puts alone in the place of
together: what it says then is what this machine's noise makes of nothing. "cpu" compares the processor time of all
three services until the answer with that of alone, which a busy machine disturbs less; two threads that wait for each
other count it too, so `--model-option threads=1` tells more there.

"hidden": of the time in which a layer's transfer was under way, the part before the last layer was computed: what comes
after that, the last layer's own transfer at least, is what a decoder waits for. A transfer is under way from when the
engine began its writes, as the layer was counted, until it saw the last of them end, whenever Python looked; where
several are at once, the time counts once. With few layers and chunks the last one's part is large.
"""

import argparse
import asyncio
import os
import secrets
import statistics
import time
from pathlib import Path

import numpy as np

from crossrail.cli.kv.common import open_model, parse_options
from crossrail.cli.kv.local import Client, Processes
from crossrail.kv.messages import Sampling, Span
from crossrail.kv.model import Cache, Model, Tokens, generate

SAMPLING = Sampling(2, ignore_end=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3", help="as `crossrail kv prefiller` takes it")
    parser.add_argument("--model-option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk-tokens", type=int, default=2048)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--null", action="store_true", help="compare alone with alone")
    args = parser.parse_args()
    processes = Processes(secrets.token_hex(16))
    try:
        measure(args, None if args.null else start(processes, args), processes)
    finally:
        processes.close()


def start(processes: Processes, args: argparse.Namespace) -> Client:
    processes.start("router", "router", "--listen", "127.0.0.1:0", "--tokenizer", "none", "--transport", args.transport)
    url = processes.first_line("router").split()[-1]
    client = Client(url)
    words = [word for option in args.model_option for word in ("--model-option", option)]
    common = ["--router", url, "--transport", args.transport, "--model", args.model, *words]
    processes.start("prefiller", "prefiller", "--chunk-tokens", str(args.chunk_tokens), *common)
    processes.start("decoder", "decoder", *common)
    processes.until(lambda: len(client.nodes()) == 2, "both nodes have joined")
    return client


def measure(args: argparse.Namespace, client: Client | None, processes: Processes) -> None:
    draw = np.random.default_rng(1)
    model = open_model(args.model, parse_options(tuple(args.model_option)))
    cache = cache_of(model)
    added, alone_s, together_s, steps_s, hidden, exposed_s = [], [], [], [], [], []
    alone_cpu_s, together_cpu_s = [], []

    def alone(prompt: Tokens) -> float:
        before_s = time.process_time()
        first_s, step_s = asyncio.run(first_tokens_alone(args, model, cache, prompt))
        alone_cpu_s.append(time.process_time() - before_s)
        steps_s.append(step_s)
        return first_s

    def together(prompt: Tokens) -> float:
        if client is None:
            return alone(prompt)
        before_s = cpu_s(processes)
        first_s, spans = first_token_together(client, prompt)
        together_cpu_s.append(cpu_s(processes) - before_s)
        share, late_s = hidden_share(spans)
        hidden.append(share)
        exposed_s.append(late_s)
        return first_s

    for round_index in range(args.rounds + 1):
        prompts = draw.integers(0, 256, (4, args.tokens)).astype(np.int32)
        times = [run(prompt) for run, prompt in zip((together, alone, alone, together), prompts, strict=True)]
        if round_index == 0:
            for values in (steps_s, hidden, exposed_s, alone_cpu_s, together_cpu_s):
                values.clear()
            continue  # connects, faults memory in
        added.append((times[0] + times[3]) / (times[1] + times[2]) - 1)
        together_s += [times[0], times[3]]
        alone_s += [times[1], times[2]]
    print(
        f"{model.name}, {args.tokens} tokens in chunks of {args.chunk_tokens}, {args.rounds} rounds, medians: "
        f"alone {ms(alone_s)}, together {ms(together_s)}, a decode step {ms(steps_s)}; "
        f"added {statistics.median(added):+.1%} (quartiles {quartiles(added)}), of the fastest runs "
        f"{min(together_s) / min(alone_s) - 1:+.1%}"
    )
    if hidden:
        cpu = statistics.median(together_cpu_s) / statistics.median(alone_cpu_s) - 1
        print(
            f"cpu {cpu:+.1%}; hidden {statistics.median(hidden):.1%}, all written {ms(exposed_s)} after the last layer"
        )


def cache_of(model: Model) -> Cache:
    layout = model.layout
    return [
        [layout.layer_view(np.zeros(layout.layer_bytes, np.uint8)) for _ in range(layout.layers)]
        for _ in range(layout.tp)
    ]


def first_token_together(client: Client, prompt: Tokens) -> tuple[float, list[Span]]:
    begun = time.monotonic()
    first_s = 0.0
    for event in client.complete(prompt.tolist(), SAMPLING):
        first_s = first_s or time.monotonic() - begun
        request = event["id"]
    return first_s, client.timeline(request)


async def first_tokens_alone(
    args: argparse.Namespace, model: Model, cache: Cache, prompt: Tokens
) -> tuple[float, float]:
    """Times until the first token, and from there to the second."""
    times = [time.monotonic()]
    pages = np.arange(model.layout.pages)
    async for _ in generate(model, cache, prompt, pages, SAMPLING, chunk_tokens=args.chunk_tokens):
        times.append(time.monotonic())
    return times[1] - times[0], times[2] - times[1]


def cpu_s(processes: Processes) -> float:
    """Processor time of all services since they were started."""
    stats = [Path(f"/proc/{processes.pid(name)}/stat").read_text() for name in ("router", "prefiller", "decoder")]
    ticks = [int(field) for stat in stats for field in stat.rpartition(")")[2].split()[11:13]]  # utime, stime
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def hidden_share(spans: list[Span]) -> tuple[float, float]:
    """And how long after the last layer was computed the last one was written."""
    layers = [(span.begin_s, end(span)) for span in spans if span.name.startswith("prefiller: layer")]
    computed_s = max(since_s for since_s, _ in layers)
    under_way = union(layers)
    all_s = sum(until_s - since_s for since_s, until_s in under_way)
    before_s = sum(max(min(until_s, computed_s) - since_s, 0.0) for since_s, until_s in under_way)
    return before_s / all_s, under_way[-1][1] - computed_s


def union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of time ranges, each from and until: in order, and apart."""
    merged: list[tuple[float, float]] = []
    for since_s, until_s in sorted(spans):
        if merged and since_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], until_s))
        else:
            merged.append((since_s, until_s))
    return merged


def end(span: Span) -> float:
    return span.begin_s + span.length_s


def ms(values: list[float]) -> str:
    return f"{statistics.median(values) * 1e3:.1f} ms"


def quartiles(values: list[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return f"{low:+.1%} and {high:+.1%}"


if __name__ == "__main__":
    main()
