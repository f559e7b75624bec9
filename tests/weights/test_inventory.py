"""Inventories: what they take, what they refuse and how they name it, and their form on the wire."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrail.errors import UsageError
from crossrail.weights import Holding, Inventory, RegionInfo
from crossrail.weights.inventory.holdings import HOLDING
from tests.weights.worlds import World, worlds

REGIONS = [RegionInfo(b"descriptor", 4096)]


def of(*holdings: Holding, role: Any = "target") -> Inventory:
    return Inventory.of(role, 3, REGIONS, holdings)


def test_holdings_come_back_as_they_were_given() -> None:
    given_ = [
        Holding("a", "bfloat16", (8, 6), ((2, 8), (0, 3)), 0, 16, strides=(12, 2)),
        Holding("a.scale", "float32", (2, 2), ((0, 1), (0, 2)), 0, 512, strides=(8, 4), scale_of="a", block=(4, 3)),
        Holding("scalar", "float32", (), (), 0, 1024, strides=()),
    ]

    assert list(of(*given_).holdings) == given_


def test_packed_is_the_default() -> None:
    (holding,) = of(Holding.whole("a", "float32", (2, 3, 4), 0, 0)).holdings

    assert holding.strides == (48, 16, 4)


def test_empty_boxes_are_left_out() -> None:
    assert len(of(Holding("a", "float32", (4,), ((4, 4),), 0, 0)).rows) == 0


@pytest.mark.parametrize(
    ("holding", "text"),
    [
        (Holding("a", "float31", (4,), ((0, 4),), 0, 0), "float31"),
        (Holding("a", "float32", (4,), ((0, 5),), 0, 0), "'a': box"),
        (Holding("a", "float32", (4,), ((-1, 4),), 0, 0), "'a': box"),
        (Holding("a", "float32", (4,), ((3, 2),), 0, 0), "'a': box"),
        (Holding("a", "float32", (0,), ((0, 4),), 0, 0), r"'a': box .* not in the shape \(0,\)"),
        (Holding("a", "float32", (4, 4), ((0, 4),), 0, 0), "'a': box"),
        (Holding("a", "float32", (1,) * 6, ((0, 1),) * 6, 0, 0), "'a': shape"),
        (Holding("a", "float32", (4,), ((0, 4),), 1, 0), "'a': region 1"),
        (Holding("a", "float32", (4,), ((0, 4),), 0, 4084), "'a': ends behind its region, at 4100"),
        (Holding("a", "float32", (4,), ((0, 4),), 0, -4), "'a': offset"),
        (Holding("a", "float32", (4, 4), ((0, 4), (0, 4)), 0, 0, strides=(4, 16)), "'a': .*transposed"),
        (Holding("a", "float32", (4, 4), ((0, 4), (0, 4)), 0, 0, strides=(32, 8)), "'a': innermost"),
        (Holding("a", "float32", (4, 4), ((0, 4), (0, 4)), 0, 0, strides=(4,)), "'a': strides"),
        (Holding("a", "float32", (1 << 40, 1 << 40), ((0, 1), (0, 1)), 0, 0), "'a': has too many"),
        (Holding("s", "bfloat16", (1,), ((0, 1),), 0, 0, scale_of="a", block=(4,)), "'s': scales must be float32"),
        (Holding("s", "float32", (1,), ((0, 1),), 0, 0, scale_of="a", block=(0,)), "'s': .*blocks"),
        (Holding("s", "float32", (1,), ((0, 1),), 0, 0, scale_of="a"), "'s': block"),
    ],
)
def test_malformed_holding_refused_by_name(holding: Holding, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        of(holding)


def test_region_longer_than_any_refused() -> None:
    with pytest.raises(UsageError, match="at most"):
        Inventory.of("target", 0, [RegionInfo(b"", 1 << 50)], [])


def test_unknown_role_refused() -> None:
    with pytest.raises(UsageError, match="role='both'"):
        of(role="both")


@given(worlds())
def test_wire_keeps_everything(world: World) -> None:
    for inventory in (*world.inventories[0], *world.inventories[1]):
        again = Inventory.from_bytes(inventory.to_bytes())
        assert list(again.holdings) == list(inventory.holdings)
        assert (again.role, again.rank, again.regions) == (inventory.role, inventory.rank, inventory.regions)


@given(st.data())
def test_damaged_wire_is_refused_or_still_an_inventory(data: st.DataObject) -> None:
    wire = bytearray(
        of(Holding.whole("a", "bfloat16", (8, 6), 0, 64), Holding.whole("b", "float32", (4,), 0, 0)).to_bytes()
    )
    for _ in range(data.draw(st.integers(1, 4))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))

    try:
        again = Inventory.from_bytes(bytes(wire))
    except UsageError:
        return
    for row in again.rows:
        assert (row["start"] >= 0).all() and (row["start"] < row["stop"]).all() and (row["stop"] <= row["shape"]).all()
        last = int(row["offset"]) + sum(
            int(stride) * (int(stop) - int(start) - 1)
            for stride, start, stop in zip(row["strides"], row["start"], row["stop"], strict=True)
            if stop - start > 1
        )
        assert last < again.regions[row["region"]].nbytes


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("version", 2, "version 2"),
        ("rows", b"123", "bytes of rows"),
        ("rank", -1, "not an inventory"),
        ("role", "x", "not an inv"),
    ],
)
def test_wire_of_another_kind_refused(field: str, value: object, text: str) -> None:
    wire = msgspec.msgpack.decode(of().to_bytes())
    wire[field] = value

    with pytest.raises(UsageError, match=text):
        Inventory.from_bytes(msgspec.msgpack.encode(wire))


def test_rows_of_another_dtype_refused() -> None:
    with pytest.raises(UsageError, match="HOLDING"):
        Inventory("target", 0, REGIONS, [], [], np.zeros(1))
    with pytest.raises(UsageError, match="names no parameter"):
        Inventory("target", 0, REGIONS, [], [], np.zeros(1, HOLDING))


class Name(str):
    """A text of a class of its own."""


@pytest.mark.parametrize("text", [np.str_, Name])
def test_numbers_and_texts_of_other_classes_travel_as_pythons(text: type) -> None:
    values = Holding.whole(text("w"), "float8_e4m3fn", (4, 4), 0, 0, mesh=text("m"))
    scales = Holding.whole(text("s"), "float32", (1, 1), 0, 64, scale_of=text("w"), block=(4, 4))
    inventory = Inventory.of("target", np.int64(3), [RegionInfo(b"", 1024)], [values, scales])

    assert list(Inventory.from_bytes(inventory.to_bytes()).holdings) == list(inventory.holdings)
    assert type(inventory.rank) is int and {type(name) for name in (*inventory.names, *inventory.meshes)} == {str}


@pytest.mark.parametrize("rank", [True, 1.0, "1", -1, None])
def test_rank_that_is_none_is_refused(rank: Any) -> None:
    with pytest.raises(UsageError, match=f"rank={rank!r} must be a whole number"):
        Inventory.of("target", rank, [], [])
