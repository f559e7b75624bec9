"""Ranks whose AllToAll is garbage-collected and was not closed: nobody waits for them."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.moe import AllToAll
from tests.moe.ranks import Ranks

SIZES: dict[str, Any] = {
    "experts": 2, "hidden": 32, "top_k": 1, "max_tokens": 4, "dtype": "float32", "scale_block": None,
    "out_dtype": "float32",
}  # fmt: skip
X, INDICES, WEIGHTS = np.ones((2, 32), np.float32), np.array([[0], [1]], np.int32), np.ones((2, 1), np.float32)


def whole_round(part: AllToAll) -> None:
    got = part.dispatch(X, None, INDICES)
    part.combine(got.x, got, WEIGHTS)


def drop_the_last(ranks: Ranks) -> None:
    ranks.parts.pop()
    gc.collect()


@pytest.mark.parametrize("node_size", [None, 1])
@pytest.mark.parametrize("waits", [True, False])
def test_who_waits_for_a_rank_that_was_dropped_is_told_at_once(node_size: int | None, waits: bool) -> None:
    with Ranks(2, **SIZES, node_size=node_size) as ranks:
        ranks.each(lambda part, _: whole_round(part))
        part = ranks.parts[0]
        opened = part.dispatch_send(X, None, INDICES) if waits else None

        with pytest.warns(ResourceWarning, match=r"^<AllToAll, rank 1 of 2, 2 experts> was not closed$"):
            drop_the_last(ranks)

        with pytest.raises(
            xr.UsageError, match=r"rank 1 .* has closed its AllToAll before its .*garbage-collected, and not closed"
        ):
            part.dispatch_recv(opened or part.dispatch_send(X, None, INDICES))


def test_one_whose_engine_was_closed_before_is_dropped_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    with Ranks(1, **SIZES) as ranks:
        ranks.engines[0].close()
        ranks.parts.clear()
        gc.collect()
    assert not recwarn.list


def test_one_that_was_closed_is_dropped_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    with Ranks(1, **SIZES) as ranks:
        ranks.parts.pop().close()
        gc.collect()
    assert not recwarn.list


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_one_cannot_be_copied_since_a_copy_that_is_dropped_would_end_its_rounds(
    copied: Callable[[Any], object],
) -> None:
    with Ranks(2, **SIZES, node_size=1) as ranks:
        ranks.each(lambda part, _: whole_round(part))
        with pytest.raises(TypeError, match=r"^<AllToAll, rank 0 .* cannot be copied or pickled: each rank has one"):
            copied(ranks.parts[0])
        gc.collect()
        ranks.each(lambda part, _: whole_round(part))
