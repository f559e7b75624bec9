"""What confirmations cost: `python -m tests.moe.masking_cost`. Rounds of simulated ranks, in virtual microseconds."""

from __future__ import annotations

import itertools
import statistics

import numpy as np

from crossrail import sim
from crossrail.moe import AllToAll
from crossrail.moe.rounds import Round
from tests.moe.batches import draw
from tests.moe.baton import BatonGroup, meet

RANKS, EXPERTS, HIDDEN, TOP_K, TOKENS, BLOCK = 8, 64, 1024, 4, 64, 128
ROUNDS = 5
LOOK_S = 2e-7


def measure(nic: str, on_lost: str) -> tuple[float, float]:
    """Of dispatch and combine, from when all begin until all are done: medians in microseconds."""
    with sim.World(1) as world:
        engines = [world.host(f"host-{rank}", nic).engine(f"rank-{rank}") for rank in range(RANKS)]

        def make(group: BatonGroup) -> AllToAll:
            sizes = {"experts": EXPERTS, "hidden": HIDDEN, "top_k": TOP_K, "max_tokens": TOKENS, "scale_block": BLOCK}
            return AllToAll(engines[group.rank], group, on_lost=on_lost, **sizes)

        parts = meet(RANKS, make)

        def until_ready(rounds: list[Round], begin_s: float) -> float:
            # All of them each time: who is ready himself may have something for the others.
            while not all(ready := [part.advance(one) for part, one in zip(parts, rounds, strict=True)]):
                assert world.now_s < begin_s + 1.0, f"a round does not get on: {ready}"
                world.run(LOOK_S)
            return (world.now_s - begin_s) * 1e6

        times = []
        for number in range(ROUNDS + 1):
            begin_s = world.now_s
            batches = [
                draw(np.random.default_rng([number, r]), TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK) for r in range(RANKS)
            ]
            rounds = [p.dispatch_send(b.x, b.scales, b.indices, b.weights) for p, b in zip(parts, batches, strict=True)]
            dispatch_us = until_ready(rounds, begin_s)
            got = [part.dispatch_recv(one) for part, one in zip(parts, rounds, strict=True)]
            begin_s = world.now_s
            for part, one in zip(parts, got, strict=True):
                part.combine_send(part.expert_output(one), one)
            times.append((dispatch_us, until_ready(rounds, begin_s)))
            for part, one in zip(parts, got, strict=True):
                part.combine_recv(one)
        for part in parts:
            part.close()
    dispatch, combine = zip(*times[1:], strict=True)
    return statistics.median(dispatch), statistics.median(combine)


if __name__ == "__main__":
    for nic, on_lost in itertools.product(("cx7", "2xefa200"), ("raise", "mask")):
        dispatch_us, combine_us = measure(nic, on_lost)
        print(f"{nic:9} on_lost={on_lost:6} dispatch {dispatch_us:6.1f} us  combine {combine_us:6.1f} us")
