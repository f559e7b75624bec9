"""The link to one rank, whether or not it shares memory with us."""

from __future__ import annotations

from crossrail.moe.links.far import Far
from crossrail.moe.links.near import Near


def link_of(near: Near, far: Far | None, rank: int) -> Near | Far:
    """near, far: as of Peers."""
    return near if far is None or rank in near.ranks else far
