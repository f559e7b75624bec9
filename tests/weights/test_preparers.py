"""Every preparer gives, byte for byte, what converting the whole checkpoint by hand does, and refuses alike."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from crossrail.weights.step.preparer import NumpyPreparer, Preparer
from tests.conftest import EngineFactory
from tests.weights.replay import IN_A_SHARD, refused, update_all

PREPARERS: dict[str, Callable[[], Preparer]] = {"numpy": NumpyPreparer}
if importlib.util.find_spec("torch"):
    from crossrail.weights.step.torch_preparer import TorchPreparer

    PREPARERS["torch"] = lambda: TorchPreparer("cpu")


@pytest.fixture(params=PREPARERS)
def preparer(request: pytest.FixtureRequest) -> Preparer:
    return PREPARERS[request.param]()


@pytest.mark.parametrize("gather", ["needed", "full"])
@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_targets_get_what_conversion_gives(
    gather: Any, count: int, dtype: str, preparer: Preparer, open_engine: EngineFactory
) -> None:
    update_all(open_engine(transport="null"), gather, count, dtype, preparer)


@pytest.mark.parametrize(("shape", "block", "at"), IN_A_SHARD, ids=str)
def test_what_is_not_finite_is_told_where_it_is_in_the_whole_parameter(
    shape: tuple[int, ...], block: tuple[int, ...], at: tuple[int, ...], preparer: Preparer, open_engine: EngineFactory
) -> None:
    error = refused(open_engine(transport="null"), shape, block, at, preparer)
    assert (error.parameter, error.index) == ("w", at)
    assert str(error).startswith(f"w[{', '.join(map(str, at))}] is nan" if at else "w is nan")
