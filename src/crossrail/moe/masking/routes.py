"""The routes of a round without lost ranks (on_lost="mask"). Pure functions.

Who is missing in which half of which round, one word in memory that all map decides (native/moe/words.h); or, where not
all ranks share memory, those that are left (agreement.py).
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from crossrail.moe.arrays import Array
from crossrail.moe.config import Config


def sources_of(config: Config, rank: int, absent: Collection[int]) -> list[int | None]:
    """Of each group of ranks with the same tokens, whose rows come to this rank: the one of its own index in the group,
    where that is absent the first that is not; None: all are.
    """
    found: list[int | None] = []
    for first in range(0, config.world, config.dp_size):
        ranks = [first + rank % config.dp_size, *range(first, first + config.dp_size)]
        found.append(next((one for one in ranks if one not in absent), None))
    return found


def drop_routes(config: Config, routes: Array, silent: Collection[int]) -> Array:
    """The routes, int32 or int64 [tokens, top_k], with -1 where the expert is on one of these ranks."""
    if not silent:
        return routes
    is_dropped = np.isin(config.split.ranks_of(routes), list(silent)) & (routes >= 0)
    return np.where(is_dropped, -1, routes).astype(routes.dtype, copy=False)


def drop_results(config: Config, where: Array, indices: Array, absent: Collection[int]) -> Array:
    """Places of results as Kernels.reduce takes them, without those of absent ranks' experts. indices: the round's."""
    if not absent:
        return where
    is_dropped = np.isin(config.split.ranks_of(indices), list(absent)) & (indices >= 0)
    return np.where(is_dropped[..., None], np.int32(-1), where)
