"""Rounds of GraphAllToAll in replayed CUDA graphs, beside launches one by one, AllToAll's, and a copy of the bytes.

    ./dev run python benchmarks/moe_graph.py [--tokens 128] [--ranks 2 4] [--transport shm] [--cpus] [--polling spin]
                                             [--kernels]

Each rank is a process, and all share one GPU: start CUDA's MPS before (nvidia-cuda-mps-control -d), or processes take
turns of milliseconds and that is all there is to see. With CUDA_DEVICE_MAX_CONNECTIONS=32 MPS has no room for four. A
pass begins when all ranks have come; printed is the median over passes of the slowest rank, per round of a dispatch and
a combine, with no work of experts between. Replayed and launched: kernels write to the other ranks' memory; engine:
replayed with peer_access=False, so that it moves all rows. Copy: torch's, on each rank at once, of the bytes that it
gets in a round.
Rows are float8 with scales there and bfloat16 back, as in `crossrail bench moe`. --cpus: the thread of each rank has a
core of its own. --kernels: rank 0 also prints what each kernel of a replay takes. What combine gives is checked.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import crossrail as xr
from crossrail.moe import AllToAll, EngineGroup
from crossrail.moe.graph import GraphAllToAll

TOP_K, HIDDEN, BLOCK, EXPERTS = 8, 7168, 128, 256
BLOCKS = HIDDEN // BLOCK
ROUNDS = 10  # of a graph
PASSES = 15
DEADLINE_S = 60.0


def tokens_of(rank: int, tokens: int) -> tuple[Any, Any, Any, Any]:
    generator = torch.Generator(device="cuda").manual_seed(rank)
    x = torch.randint(0, 120, (tokens, HIDDEN), dtype=torch.uint8, device="cuda", generator=generator)
    scales = torch.rand(tokens, BLOCKS, device="cuda", generator=generator)
    indices = torch.rand(tokens, EXPERTS, device="cuda", generator=generator).topk(TOP_K, dim=1).indices.int()
    return x.view(torch.float8_e4m3fn), scales, indices, torch.full((tokens, TOP_K), 1 / TOP_K, device="cuda")


def show_kernels(replay: Callable[[], None]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
        torch.cuda.synchronize()
    print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=20, max_name_column_width=40), flush=True)


def run_rank(
    pipe: Any, gate: Any, rank: int, tokens: int, options: dict[str, Any], has_core: bool, shows_kernels: bool
) -> None:
    """A process of its own. For each engine sends its address, and takes all; then sends its times."""
    given = tokens_of(rank, tokens)
    layout = "masked" if tokens <= 512 else "grouped"
    sizes: dict[str, Any] = {"experts": EXPERTS, "hidden": HIDDEN, "top_k": TOP_K, "max_tokens": tokens,
                             "layout": layout, "device": "cuda:0", "timeout_s": DEADLINE_S}  # fmt: skip
    wanted = given[0].float().bfloat16()  # whose sum over top_k equal terms, each an eighth, is exact
    times: dict[str, list[float]] = {}

    def timed(name: str, act: Callable[[], Any]) -> None:
        for number in range(PASSES + 2):
            gate.wait(DEADLINE_S)
            began = time.perf_counter()
            act()
            torch.cuda.synchronize()
            if number >= 2:
                times.setdefault(name, []).append((time.perf_counter() - began) / ROUNDS)

    def meet(engine: xr.Engine) -> EngineGroup:
        pipe.send(engine.address.to_bytes())
        return EngineGroup(engine, [xr.Address.from_bytes(each) for each in pipe.recv()])

    cpu = sorted(os.sched_getaffinity(0))[-1 - rank] if has_core else None
    is_right = True
    for name, peer_access in (("engine", False), ("replayed", True)):
        with (
            xr.Engine(f"rank-{rank}", **options) as engine,
            meet(engine) as group,
            GraphAllToAll(engine, group, peer_access=peer_access, proxy_cpu=cpu, **sizes) as part,
        ):
            got = part.dispatch(*given)
            y = got.x.float().bfloat16()
            rows = int(got.counts.sum())
            is_right &= torch.equal(part.combine(y, got), wanted)

            def rounds(part: GraphAllToAll = part, y: Any = y) -> None:
                for _ in range(ROUNDS):
                    part.combine(y, part.dispatch(*given))

            if peer_access:
                timed("launched", rounds)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                rounds()
            timed(name, graph.replay)
            part.check()
            if shows_kernels and peer_access:
                if rank == 0:
                    print(part.explain())
                gate.wait(DEADLINE_S)
                show_kernels(graph.replay) if rank == 0 else graph.replay()
                torch.cuda.synchronize()
            del graph
    nbytes = rows * (HIDDEN + 4 * BLOCKS) + tokens * TOP_K * 2 * HIDDEN
    copied = torch.empty(2, nbytes, dtype=torch.uint8, device="cuda")
    timed("copy", lambda: [copied[0].copy_(copied[1]) for _ in range(ROUNDS)])
    with (
        xr.Engine(f"rank-{rank}", **options) as engine,
        meet(engine) as group,
        AllToAll(engine, group, **sizes) as plain,
    ):

        def plain_rounds() -> None:
            for _ in range(ROUNDS):
                plain.combine(y, plain.dispatch(*given))

        timed("AllToAll", plain_rounds)
    pipe.send((times, nbytes, is_right))


def measure(ranks: int, tokens: int, options: dict[str, Any], have_cores: bool, shows_kernels: bool) -> None:
    context = multiprocessing.get_context("spawn")
    gate = context.Barrier(ranks)
    pipes, children = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        arguments = (theirs, gate, rank, tokens, options, have_cores, shows_kernels)
        children.append(context.Process(target=run_rank, args=arguments, daemon=True))
        children[-1].start()
        pipes.append(ours)
    for _ in range(3):
        addresses = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(addresses)
    results = [pipe.recv() for pipe in pipes if pipe.poll(3 * DEADLINE_S)]
    for child in children:
        child.join(DEADLINE_S)
    if len(results) < ranks or not all(is_right for _, _, is_right in results):
        raise SystemExit(f"{ranks} ranks, {tokens} tokens: what combine gave is not what the experts made")
    took = {
        name: statistics.median(max(each) for each in zip(*(times[name] for times, _, _ in results), strict=True)) * 1e6
        for name in results[0][0]
    }
    print(
        f"{ranks} ranks, {tokens:5} tokens  {results[0][1] / 1e6:7.2f} MB each  replayed {took['replayed']:7.0f} us  "
        f"engine {took['engine']:7.0f}  launched {took['launched']:7.0f}  AllToAll {took['AllToAll']:7.0f}  "
        f"copy {took['copy']:6.0f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[128])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--cpus", action="store_true")
    parser.add_argument("--polling", default="adaptive")
    parser.add_argument("--kernels", action="store_true")
    given = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for ranks in given.ranks:
        for tokens in given.tokens:
            options = {"transport": given.transport, "polling": given.polling}
            measure(ranks, tokens, options, given.cpus, given.kernels)


if __name__ == "__main__":
    main()
