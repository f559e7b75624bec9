"""Both sides of a hand-over of KV; `open_side` is of the module that uses them."""

import pytest

from tests.integrations.vllm_workers import Open, Side


@pytest.fixture
def p(open_side: Open) -> Side:
    return open_side("p")


@pytest.fixture
def d(open_side: Open) -> Side:
    return open_side("d")
