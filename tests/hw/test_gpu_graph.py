"""What only a GPU can show: kernels captured in a CUDA graph do their work anew at each replay."""

import pytest
import torch

from crossrail.moe.kernels.reference import ReferenceKernels
from crossrail.moe.kernels.triton import TritonKernels

pytestmark = pytest.mark.hw


def test_a_captured_round_reads_what_is_there_at_replay() -> None:
    """pack, pull and reduce of 128 tokens at the decode shape, all experts on one rank."""
    tokens, hidden, top_k = 128, 7168, 8
    x = torch.zeros((tokens, hidden), dtype=torch.bfloat16, device="cuda")
    rows = torch.zeros((tokens, 2 * hidden), dtype=torch.uint8, device="cuda")
    pulled = torch.zeros((tokens * top_k, hidden), dtype=torch.bfloat16, device="cuda")
    table = torch.zeros((tokens * top_k, 2), dtype=torch.int32, device="cuda")
    where = torch.zeros((tokens, top_k, 2), dtype=torch.int32, device="cuda")
    weights = torch.zeros((tokens, top_k), device="cuda")
    out = torch.zeros_like(x)
    kernels = TritonKernels(checked=False)

    def one_round() -> None:
        kernels.pack(rows, x, None, None)
        kernels.pull(pulled, None, rows, table)
        kernels.reduce(out, [pulled], where, weights)

    one_round()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_round()
    for seed in range(3):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        x.copy_(torch.randn(x.shape, generator=generator, device="cuda"))
        weights.copy_(torch.rand(weights.shape, generator=generator, device="cuda"))
        places = torch.randperm(tokens * top_k, generator=generator, device="cuda").int()
        table[:, 0] = torch.arange(tokens * top_k, device="cuda") // top_k
        table[:, 1] = places
        where[..., 1] = places.reshape(tokens, top_k)
        graph.replay()
        wanted = torch.zeros_like(out)
        tokens_of = torch.stack([0 * where[..., 0], table[:, 0].reshape(tokens, top_k)], 2)
        ReferenceKernels().reduce(wanted, [x], tokens_of, weights)
        assert torch.equal(out, wanted)
