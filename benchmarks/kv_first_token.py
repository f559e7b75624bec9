"""What disaggregation adds to the time to first token: `./dev run python benchmarks/kv_first_token.py [--help]`.

Router, prefiller and decoder run in this process, each on an engine of its own (shm), and share its one event loop. The
toy model's layers take a set time per token, and what numpy takes. Both runs use the same chunks. "added" is the
difference of the medians; either run has one step for the last prompt token, so the paper's extra decode pass is in
both. "hidden" is how much of the transfer lay behind the prefill: 1 - (all arrived - prefill done) / prefill.
"""

import argparse
import asyncio
import statistics
import time

import numpy as np

import crossrail as xr
from crossrail.kv.decoder import Decoder
from crossrail.kv.layout import KvLayout
from crossrail.kv.mailbox import Mailbox
from crossrail.kv.memory import RankMemory
from crossrail.kv.messages import Sampling, Span
from crossrail.kv.model import Tokens, generate
from crossrail.kv.node import Node, NodeOptions
from crossrail.kv.prefiller import Prefiller
from crossrail.kv.router import Router
from crossrail.kv.toy import ToyModel
from crossrail.kv.wire import EngineWire

SECRET = b"of a benchmark"
LAYOUT = KvLayout(layers=8, pages=1024, page_tokens=16, kv_heads=2, head_dim=8, dtype="float16")


async def serve(args: argparse.Namespace) -> None:
    names = ("router", "prefiller", "decoder")
    engines = {name: xr.Engine(name, transport="shm") for name in names}
    wires = {name: EngineWire(engine) for name, engine in engines.items()}
    router = Router("router", Mailbox(wires["router"], SECRET))
    router.start()

    async def find() -> bytes:
        return wires["router"].address

    nodes: list[Node] = []
    options = NodeOptions(chunk_tokens=args.chunk_tokens)
    for name, kind in (("prefiller", Prefiller), ("decoder", Decoder)):
        model = ToyModel(LAYOUT, token_s=args.token_us / 1e6)
        ranks = {0: RankMemory.alloc(engines[name], LAYOUT)}
        nodes.append(kind(name, Mailbox(wires[name], SECRET), model, ranks, [find], options))
        nodes[-1].start()
    for node in nodes:
        await node.links[0].joined.wait()
    try:
        await measure(args, router)
    finally:
        for node in nodes:
            await node.close()
        await router.close()
        for name in names:
            wires[name].close()
            engines[name].close()


async def measure(args: argparse.Namespace, router: Router) -> None:
    draw = np.random.default_rng(1)
    model = ToyModel(LAYOUT, token_s=args.token_us / 1e6)
    cache = [[LAYOUT.layer_view(np.zeros(LAYOUT.layer_bytes, np.uint8)) for _ in range(LAYOUT.layers)]]
    together_s, alone_s, step_s, hidden = [], [], [], []
    for round_index in range(args.rounds + 1):
        # The two in turn, since machines drift; another prompt each time, so that no prefix is known.
        prompt = draw.integers(0, 256, args.tokens).astype(np.int32)
        name = f"r{round_index}"
        first_s = await first_token_together(router, prompt, name)
        first_alone_s, second_s = await first_tokens_alone(args, model, cache, prompt)
        if round_index == 0:
            continue  # connects, faults memory in
        together_s.append(first_s)
        alone_s.append(first_alone_s)
        step_s.append(second_s)
        end = router.ended(name)
        assert end is not None
        hidden.append(hidden_share(end.timeline))
    together, alone, step = (statistics.median(values) for values in (together_s, alone_s, step_s))
    added = together - alone
    print(
        f"{args.tokens} tokens, {args.rounds} rounds, medians: alone {alone * 1e3:.1f} ms, "
        f"together {together * 1e3:.1f} ms, a decode step {step * 1e3:.1f} ms; "
        f"added {added * 1e3:.1f} ms ({added / alone:.1%}); hidden {statistics.median(hidden):.1%}"
    )


async def first_token_together(router: Router, prompt: Tokens, name: str) -> float:
    begun = time.monotonic()
    first_s = 0.0
    async for chunk in router.complete(prompt, Sampling(2, ignore_end=True), request=name):
        first_s = first_s or (time.monotonic() - begun if chunk.tokens else 0.0)
    return first_s


async def first_tokens_alone(
    args: argparse.Namespace, model: ToyModel, cache: list[list[np.ndarray]], prompt: Tokens
) -> tuple[float, float]:
    """Until the first token, and from there to the second."""
    sampling = Sampling(2, ignore_end=True)
    times = [time.monotonic()]
    pages = np.arange(LAYOUT.pages)
    async for _ in generate(model, cache, prompt, pages, sampling, chunk_tokens=args.chunk_tokens):
        times.append(time.monotonic())
    return times[1] - times[0], times[2] - times[1]


def hidden_share(spans: list[Span]) -> float:
    prefills = [span for span in spans if span.name.startswith("prefiller: prefill")]
    transfer = next(span for span in spans if span.name == "transfer")
    begun, done = prefills[0].begin_s, max(span.begin_s + span.length_s for span in prefills)
    return 1 - max(transfer.begin_s + transfer.length_s - done, 0.0) / (done - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk-tokens", type=int, default=2048)
    parser.add_argument("--token-us", type=float, default=20.0, help="of a layer")
    parser.add_argument("--rounds", type=int, default=9)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
