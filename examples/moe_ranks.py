"""Four ranks with two experts each: tokens go to their experts, and results come back, summed by the routing weights.

    $ python moe_ranks.py
    rank 0: 64 tokens through 8 experts, as one process computes it
    ...

Each rank is a process. Yours may be started by torchrun: with a torch.distributed group, `TorchGroup(group)` takes the
place of EngineGroup and of the pipes.
"""

import multiprocessing as mp
from multiprocessing.connection import Connection

import numpy as np

import crossrail as xr
from crossrail.moe import AllToAll, EngineGroup

RANKS, EXPERTS, TOP_K, TOKENS, HIDDEN = 4, 8, 2, 64, 128
OWN = EXPERTS // RANKS  # experts of a rank: rank r has those from r * OWN on

EXPERT = np.random.default_rng(1).standard_normal((EXPERTS, HIDDEN, HIDDEN), dtype=np.float32)


def play(rank: int, pipe: Connection) -> None:
    with xr.Engine(f"rank-{rank}") as engine:
        pipe.send(bytes(engine.address))  # any channel will do
        addresses = [xr.Address.from_bytes(address) for address in pipe.recv()]
        with (
            EngineGroup(engine, addresses) as group,
            AllToAll(  # one for all layers
                engine, group, experts=EXPERTS, hidden=HIDDEN, top_k=TOP_K, max_tokens=TOKENS,
                dtype="float32", scale_block=None, out_dtype="float32",
            ) as all_to_all,
        ):  # fmt: skip
            layer(rank, all_to_all)


def layer(rank: int, all_to_all: AllToAll) -> None:
    rng = np.random.default_rng(rank)
    x = rng.standard_normal((TOKENS, HIDDEN), dtype=np.float32)
    scores = rng.random((TOKENS, EXPERTS), dtype=np.float32)  # of a router
    chosen = np.ascontiguousarray(np.argsort(-scores)[:, :TOP_K])
    weights = np.take_along_axis(scores, chosen, 1)

    dispatched = all_to_all.dispatch(x, None, chosen)
    y = all_to_all.expert_output(dispatched)  # where combine reads: nothing is copied there
    for local in range(OWN):  # rows of an expert follow each other: what a grouped GEMM takes
        rows = slice(dispatched.offsets[local], dispatched.offsets[local] + dispatched.counts[local])
        y[rows] = dispatched.x[rows] @ EXPERT[rank * OWN + local]
    combined = all_to_all.combine(y, dispatched, weights)

    plain = np.einsum("tk,tko->to", weights, np.einsum("th,tkho->tko", x, EXPERT[chosen]))
    np.testing.assert_allclose(combined, plain, rtol=1e-4, atol=1e-4)
    print(f"rank {rank}: {TOKENS} tokens through {EXPERTS} experts, as one process computes it", flush=True)


if __name__ == "__main__":
    spawn = mp.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(RANKS)]
    processes = [spawn.Process(target=play, args=(rank, pipes[rank][1]), daemon=True) for rank in range(RANKS)]
    for process in processes:
        process.start()
    addresses = [ours.recv() for ours, _ in pipes]
    for ours, _ in pipes:
        ours.send(addresses)
    for process in processes:
        process.join()
    raise SystemExit(max(abs(process.exitcode or 0) for process in processes))
