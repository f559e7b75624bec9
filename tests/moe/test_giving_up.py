"""Calls that fail half way: what nobody was told can be repeated, what others count cannot."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.moe import AllToAll
from crossrail.moe.kernels import CpuKernels
from tests.moe.batches import draw, misaligned
from tests.moe.ranks import Ranks
from tests.moe.test_rounds import BLOCK, whole_round
from tests.support.seeds import Seed

SIZES: dict[str, Any] = {
    "experts": 4, "hidden": 32, "top_k": 2, "max_tokens": 8, "scale_block": BLOCK, "out_dtype": "float32",
}  # fmt: skip


class OutOfMemory(Exception):
    """What a kernel of the tests raises."""


class Failing(CpuKernels):
    """fails: in which kernel, once, and after how many calls of it."""

    fails: tuple[str, int] | None = None

    def _count(self, name: str) -> None:
        if self.fails is not None and self.fails[0] == name:
            self.fails = (name, self.fails[1] - 1) if self.fails[1] else None
            if self.fails is None:
                raise OutOfMemory(name)

    def pack(self, *arguments: Any) -> None:
        self._count("pack")
        super().pack(*arguments)

    def reduce(self, *arguments: Any) -> None:
        self._count("reduce")
        super().reduce(*arguments)


def make(*arguments: Any, **config: Any) -> AllToAll:
    return AllToAll(*arguments, kernels=Failing(), **config)


def fail(part: AllToAll, kernel: str, after: int = 0) -> None:
    kernels: Any = part._memory._kernels  # type: ignore[attr-defined]
    kernels.fails = (kernel, after)


def interrupt_after(part: Any, call: str) -> None:
    """As Ctrl-C does between a call that has sent something and the note that it has."""
    sends = getattr(part, call)

    def interrupted(*arguments: Any) -> None:
        sends(*arguments)
        raise KeyboardInterrupt

    setattr(part, call, interrupted)


# What fails on rank 0, in which part of a round; options of all ranks.
HALVES: dict[str, tuple[Callable[[AllToAll], None], type[BaseException], dict[str, Any]]] = {
    "dispatch_send": (lambda part: fail(part, "pack"), OutOfMemory, {}),
    "remainder": (
        lambda part: interrupt_after(part._far, "send_remainder"), KeyboardInterrupt, {"private_tokens": 0},
    ),
    "combine_send": (lambda part: interrupt_after(part._far, "send_results"), KeyboardInterrupt, {}),
    "node_sums": (lambda part: fail(part, "reduce", after=1), OutOfMemory, {"node_size": 1, "node_sums": True}),
}  # fmt: skip


@pytest.mark.parametrize("proxy", ["caller", "thread"])
@pytest.mark.parametrize(("half", "by"), [*((half, "call") for half in HALVES), ("remainder", "advance")])
def test_a_rank_that_fails_half_way_takes_part_no_more_and_the_others_are_told(
    half: str, by: str, proxy: str, seed: Seed, nothing_leaks: None
) -> None:
    breaks, kind, options = HALVES[half]
    random = seed.rng()
    with Ranks(3, make=make, **SIZES, **({"node_size": 1, "proxy": proxy} | options)) as ranks:
        batches = [draw(random, 8, 32, 4, 2, BLOCK) for _ in ranks.parts]
        broken = ranks.parts[0]

        def run(part: AllToAll, rank: int) -> BaseException:
            mine = batches[rank]
            try:
                opened = part.dispatch_send(mine.x, mine.scales, mine.indices, mine.weights)
                while by == "advance" and not part.advance(opened):
                    time.sleep(0.001)
                got = part.dispatch_recv(opened)
                part.combine(np.zeros((got.rows, 32), np.float32), got)
                part.dispatch(mine.x, mine.scales, mine.indices, mine.weights)
            except BaseException as error:
                return error
            raise AssertionError(f"rank {rank} raised nothing")

        breaks(broken)
        errors = ranks.each(run)
        assert type(errors[0]) is kind
        for error in errors[1:]:  # at once, not when their time is up
            assert isinstance(error, xr.UsageError), error
            assert "rank 0 " in str(error) and "has closed its AllToAll" in str(error)
        mine = batches[0]
        with pytest.raises(xr.CrossrailError, match=r"failed after a part of it was sent: .* make a new one"):
            broken.dispatch_send(mine.x, mine.scales, mine.indices, mine.weights)


def test_a_dispatch_that_failed_before_anybody_was_told_can_be_repeated(seed: Seed) -> None:
    random = seed.rng()
    with Ranks(2, make=make, **SIZES) as ranks:
        batches = [draw(random, 8, 32, 4, 2, BLOCK) for _ in range(2)]
        fail(ranks.parts[0], "pack")
        with pytest.raises(OutOfMemory):
            ranks.parts[0].dispatch_send(batches[0].x, batches[0].scales, batches[0].indices)
        for _ in range(2):
            ranks.each(lambda part, rank: whole_round(part, rank, batches))


@pytest.mark.parametrize(
    ("kernel", "options"),
    [("pack", {"node_size": 1}), ("reduce", {"node_size": 1, "node_sums": True})],
    ids=["combine_send", "node_sums"],
)
def test_a_combine_that_failed_before_anybody_was_told_can_be_repeated(
    kernel: str, options: dict[str, Any], seed: Seed
) -> None:
    random = seed.rng()
    with Ranks(3, make=make, **SIZES, **options) as ranks:
        batches = [draw(random, 8, 32, 4, 2, BLOCK) for _ in ranks.parts]

        def run(part: AllToAll, rank: int) -> None:
            mine = batches[rank]
            for is_bad in (rank == 0, False):
                got = part.dispatch(mine.x, mine.scales, mine.indices, mine.weights)
                y = np.ones((got.rows, 32), np.float32)
                if is_bad:
                    fail(part, kernel)
                    with pytest.raises(OutOfMemory):
                        part.combine(y, got)
                # Of sums the outputs had been offered before.
                out = part.combine_recv(got) if is_bad and kernel == "reduce" else part.combine(y, got)
                wanted = np.where(mine.indices >= 0, mine.weights, 0).sum(axis=1, keepdims=True)
                assert np.allclose(out, wanted), (rank, out)

        ranks.each(run)


@pytest.mark.parametrize("name", ["x", "indices", "weights"])
@pytest.mark.parametrize("node_size", [1, 2])
def test_what_is_not_aligned_is_refused_before_far_ranks_are_told(node_size: int, name: str) -> None:
    options = {"dtype": "float32", "scale_block": None, "out_dtype": "float32", "node_size": node_size}
    with Ranks(2, experts=2, hidden=16, top_k=1, max_tokens=4, **options) as ranks:

        def run(part: AllToAll, rank: int) -> None:
            for number in range(1, 7):
                tokens = 1 if number < 3 else 4
                given = {
                    "x": np.full((tokens, 16), 100 * rank + number, np.float32),
                    "indices": np.full((tokens, 1), 1 - rank, np.int32),
                    "weights": np.ones((tokens, 1), np.float32),
                }
                if number == 1 and rank == 0:
                    bad = given | {name: misaligned(given[name])}
                    with pytest.raises(xr.UsageError, match=f"{name} begins at 0x.*, must be at a multiple of 4 bytes"):
                        part.dispatch_send(bad["x"], None, bad["indices"], bad["weights"])
                got = part.dispatch(given["x"], None, given["indices"], given["weights"])
                assert got.x[:, 0].tolist() == [100 * (1 - rank) + number] * tokens
                assert np.array_equal(part.combine(got.x * 2, got), given["x"] * 2)

        ranks.each(run)
