"""Groups of torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import crossrail as xr
from crossrail.moe import AllToAll, EngineGroup, TorchGroup, memory_bounds


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_default_group_is_taken(alone: None) -> None:
    group = TorchGroup()
    assert (group.rank, group.size) == (0, 1)
    assert group.all_gather(b"some", 1.0) == [b"some"]


def test_a_group_that_this_process_is_not_in_is_refused(alone: None) -> None:
    other = dist.GroupMember.NON_GROUP_MEMBER  # what new_group() gives to those that are none of its ranks
    with pytest.raises(xr.UsageError, match="process_group is one that this process is not in"):
        TorchGroup(other)


def test_types_may_be_those_of_torch(engine: xr.Engine) -> None:
    sizes: dict[str, Any] = {"experts": 2, "hidden": 16, "top_k": 1, "max_tokens": 4, "scale_block": None}
    with (
        EngineGroup(engine, [engine.address]) as group,
        AllToAll(engine, group, dtype=torch.float16, out_dtype=torch.float32, **sizes) as part,
    ):
        assert (part.config.dtype, part.config.out_dtype) == ("float16", "float32")
    named = memory_bounds(world=1, dtype="float16", **sizes)
    assert memory_bounds(world=1, dtype=torch.float16, **sizes) == named


def test_other_types_of_torch_are_refused_by_name(engine: xr.Engine) -> None:
    with (
        EngineGroup(engine, [engine.address]) as group,
        pytest.raises(xr.UsageError, match="dtype is 'float64', must be one of float8_e4m3fn, bfloat16"),
    ):
        AllToAll(engine, group, experts=2, hidden=16, top_k=1, max_tokens=4, dtype=torch.float64)
