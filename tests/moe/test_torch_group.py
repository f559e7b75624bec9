"""Groups of torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import crossrail as xr
from crossrail.moe import TorchGroup


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
