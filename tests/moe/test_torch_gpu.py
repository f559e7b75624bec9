"""Rounds whose rows are in the memory of GPUs: of a double of the driver, which no CPU may touch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import crossrail as xr
from crossrail.errors import CrossrailError
from crossrail.moe import AllToAll, CapacityExceeded, Dispatched, EngineGroup
from crossrail.moe.rows import device
from crossrail.moe.rows.device import DeviceRows
from tests.conftest import EngineFactory
from tests.moe.batches import Batch, draw, expected_sums, expert_of_row, outputs, ranks_of
from tests.moe.played_rows import PlayedRows
from tests.moe.ranks import Ranks, errors_of, run_ranks
from tests.moe.test_rounds import check_dispatched, first_expert
from tests.support.fake_gpu import FakeGpu
from tests.support.limits import WAIT_S
from tests.support.seeds import Seed

HIDDEN, EXPERTS, TOP_K, TOKENS, BLOCK = 48, 7, 3, 12, 16
CONFIG: dict[str, Any] = {"experts": EXPERTS, "hidden": HIDDEN, "top_k": TOP_K, "max_tokens": TOKENS,
                          "scale_block": BLOCK, "out_dtype": "float32"}  # fmt: skip
TCP = {"transport": "tcp", "rails": ["127.0.0.1"]}


@pytest.fixture(autouse=True)
def played(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlayedRows, "gpu", gpu, raising=False)
    monkeypatch.setattr(device, "DeviceRows", PlayedRows)


def batches_of(random: np.random.Generator, ranks: int) -> list[Batch]:
    tokens = [int(count) for count in random.integers(0, TOKENS + 1, ranks)]
    return [draw(random, count, HIDDEN, EXPERTS, TOP_K, BLOCK, 0.1) for count in tokens]


def on_gpu(part: AllToAll, batch: Batch) -> tuple[Any, Any, Any, Any]:
    """x, scales, indices, weights as kernels see them."""
    arrays = batch.x, batch.scales, batch.indices, batch.weights
    x, scales, indices, weights = (torch.from_numpy(array).to(part._memory.device) for array in arrays)
    return x.view(torch.float8_e4m3fn), scales, indices, weights


def as_arrays(part: AllToAll, got: Dispatched) -> Dispatched:
    """What a kernel of the experts would find, once it runs."""
    part._memory.settle()
    x, scales = got.x.view(torch.uint8).cpu().numpy(), got.scales.cpu().numpy()
    return Dispatched(x, scales, got.counts.cpu().numpy(), got.offsets.cpu().numpy(), got.rows, got.round)


def answer(part: AllToAll, got: Dispatched, in_place: bool) -> None:
    seen = as_arrays(part, got)
    made = outputs(seen.x, expert_of_row(seen.counts, seen.offsets, first_expert(part), seen.rows))
    made = torch.from_numpy(made).to(part._memory.device)
    if in_place:
        y = part.expert_output(got)
        part._memory._launch(y.copy_, made)  # a kernel of the experts, which ends later
        part.combine_send(y, got)
    else:
        part.combine_send(made, got)


def whole_round(part: AllToAll, rank: int, batches: list[Batch], in_place: bool = False) -> None:
    x, scales, indices, weights = on_gpu(part, batches[rank])
    got = part.dispatch(x, scales, indices, weights)
    check_dispatched(as_arrays(part, got), batches, first_expert(part), part.config.padding)
    answer(part, got, in_place)
    sums = part.combine_recv(got)
    part._memory.settle()
    assert np.array_equal(sums.cpu().numpy(), expected_sums(batches[rank]))


@pytest.mark.parametrize("engine", [{}, TCP], ids=["shm", "tcp"])
@pytest.mark.parametrize("options", [{}, {"private_tokens": 1}, {"padding": 4}, {"proxy": "thread"}], ids=str)
def test_rounds_are_exact(gpu: FakeGpu, engine: dict[str, Any], options: dict[str, Any], seed: Seed) -> None:
    random = seed.rng()
    with Ranks(3, engine, device="cuda:0", **CONFIG, **options) as ranks:
        assert "rows: in memory of cuda:0" in ranks.parts[0].explain()
        copied = gpu.copies
        for number in range(6):
            batches = batches_of(random, 3)
            ranks.each(lambda part, rank, b=batches, n=number: whole_round(part, rank, b, in_place=bool(n % 2)))
        assert gpu.copies > copied


def test_one_rank_alone(seed: Seed) -> None:
    with Ranks(1, None, device="cuda:0", **CONFIG) as ranks:
        batches = batches_of(seed.rng(), 1)
        ranks.each(lambda part, rank: whole_round(part, rank, batches))


def test_memory_that_torch_has_given_out_before_is_zero_before_others_write_there(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, seed: Seed
) -> None:
    used = PlayedRows._empty_bytes

    def empty_bytes(self: PlayedRows, nbytes: int) -> Any:
        return used(self, nbytes).fill_(0xA5)

    monkeypatch.setattr(PlayedRows, "_empty_bytes", empty_bytes)
    gpu.set_vmm(has_vmm=False)
    batches = batches_of(seed.rng(), 2)
    with Ranks(2, TCP, device="cuda:0", **CONFIG) as ranks:
        for part in ranks.parts:
            assert "that torch gave" in part.explain()
            assert not part._peers.far.rows_bytes.any()
        ranks.each(lambda part, rank: whole_round(part, rank, batches))


def test_two_rounds_under_way(seed: Seed) -> None:
    random = seed.rng()

    def overlapped(part: AllToAll, rank: int, both: list[list[Batch]]) -> None:
        opened = [part.dispatch_send(*on_gpu(part, batches[rank])) for batches in both]
        received = []
        for batches, one in zip(both, opened, strict=True):
            received.append(part.dispatch_recv(one))
            check_dispatched(as_arrays(part, received[-1]), batches, first_expert(part), 1)
            answer(part, received[-1], in_place=True)
        sums = [part.combine_recv(got) for got in received]
        part._memory.settle()
        for batches, got in zip(both, sums, strict=True):
            assert np.array_equal(got.cpu().numpy(), expected_sums(batches[rank]))

    with Ranks(2, TCP, device="cuda:0", **CONFIG) as ranks:
        for _ in range(4):
            both = [batches_of(random, 2), batches_of(random, 2)]
            ranks.each(lambda part, rank, both=both: overlapped(part, rank, both))


def test_a_rank_in_host_memory_among_those_on_gpus(open_engine: EngineFactory, seed: Seed) -> None:
    batches = batches_of(seed.rng(), 2)
    engines = [open_engine(f"rank-{rank}", **TCP) for rank in range(2)]

    def run(rank: int) -> None:
        device = "cuda:0" if rank == 0 else None
        with EngineGroup(engines[rank], [engine.address for engine in engines]) as group:
            options = CONFIG | {"node_size": 1, "timeout_s": WAIT_S}
            with AllToAll(engines[rank], group, device=device, **options) as part:
                if device is not None:
                    whole_round(part, rank, batches)
                else:
                    mine = batches[rank]
                    got = part.dispatch(mine.x, mine.scales, mine.indices)
                    check_dispatched(got, batches, first_expert(part), 1)
                    made = outputs(got.x, expert_of_row(got.counts, got.offsets, first_expert(part), got.rows))
                    sums = part.combine(made, got, mine.weights)
                    assert np.array_equal(sums, expected_sums(mine))

    run_ranks(2, run)


def test_what_does_not_fit_is_refused_on_all_ranks_and_the_next_round_is_right(seed: Seed) -> None:
    random = seed.rng()
    with Ranks(2, TCP, device="cuda:0", capacity_factor=0.5, **CONFIG) as ranks:
        full = [draw(random, TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK) for _ in range(2)]

        def too_much(part: AllToAll, rank: int) -> None:
            x, scales, indices, _ = on_gpu(part, full[rank])
            part.dispatch(x, scales, torch.zeros_like(indices) + torch.arange(TOP_K, dtype=torch.int32))

        errors_of(ranks, too_much, CapacityExceeded)
        few = [draw(random, 1, HIDDEN, EXPERTS, 1, BLOCK) for _ in range(2)]
        few = [
            Batch(b.x, b.scales, np.pad(b.indices, ((0, 0), (0, 2)), constant_values=-1), np.ones((1, 3), "f4"))
            for b in few
        ]
        ranks.each(lambda part, rank: whole_round(part, rank, few))


def test_masked_ranks_are_left_out(seed: Seed) -> None:
    """Where ranks are masked each has two registrations of its own at the others', of host and of GPU memory."""
    batches = batches_of(seed.rng(), 3)
    with Ranks(3, TCP | {"heartbeat_s": 0.2}, device="cuda:0", on_lost="mask", **CONFIG) as ranks:
        ranks.each(lambda part, rank: whole_round(part, rank, batches))
        ranks.engines[2].close(0)

        def without(part: AllToAll, rank: int) -> None:
            if rank == 2:
                return
            mine = batches[rank]
            x, scales, indices, weights = on_gpu(part, mine)
            got = part.dispatch(x, scales, indices, weights)
            answer(part, got, in_place=True)
            sums = part.combine_recv(got)
            part._memory.settle()
            assert part.masked == (2,)
            kept = np.where(ranks_of(part.config.experts_per_rank, mine.indices) == 2, -1, mine.indices)
            assert np.array_equal(sums.cpu().numpy(), expected_sums(Batch(mine.x, mine.scales, kept, mine.weights)))

        ranks.each(without)


def test_arguments_that_are_wrong_are_named() -> None:
    def refused(match: str, **changes: Any) -> None:
        with Ranks(1, None, device="cuda:0", **CONFIG) as ranks:
            batch = draw(np.random.default_rng(1), 4, HIDDEN, EXPERTS, TOP_K, BLOCK)
            x, scales, indices, weights = on_gpu(ranks.parts[0], batch)
            arguments = {"x": x, "scales": scales, "indices": indices, "weights": weights} | changes
            with pytest.raises(xr.UsageError, match=match):
                ranks.parts[0].dispatch(**arguments)

    refused("x is ndarray, must be a tensor of torch on", x=np.zeros((4, HIDDEN), np.uint8))
    refused("x is on meta, must be on", x=torch.empty((4, HIDDEN), dtype=torch.float8_e4m3fn, device="meta"))
    refused("x is of type uint8, must be of float8_e4m3fn", x=torch.zeros((4, HIDDEN), dtype=torch.uint8))
    refused(r"scales has shape \[4, 2\], must have \[4, 3\]", scales=torch.zeros((4, 2)))
    refused("weights has strides", weights=torch.zeros((TOP_K, 4)).T)
    refused(r"indices has shape \[3, 3\], must have \[4, 3\]", indices=torch.zeros((3, TOP_K), dtype=torch.int32))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"device": "xpu:0"}, "device is 'xpu:0', must be one of NVIDIA's GPUs"),
        ({"device": "cuda:0", "node_size": 2}, "node_size is 2, must be 1 with a device"),
        ({"device": "cuda:0", "node_sums": True}, "node_sums is True, must be False with a device"),
    ],
    ids=str,
)
def test_what_cannot_be_on_a_gpu(options: dict[str, Any], match: str) -> None:
    with pytest.raises(xr.UsageError, match=match):
        Ranks(2, None, **CONFIG, **options)


def test_a_kernel_that_failed_is_told(seed: Seed) -> None:
    batches = batches_of(seed.rng(), 2)
    with Ranks(2, TCP, device="cuda:0", **CONFIG) as ranks:
        ranks.parts[0]._memory._launch(lambda: None)  # it may have no token to pack
        ranks.parts[0]._memory.stream.error = "CUDA error: an illegal memory access was encountered\nmore"
        with pytest.raises(CrossrailError, match="kernels on cpu: RuntimeError: CUDA error: an illegal memory access"):
            ranks.parts[0].dispatch_send(*on_gpu(ranks.parts[0], batches[0]))
        ranks.parts[0]._memory.stream.error = ""


def test_a_kernel_that_failed_keeps_no_rank_from_closing(seed: Seed) -> None:
    batches = batches_of(seed.rng(), 2)
    with Ranks(2, TCP, device="cuda:0", **CONFIG) as ranks:
        failed, other = ranks.parts
        opened = other.dispatch_send(*on_gpu(other, batches[1]))
        failed._memory._launch(lambda: None)
        failed._memory.stream.error = "CUDA error: an illegal memory access was encountered"
        with pytest.raises(CrossrailError, match="illegal memory access"):
            failed.close()
        with pytest.raises(xr.UsageError, match="closed"):
            other.dispatch_recv(opened)
        failed.close()


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, engine: xr.Engine) -> None:
    monkeypatch.undo()
    with EngineGroup(engine, [engine.address]) as group:
        with pytest.raises(xr.UsageError, match=r"device is 'cuda:0', and torch has no GPU here"):
            AllToAll(engine, group, device="cuda:0", **CONFIG)


def test_a_mapping_of_another_gpus_memory_is_seen_without_a_copy(
    gpu: FakeGpu, open_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an address torch would begin to use that GPU too, which takes hundreds of megabytes of it, and copy."""
    here, there = open_engine("here"), open_engine("there")
    region = there.alloc(4096, device="cuda:0")
    mapping = here.map(region.descriptor, WAIT_S, device="cuda:1")
    seen = SimpleNamespace(device=torch.device("cuda:1"), data_ptr=lambda: region.base)
    monkeypatch.setattr(torch, "from_dlpack", {mapping: seen}.get)
    monkeypatch.setattr(torch, "as_tensor", None)
    rows = object.__new__(PlayedRows)
    rows.device = seen.device
    assert DeviceRows._seen(rows, mapping) is seen
