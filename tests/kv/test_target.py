"""Targets as they come over the wire, and the memory they name: what is no target is refused, whatever it is."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import crossrail as xr
from crossrail.kv import KvLayout, KvReceiver, KvSender, KvTarget, PagePool, RankMemory
from tests.conftest import EngineFactory

LAYOUT = KvLayout(layers=3, pages=8, page_tokens=8, kv_heads=4, head_dim=16, dtype="bfloat16", tp=2)

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=64),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=6,
)


@pytest.fixture
def wire(engine: xr.Engine) -> dict[str, Any]:
    receiver = KvReceiver(LAYOUT, [RankMemory.alloc(engine, LAYOUT)] * 2, PagePool(8, 8), tail_bytes=10)
    return receiver.reserve("request", 30).dispatch(LAYOUT, "prefiller").to_wire()


def places(wire: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value in it."""
    found = [path]
    if isinstance(wire, dict):
        found += [deeper for key, value in wire.items() for deeper in places(value, (*path, key))]
    elif isinstance(wire, (list, tuple)):
        found += [deeper for i, value in enumerate(wire) for deeper in places(value, (*path, i))]
    return found


def replaced(wire: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value there."""
    if not path:
        return value
    if isinstance(wire, dict):
        return wire | {path[0]: replaced(wire[path[0]], path[1:], value)}
    return [replaced(item, path[1:], value) if i == path[0] else item for i, item in enumerate(wire)]


@settings(max_examples=300)
@given(data=st.data())
def test_junk_anywhere_is_refused_or_a_target(wire: dict[str, Any], data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(places(wire)))
    spoiled = replaced(wire, path, data.draw(JUNK))

    try:
        target = KvTarget.from_wire(spoiled)
    except xr.UsageError:
        return
    assert KvTarget.from_wire(target.to_wire()).to_wire() == target.to_wire()
    assert len(target.pages) >= target.layout.pages_of(target.tokens) and len(target.ranks) == target.layout.tp


def test_the_fuzzer_reaches_every_field(wire: dict[str, Any]) -> None:
    """The canary: each of these mistakes is one that the fuzzer makes, and each is seen."""
    for path, value in [
        (("request",), ""),
        (("layout", "tp"), 3),
        (("tokens",), 1000),
        (("prefix_tokens",), -1),
        (("pages",), b"123"),
        (("tail_bytes",), 1.5),
        (("ranks",), []),
        (("ranks", 0, "imm"), None),
        (("ranks", 1, "regions"), []),
        (("ranks", 1, "regions", 0), b"no descriptor"),
        (("ranks", 0, "tail"), b"no descriptor"),
        (("ranks", 0, "tail_offset"), "0"),
    ]:
        assert path in places(wire)
        with pytest.raises(xr.UsageError):
            KvTarget.from_wire(replaced(wire, path, value))


@pytest.mark.parametrize("count", [0, 2, 4])
def test_memory_is_one_region_or_one_a_layer(engine: xr.Engine, count: int) -> None:
    with pytest.raises(xr.UsageError, match=f"{count} regions for 3 layers"):
        RankMemory(engine, LAYOUT, [engine.alloc(LAYOUT.layer_bytes)] * count)


@pytest.mark.parametrize("count", [1, 3])
def test_memory_of_another_size_is_refused(engine: xr.Engine, count: int) -> None:
    with pytest.raises(xr.UsageError, match="region 0 has 100 bytes, the layout has"):
        RankMemory(engine, LAYOUT, [engine.alloc(100)] * count)


def test_memory_that_exists_is_taken_as_it_is(engine: xr.Engine) -> None:
    tensors = [np.zeros((2, 8, 2, 8, 16), np.uint16) for _ in range(3)]  # K and V, pages, heads, tokens, elements

    memory = RankMemory.register(engine, LAYOUT, tensors)

    memory.layer(1)[1, 5, 0, 7, 3] = 77
    assert tensors[1][1, 5, 0, 7, 3] == 77


def test_a_sender_of_ranks_that_are_none_is_refused(open_engine: EngineFactory) -> None:
    engine = open_engine()
    memory = RankMemory.alloc(engine, LAYOUT)
    for ranks in ({}, {2: memory}, {-1: memory}):
        with pytest.raises(xr.UsageError, match=r"must be some of 0\.\.1"):
            KvSender(LAYOUT, ranks)
    with pytest.raises(xr.UsageError, match="rank 0 has another layout"):
        KvSender(KvLayout(**LAYOUT.to_wire() | {"order": "NHD"}), {0: memory})
