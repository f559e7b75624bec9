"""Kernels of rounds on a stream, in torch's own operations."""

import pytest

from crossrail.moe.graph.reference import ReferenceGraphKernels
from tests.moe.kernels.graph_contract import GraphKernelsContract, GraphSubject


@pytest.fixture
def graph_subject() -> GraphSubject:
    return GraphSubject(ReferenceGraphKernels(), "cpu")


class TestTorchGraph(GraphKernelsContract):
    pass
