"""Kernels of dispatch and combine on a GPU, and rounds of ranks that share it, beside copies of the same bytes there.

    ./dev run python benchmarks/moe_gpu.py [--tokens 128 4096] [--ranks 2 4] [--transport shm]

First the kernels of one rank alone: microseconds of the GPU, launched one by one and as the replay of a CUDA graph, the
median of 15 passes over buffers of 256 MiB in all, so that the L2 cache has none of them. Results of 128 tokens are
compared with the reference's, bit for bit. Beside them torch's copy of as many bytes as the kernel reads.
Then rounds: each rank is a process; a half begins when all ranks have come and ends, for each, when its GPU has the
result. Printed is the median over rounds of the slowest rank, beside a copy, on each rank at once, of the bytes that
it gets. Processes without CUDA's MPS take turns on the GPU, both here and there. Rows are float8 with scales there and
bfloat16 back, as in `crossrail bench moe`. Needs torch with CUDA, and Triton.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import crossrail as xr
from crossrail.moe import AllToAll, EngineGroup
from crossrail.moe.kernels.reference import ReferenceKernels
from crossrail.moe.kernels.triton import TritonKernels

TOP_K, HIDDEN, BLOCK, EXPERTS = 8, 7168, 128, 256
BLOCKS = HIDDEN // BLOCK
ROW_BYTES, BACK_BYTES = HIDDEN + 4 * BLOCKS, 2 * HIDDEN
ROTATED_BYTES = 256 << 20
PASSES = 15
DEADLINE_S = 60.0

Act = Callable[[Any], object]


def steps(tokens: int) -> dict[str, tuple[int, Act, Callable[[], Any] | None]]:
    """For each kernel: the bytes it reads, what launches it, and its result."""
    rows = tokens * TOP_K
    x, board = (torch.randint(0, 256, (tokens, n), dtype=torch.uint8, device="cuda") for n in (HIDDEN, ROW_BYTES))
    scales = torch.rand(tokens, BLOCKS, device="cuda")
    places = torch.randperm(rows, device="cuda").int()
    table = torch.stack([torch.arange(rows, device="cuda", dtype=torch.int32) // TOP_K, places], 1).contiguous()
    where = torch.stack([torch.zeros_like(places), places], 1).view(tokens, TOP_K, 2).contiguous()
    pulled = torch.zeros(rows, HIDDEN, dtype=torch.uint8, device="cuda")
    pulled_scales = torch.zeros(rows, BLOCKS, device="cuda")
    y = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
    weights = torch.rand(tokens, TOP_K, device="cuda")
    out = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
    return {
        "pack": (tokens * ROW_BYTES, lambda k: k.pack(board, x, scales, None), lambda: board),
        "pull": (
            rows * ROW_BYTES,
            lambda k: k.pull(pulled, pulled_scales, board, table),
            lambda: torch.cat([pulled, pulled_scales.view(torch.uint8)], 1),
        ),
        "reduce": (rows * BACK_BYTES, lambda k: k.reduce(out, [y], where, weights), lambda: out),
        "quantize": (tokens * BACK_BYTES, lambda k: k.quantize(y[:tokens], BLOCK), None),
    }


def verify() -> None:
    ours, plain = TritonKernels(checked=False), ReferenceKernels()
    for name, (_, act, result) in steps(128).items():
        if result is None:
            same = all(torch.equal(a, b) for a, b in zip(act(ours), act(plain), strict=True))
        else:
            act(ours)
            made = result().clone()
            result().zero_()
            act(plain)
            same = torch.equal(made, result())
        if not same:
            raise SystemExit(f"{name} differs from the reference")


def took_us(acts: list[Callable[[], object]]) -> tuple[float, float]:
    """Microseconds of one act: launched, replayed."""

    def once() -> None:
        for act in acts:
            act()

    def median(run: Callable[[], object]) -> float:
        took = []
        for _ in range(PASSES):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            took.append(begin.elapsed_time(end) * 1e3 / len(acts))
        return statistics.median(took)

    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    graph.replay()
    return median(once), median(graph.replay)


def measure_kernels(tokens: int) -> None:
    for name in ("pack", "pull", "reduce", "quantize"):
        nbytes = steps(tokens)[name][0]
        sets = min(160, max(2, math.ceil(ROTATED_BYTES / (2 * nbytes))))
        pairs = [torch.ones(2, nbytes, dtype=torch.uint8, device="cuda") for _ in range(sets)]
        copied = took_us([lambda pair=pair: pair[0].copy_(pair[1]) for pair in pairs])
        del pairs
        kernels, made = TritonKernels(checked=False), [steps(tokens)[name][1] for _ in range(sets)]
        took = took_us([partial(act, kernels) for act in made])
        del made
        torch.cuda.empty_cache()
        print(
            f"{tokens:5} tokens  {name:9} {nbytes / 1e6:8.2f} MB  launched {took[0]:8.1f}  replayed {took[1]:8.1f} us"
            f"   copy {copied[0]:8.1f} {copied[1]:8.1f} us   {took[1] / copied[1]:5.2f}x",
            flush=True,
        )


def run_rank(pipe: Any, gate: Any, rank: int, tokens: int, options: dict[str, Any], rounds: int) -> None:
    """A process of its own. Sends its address, takes all of them, sends its times."""
    generator = torch.Generator(device="cuda").manual_seed(rank)
    x = torch.randint(0, 120, (tokens, HIDDEN), dtype=torch.uint8, device="cuda", generator=generator)
    x = x.view(torch.float8_e4m3fn)
    scales = torch.rand(tokens, BLOCKS, device="cuda", generator=generator)
    keys = torch.rand(tokens, EXPERTS, device="cuda", generator=generator)
    indices = keys.topk(TOP_K, dim=1).indices.int()
    weights = torch.full((tokens, TOP_K), 1 / TOP_K, device="cuda")
    with xr.Engine(f"rank-{rank}", **options) as engine:
        pipe.send(engine.address.to_bytes())
        group = EngineGroup(engine, [xr.Address.from_bytes(each) for each in pipe.recv()])
        part = AllToAll(
            engine, group, experts=EXPERTS, hidden=HIDDEN, top_k=TOP_K, max_tokens=tokens, device="cuda:0",
            capacity_factor=2.0, timeout_s=DEADLINE_S,
        )  # fmt: skip
        times: dict[str, list[float]] = {"copy out": [], "dispatch": [], "copy back": [], "combine": []}

        def timed(name: str, act: Callable[[], Any]) -> Any:
            gate.wait(DEADLINE_S)
            began = time.perf_counter()
            result = act()
            torch.cuda.synchronize()
            times[name].append(time.perf_counter() - began)
            return result

        for number in range(rounds + 3):
            if number == 3:  # Triton has compiled
                times = {name: [] for name in times}
            got = timed("dispatch", lambda: part.dispatch(x, scales, indices, weights))
            y = part.expert_output(got)
            y.copy_(got.x.float().bfloat16())
            torch.cuda.synchronize()
            out = timed("combine", lambda got=got, y=y: part.combine(y, got))
            received = torch.empty(2, got.rows * max(ROW_BYTES, BACK_BYTES), dtype=torch.uint8, device="cuda")
            for name, row in (("copy out", ROW_BYTES), ("copy back", BACK_BYTES)):
                nbytes = got.rows * row
                timed(name, partial(received[0, :nbytes].copy_, received[1, :nbytes]))
        wanted = x.float().bfloat16()  # whose sum over top_k equal terms, each an eighth, is exact
        pipe.send((times, got.rows, bool(torch.equal(out, wanted))))
        part.close()
        group.close()


def measure_rounds(ranks: int, tokens: int, options: dict[str, Any], rounds: int) -> None:
    context = multiprocessing.get_context("spawn")
    gate = context.Barrier(ranks)
    pipes, children = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        children.append(
            context.Process(target=run_rank, args=(theirs, gate, rank, tokens, options, rounds), daemon=True)
        )
        children[-1].start()
        pipes.append(ours)
    addresses = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(addresses)
    results = [pipe.recv() for pipe in pipes if pipe.poll(3 * DEADLINE_S)]
    for child in children:
        child.join(DEADLINE_S)
    if len(results) < ranks or not all(is_right for _, _, is_right in results):
        raise SystemExit(f"{ranks} ranks, {tokens} tokens: what combine gave is not what the experts made")
    for half, copy, row in (("dispatch", "copy out", ROW_BYTES), ("combine", "copy back", BACK_BYTES)):
        took, beside = (
            statistics.median(max(each) for each in zip(*(times[name] for times, _, _ in results), strict=True))
            for name in (half, copy)
        )
        moved = max(rows for _, rows, _ in results) * row
        print(
            f"{ranks} ranks, {tokens:5} tokens  {half:9} {moved / 1e6:8.2f} MB each  {took * 1e6:9.0f} us   "
            f"copy {beside * 1e6:7.0f} us   {took / beside:6.1f}x",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[128, 4096])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--path", default="auto", choices=["auto", "staged"])
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    options = {"transport": given.transport, "private_path": given.path}
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    verify()
    for tokens in given.tokens:
        measure_kernels(tokens)
    for ranks in given.ranks:
        for tokens in given.tokens:
            measure_rounds(ranks, tokens, options, given.rounds)


if __name__ == "__main__":
    main()
