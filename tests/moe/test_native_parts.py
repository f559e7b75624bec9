"""What the native parts of crossrail.moe are given and cannot use: refused, with all as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail import _core

LAYOUT = _core.moe.Layout(world=2, experts=4, top_k=2, max_tokens=4, node_of_rank=[0, 1])


def proxy_of(engine: xr.Engine, rank: int) -> _core.moe.Proxy:
    numbers: dict[str, Any] = dict.fromkeys(("rows_in", "results_in", "rows_out", "results_out"), 0)
    route_bytes = 64 + _core.moe.FAREWELL_BYTES
    memory = _core.moe.FarMemory(
        **numbers, routes_in=0, routes_out=2 * route_bytes, routes_parity_bytes=3 * route_bytes, rows_parity_bytes=0,
        route_bytes=route_bytes, stride_bytes=64, y_bytes=64,
    )  # fmt: skip
    return _core.moe.Proxy(engine, LAYOUT, rank, memory, engine.alloc(4096), engine.alloc(4096))


@pytest.mark.parametrize("rank", [2, 2**32 - 1])
def test_a_rank_that_is_not_there_is_refused(engine: xr.Engine, rank: int) -> None:
    with pytest.raises(xr.UsageError, match=f"rank is {rank}, must be less than world, 2"):
        proxy_of(engine, rank)
    proxy = proxy_of(engine, 0)
    for look in (lambda: proxy.routes_of(1, rank), lambda: proxy.why_left(rank)):
        with pytest.raises(xr.UsageError, match=f"rank is {rank}, must be less than world, 2"):
            look()
    assert proxy.why_left(1) == (None, b"")


def test_words_are_waited_for_as_before_where_a_rank_cannot_be_watched(engine: xr.Engine) -> None:
    words = _core.moe.Words(engine, [engine.alloc(4096).view()], [None], 0, 2, False)
    with pytest.raises(xr.UsageError, match="address bytes are malformed"):
        words.watch(b"none", [], False)  # type: ignore[arg-type]
    assert words.wait(1, 2, 0.05) == ("late", 0, [])
    assert words.publish(1, 2)
    assert words.wait(1, 2, 0.05) == ("ready", 1, [])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("expert", [4, 2**31 - 1])
def test_tokens_of_no_expert_are_not_counted(expert: int, dtype: type) -> None:
    assert np.asarray(_core.moe.node_tokens(LAYOUT, np.array([[0, -1], [3, 1]], dtype))).tolist() == [2, 1]
    with pytest.raises(xr.UsageError, match=f"indices: route 3 goes to expert {expert}, must be less than 4"):
        _core.moe.node_tokens(LAYOUT, np.array([[0, -1], [3, expert]], dtype))


def test_a_hash_of_routes_tells_tokens_apart_and_not_the_order_of_their_experts() -> None:
    routes = np.array([[0, 2], [1, -1], [2, 3]])
    known = _core.moe.hash_routes(routes)
    padded = np.vstack([routes, np.full((2, 2), -1)])
    assert {_core.moe.hash_routes(same) for same in (routes.astype(np.int32), routes[:, ::-1].copy(), padded)} == {
        known
    }
    swapped = routes[[1, 0, 2]]
    assert known not in {_core.moe.hash_routes(swapped), _core.moe.hash_routes(routes[:2]), 0}
    assert _core.moe.hash_routes(routes[:0]) == 0
