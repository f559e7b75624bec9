"""Kernels of rounds on a stream, in Triton: the same cases, on the GPU if there is one, else in its interpreter."""

import pytest

from crossrail.moe.graph.triton import TritonGraphKernels
from tests.conftest import HAS_GPU
from tests.moe.kernels.graph_contract import GraphKernelsContract, GraphSubject


@pytest.fixture
def graph_subject() -> GraphSubject:
    return GraphSubject(TritonGraphKernels(), "cuda" if HAS_GPU else "cpu")


class TestTritonGraph(GraphKernelsContract):
    pass
