"""Layouts: where a row lies, what is refused, what two instances may differ in."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import crossrail as xr
from crossrail.kv import KvLayout, LayoutMismatch, compatible, differences
from tests.kv.worlds import POWERS, layout_pairs

GQA: dict[str, Any] = {"layers": 2, "pages": 5, "page_tokens": 3, "kv_heads": 4, "head_dim": 6, "dtype": "bfloat16"}
MLA = GQA | {"kind": "MLA", "kv_heads": 1}


@given(layouts=layout_pairs(), data=st.data())
def test_strides_and_view_name_the_same_row(layouts: tuple[KvLayout, KvLayout], data: st.DataObject) -> None:
    layout = layouts[0]
    memory = np.arange(layout.layer_bytes // layout.storage.itemsize).astype(layout.storage)
    part, page, head, token = (
        data.draw(st.integers(0, bound - 1))
        for bound in (layout.parts, layout.pages, layout.rank_heads, layout.page_tokens)
    )

    row = layout.layer_view(memory)[part, page, head, token]

    offset = (
        part * layout.part_stride + page * layout.page_stride + head * layout.head_stride + token * layout.token_stride
    )
    assert row.tobytes() == memory.tobytes()[offset : offset + layout.row_bytes]


@pytest.mark.parametrize(
    ("changes", "shape", "axes"),
    [
        # The shapes that engines allocate, and where (part, page, head, token, element) are in them.
        ({}, (2, 5, 4, 3, 6), (0, 1, 2, 3, 4)),
        ({"order": "NHD"}, (2, 5, 3, 4, 6), (0, 1, 3, 2, 4)),
        ({"separate_kv": False}, (5, 2, 4, 3, 6), (1, 0, 2, 3, 4)),
        ({"separate_kv": False, "order": "NHD"}, (5, 2, 3, 4, 6), (1, 0, 3, 2, 4)),
        ({"tp": 2}, (2, 5, 2, 3, 6), (0, 1, 2, 3, 4)),
        ({"tp": 8}, (2, 5, 1, 3, 6), (0, 1, 2, 3, 4)),
        (MLA, (5, 3, 6), None),
    ],
)
def test_memory_is_the_tensor_that_engines_allocate(
    changes: dict[str, Any], shape: tuple[int, ...], axes: tuple[int, ...] | None
) -> None:
    layout = KvLayout(**GQA | changes)
    tensor = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    assert tensor.nbytes == layout.layer_bytes

    view = layout.layer_view(tensor)

    expected = tensor.reshape(1, 5, 1, 3, 6) if axes is None else tensor.transpose(axes)
    assert np.array_equal(view, expected)
    assert np.shares_memory(view, tensor)


def test_bytes_of_a_known_model() -> None:
    """Qwen3-235B: 94 layers, 4 KV heads of 128, bf16: on each of 4 ranks a page of 128 tokens is 32 KiB."""
    layout = KvLayout(94, 1000, 128, 4, 128, "bfloat16", tp=4)

    assert (layout.block_bytes, layout.layer_bytes, layout.rank_bytes) == (32768, 65_536_000, 94 * 65_536_000)


@pytest.mark.parametrize("tp", POWERS)
@pytest.mark.parametrize("kv_heads", POWERS)
def test_ranks_hold_all_heads_evenly(tp: int, kv_heads: int) -> None:
    layout = KvLayout(**GQA | {"kv_heads": kv_heads, "tp": tp})

    held = [head for rank in range(tp) for head in layout.heads_of(rank)]

    assert held == sorted(held)
    assert [held.count(head) for head in range(kv_heads)] == [layout.replicas] * kv_heads
    assert layout.replicas == max(tp // kv_heads, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers=0 must be a whole number from 1 to 4096"),
        ({"pages": 2.0}, "pages=2.0"),
        ({"page_tokens": True}, "page_tokens=True"),
        ({"head_dim": -1}, "head_dim=-1"),
        ({"dtype": "float12"}, "dtype='float12' must be one of float64"),
        ({"kind": "MQA"}, "kind='MQA' must be one of MHA, GQA, MLA"),
        ({"order": ["HND"]}, "order="),
        ({"separate_kv": 1}, "separate_kv=1"),
        ({"kind": "MLA"}, "kv_heads=4 of kind MLA"),
        ({"kind": "PACKED", "order": "NHD"}, "order='NHD' of kind PACKED"),
        ({"kv_heads": 6, "tp": 4}, "one must be a multiple of the other"),
        ({"pages": 1 << 31, "page_tokens": 1 << 16}, "a layer has"),
    ],
)
def test_what_is_no_layout_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(xr.UsageError, match=message):
        KvLayout(**GQA | changes)


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype("float32"), "torch.float32"])
def test_dtypes_by_any_name(dtype: Any) -> None:
    assert KvLayout(**GQA | {"dtype": dtype}) == KvLayout(**GQA | {"dtype": "float32"})


def test_view_of_another_size_is_refused() -> None:
    with pytest.raises(xr.UsageError, match="memory has 8 bytes, a layer has 1440"):
        KvLayout(**GQA).layer_view(np.zeros(8, np.uint8))


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_out_of_range_is_refused(rank: int) -> None:
    with pytest.raises(xr.UsageError, match=r"must be in 0\.\.1"):
        KvLayout(**GQA, tp=2).heads_of(rank)


@given(layouts=layout_pairs())
def test_wire_form_comes_back(layouts: tuple[KvLayout, KvLayout]) -> None:
    assert KvLayout.from_wire(layouts[0].to_wire()) == layouts[0]


@pytest.mark.parametrize(
    "wire", [None, 5, [], {}, KvLayout(**GQA).to_wire() | {"more": 1}, KvLayout(**GQA).to_wire() | {"pages": "5"}]
)
def test_malformed_wire_form_is_refused(wire: Any) -> None:
    with pytest.raises(xr.UsageError):
        KvLayout.from_wire(wire)


def test_what_may_differ_does_not_matter() -> None:
    ours = KvLayout(**GQA)
    theirs = KvLayout(
        **GQA | {"pages": 9, "page_tokens": 7, "order": "NHD", "separate_kv": False, "tp": 8, "kind": "MHA"}
    )

    assert differences(ours, theirs) == []
    compatible(ours, theirs)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"page_tokens": 6}, ["page_tokens"]),
        ({"kind": "GQA"}, ["kind"]),
        ({"kind": "MLA", "kv_heads": 1, "page_tokens": 6}, ["kind", "kv_heads", "page_tokens"]),
        ({"pages": 9, "tp": 4}, []),
    ],
)
def test_packed_pages_cannot_be_cut(changes: dict[str, Any], names: list[str]) -> None:
    """Sizes in bytes agree in the first two: nothing but these words keeps wrong tokens away."""
    packed = GQA | {"kind": "PACKED"}

    found = differences(KvLayout(**packed), KvLayout(**packed | changes))

    assert [line.partition(":")[0] for line in found] == names


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"layers": 3, "dtype": "float16"}, ["layers", "dtype"]),
        ({"head_dim": 7}, ["head_dim"]),
        ({"kv_heads": 2}, ["kv_heads"]),
        ({"kind": "MLA", "kv_heads": 1}, ["kind", "kv_heads"]),
    ],
)
def test_what_must_not_differ_is_named_and_both_are_shown(changes: dict[str, Any], names: list[str]) -> None:
    ours, theirs = KvLayout(**GQA), KvLayout(**GQA | changes)

    assert [line.partition(":")[0] for line in differences(ours, theirs)] == names
    with pytest.raises(LayoutMismatch) as caught:
        compatible(ours, theirs)
    assert ours.describe() in str(caught.value) and theirs.describe() in str(caught.value)
    assert "?" not in str(caught.value)  # which errors say instead of a new line


def test_planes_are_layers_of_their_own() -> None:
    planes = KvLayout(**GQA | {"kind": "PLANES", "order": "NHD"})
    assert planes.parts == 1 and planes.page_stride == planes.block_bytes
    assert planes.rank_bytes * 2 == KvLayout(**GQA).rank_bytes
    assert differences(planes, KvLayout(**GQA))[0].startswith("kind:")
    assert not differences(planes, replace(planes, tp=2, pages=3))


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_joint_rows_can_be_cut_by_tokens_and_heads(order: str) -> None:
    """Unlike packed ones: V follows the K of its token, so page sizes and TP may differ."""
    joint = KvLayout(**GQA | {"kind": "JOINT", "order": order})
    assert joint.parts == 1 and joint.page_stride == joint.block_bytes
    assert differences(joint, KvLayout(**GQA))[0].startswith("kind:")
    assert differences(joint, replace(joint, kind="PACKED", order="HND"))[0].startswith("kind:")
    assert not differences(joint, replace(joint, tp=2, pages=3, page_tokens=joint.page_tokens * 2, order="HND"))
