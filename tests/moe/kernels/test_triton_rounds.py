"""Rounds whose rows are in the memory of a GPU, which is played, by Triton's kernels."""

from __future__ import annotations

import pytest

from crossrail.moe.kernels.triton import TritonKernels
from crossrail.moe.rows import device
from tests.moe.played_rows import PlayedRows
from tests.moe.ranks import Ranks
from tests.moe.test_torch_gpu import CONFIG, TCP, batches_of, whole_round
from tests.support.fake_gpu import FakeGpu
from tests.support.seeds import Seed


def test_rounds_are_exact(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, seed: Seed) -> None:
    monkeypatch.setattr(PlayedRows, "gpu", gpu, raising=False)
    monkeypatch.setattr(device, "DeviceRows", PlayedRows)
    random = seed.rng()
    with Ranks(2, TCP, device="cuda:0", kernels=TritonKernels(checked=False), **CONFIG) as ranks:
        assert "kernels: triton" in ranks.parts[0].explain()
        for number in range(4):
            batches = batches_of(random, 2)
            ranks.each(lambda part, rank, b=batches, n=number: whole_round(part, rank, b, in_place=bool(n % 2)))
