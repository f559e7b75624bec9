"""GraphAllToAll, and CUDA graphs of it, on a true GPU, which ranks of this process share, each on its own stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from crossrail.errors import CrossrailError, WaitTimeout
from crossrail.integrations.deepep import Buffer
from crossrail.moe.graph import GraphAllToAll, GraphDispatched
from tests.moe.batches import Batch, draw, expected_sums
from tests.moe.graph_rounds import given, whole_round
from tests.moe.ranks import Ranks
from tests.moe.test_torch_gpu import BLOCK, CONFIG, EXPERTS, HIDDEN, TCP, TOKENS, TOP_K, batches_of
from tests.support.limits import WAIT_S
from tests.support.seeds import Seed

pytestmark = [pytest.mark.hw, pytest.mark.timeout(180)]


@pytest.fixture(autouse=True)
def loaded(seed: Seed) -> None:
    """What torch loads at first use: to load something may take until kernels that wait for other ranks have ended."""
    with Ranks(1, None, GraphAllToAll, device="cuda:0", **CONFIG) as ranks:
        on_a_stream(lambda part, rank: whole_round(part, rank, batches_of(seed.rng(), 1)))(ranks.parts[0], 0)
        on_a_stream(lambda part, rank: answer(part, part.dispatch(*full(part, seed.rng()))))(ranks.parts[0], 0)


def on_a_stream(run: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    def call(part: Any, rank: int) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            result = run(part, rank)
            torch.cuda.current_stream().synchronize()
            return result

    return call


def full(part: GraphAllToAll, random: np.random.Generator) -> tuple[Any, Any, Any, Any]:
    return given(part, draw(random, TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK))


def answer(part: GraphAllToAll, got: GraphDispatched) -> Any:
    """As tests.moe.batches.outputs, by kernels alone. Rows of the masked layout."""
    first = sum(part.config.experts_per_rank[: part.rank])
    expert = first + torch.arange(got.rows, device=part.device) // part.config.rows_per_expert
    y = (got.x.view(torch.uint8).long() * (expert[:, None] + 1)) % 31
    return part.combine(y.to(torch.float32), got)


@pytest.mark.parametrize("engine", [{}, TCP], ids=["shm", "tcp"])
@pytest.mark.parametrize("options", [{}, {"private_tokens": 1, "layout": "grouped", "padding": 4}], ids=str)
def test_rounds_are_exact(engine: dict[str, Any], options: dict[str, Any], seed: Seed) -> None:
    random = seed.rng()
    with Ranks(3, engine, GraphAllToAll, device="cuda:0", **CONFIG, **options) as ranks:
        assert "kernels: triton" in ranks.parts[0].explain()
        for _ in range(6):
            batches = batches_of(random, 3)
            ranks.each(on_a_stream(lambda part, rank, b=batches: whole_round(part, rank, b)))


class Captured:
    """A graph of some rounds, of one rank. copy() what it is to dispatch, replay(), then sums() are of each round."""

    def __init__(self, part: GraphAllToAll, rounds: int, random: np.random.Generator) -> None:
        self.inputs = [full(part, random) for _ in range(rounds)]
        self.stream, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            self.made = [answer(part, part.dispatch(*one)) for one in self.inputs]

    def copy(self, part: GraphAllToAll, batches: list[Batch]) -> None:
        with torch.cuda.stream(self.stream):
            for inputs, batch in zip(self.inputs, batches, strict=True):
                for target, source in zip(inputs, given(part, batch), strict=True):
                    target.copy_(source)

    def replay(self) -> None:
        with torch.cuda.stream(self.stream):
            self.graph.replay()

    def sums(self) -> list[Any]:
        self.stream.synchronize()
        return [one.cpu().numpy() for one in self.made]


@pytest.mark.parametrize("engine", [{}, TCP], ids=["shm", "tcp"])
@pytest.mark.parametrize("rounds", [1, 3])
def test_replays_of_a_captured_graph(engine: dict[str, Any], rounds: int, seed: Seed) -> None:
    """An odd number of rounds, so that those of a replay have other parities than those of the one before."""
    random = seed.rng()
    with Ranks(2, engine, GraphAllToAll, device="cuda:0", **CONFIG) as ranks:
        warm = batches_of(random, 2)
        ranks.each(on_a_stream(lambda part, rank: whole_round(part, rank, warm)))
        graphs = [Captured(part, rounds, random) for part in ranks.parts]
        for _ in range(5):
            # of each rank, of each round
            batches = [
                [draw(random, TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK, 0.1) for _ in range(rounds)] for _ in graphs
            ]

            def run(part: Any, rank: int, batches: list[list[Batch]] = batches) -> None:
                graphs[rank].copy(part, batches[rank])
                graphs[rank].replay()
                for made, batch in zip(graphs[rank].sums(), batches[rank], strict=True):
                    assert np.array_equal(made, expected_sums(batch))
                part.check()

            ranks.each(run)
        between = batches_of(random, 2)  # rounds that are launched one by one go on behind
        ranks.each(on_a_stream(lambda part, rank: whole_round(part, rank, between)))
        graphs.clear()  # before what they use is closed


def test_a_replay_ends_when_a_rank_does_not_come(seed: Seed) -> None:
    random = seed.rng()
    with Ranks(2, TCP, GraphAllToAll, device="cuda:0", **CONFIG) as ranks:
        part = ranks.parts[0]
        part.timeout_s = 0.5
        captured = Captured(part, 2, random)
        begun = time.monotonic()
        captured.replay()
        captured.sums()
        assert time.monotonic() - begun < WAIT_S
        with pytest.raises(WaitTimeout, match=r"rank 1 .* has not sent its dispatch of round 1 within 0.5 s"):
            part.check()
        captured.replay()  # does nothing, and ends
        captured.sums()
        with pytest.raises(CrossrailError):
            part.dispatch(*full(part, random))
        del captured


def test_calls_of_deepep_in_a_graph(tmp_path: Path, seed: Seed) -> None:
    tokens, hidden, experts, top_k = 24, 512, 6, 3
    random = seed.rng()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        with Buffer(dist.group.WORLD, low_latency_mode=True, timeout_s=WAIT_S) as buffer:
            x = torch.randn((tokens, hidden), device="cuda").bfloat16()
            topk_idx = torch.arange(top_k, device="cuda").repeat(tokens, 1)
            weights = torch.ones((tokens, top_k), device="cuda")

            def layer() -> Any:
                """Each expert gives its number plus one."""
                received = buffer.low_latency_dispatch(x, topk_idx, tokens, experts, return_recv_hook=True)
                received[4]()
                y = buffer.get_next_low_latency_combine_buffer(received[2])
                y.copy_((torch.arange(experts, device="cuda") + 1).view(-1, 1, 1).expand_as(y))
                return buffer.low_latency_combine(y, topk_idx, weights, received[2], zero_copy=True)[0]

            for _ in range(2):
                layer()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                made = [layer() for _ in range(3)]
            for _ in range(4):
                chosen = np.stack([random.permutation(experts)[:top_k] for _ in range(tokens)])
                topk_idx.copy_(torch.from_numpy(chosen))
                graph.replay()
                torch.cuda.synchronize()
                buffer.check()
                wanted = torch.from_numpy((chosen + 1).sum(axis=1)).bfloat16().cuda()
                for one in made:
                    assert torch.equal(one, wanted[:, None].expand_as(one))
            del graph
    finally:
        dist.destroy_process_group()
