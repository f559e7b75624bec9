"""Instances of inference systems, small: layouts that fit each other, and KV that says where it belongs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from crossrail.kv import KvLayout

Bytes = npt.NDArray[np.uint8]
POWERS = (1, 2, 4, 8)
HEADS = (1, 2, 3, 4, 6, 8)


@st.composite
def layout_pairs(draw: st.DrawFn, *, page_tokens_max: int = 12) -> tuple[KvLayout, KvLayout]:
    """A prefiller's layout and a decoder's, of one model; everything that may differ does."""
    kind = draw(st.sampled_from(["MHA", "GQA", "MLA", "PACKED", "JOINT"]))
    packed = {"page_tokens": draw(st.integers(1, page_tokens_max)), "order": "HND"} if kind == "PACKED" else {}
    model: dict[str, Any] = {
        "kind": kind,
        "layers": draw(st.integers(1, 3)),
        "kv_heads": 1 if kind == "MLA" else draw(st.sampled_from(HEADS)),
        "head_dim": draw(st.integers(1, 5)),
        "dtype": draw(st.sampled_from(["float8_e4m3fn", "bfloat16", "float32"])),
    }
    first, second = (  # of what is packed, only whole pages go
        KvLayout(
            **model,
            pages=draw(st.integers(1, 24)),
            page_tokens=packed.get("page_tokens") or draw(st.integers(1, page_tokens_max)),
            order=packed.get("order") or draw(st.sampled_from(["HND", "NHD"])),
            separate_kv=draw(st.booleans()),
            tp=draw(
                st.sampled_from([tp for tp in (*HEADS, 12) if tp % model["kv_heads"] * (model["kv_heads"] % tp) == 0])
            ),
        )
        for _ in range(2)
    )
    return first, second


@dataclass
class Request:
    """So many tokens, of which the decoder has the first already; pages of either side, in no order; ends of chunks."""

    tokens: int
    prefix_tokens: int
    src_pages: npt.NDArray[np.uint32]
    dst_pages: npt.NDArray[np.uint32]
    ends: list[int]

    @property
    def chunks(self) -> list[tuple[int, int]]:
        return list(zip([0, *self.ends], self.ends, strict=False))


@st.composite
def requests(draw: st.DrawFn, src: KvLayout, dst: KvLayout) -> Request:
    tokens = draw(st.integers(1, min(side.pages * side.page_tokens for side in (src, dst))))
    prefix_tokens = draw(st.integers(0, tokens // dst.page_tokens)) * dst.page_tokens
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ends = draw(st.sets(st.integers(1, tokens), max_size=4)) | {tokens}
    return Request(
        tokens,
        prefix_tokens,
        rng.permutation(src.pages)[: src.pages_of(tokens)].astype(np.uint32),
        rng.permutation(dst.pages)[: dst.pages_of(tokens)].astype(np.uint32),
        sorted(ends),
    )


def whole_kv(layout: KvLayout, tokens: int, seed: int) -> npt.NDArray[Any]:
    """Random KV of the whole model: shape (layers, parts, kv_heads, tokens, head_dim), of dtype layout.storage."""
    shape = (layout.layers, layout.parts, layout.kv_heads, tokens, layout.head_dim)
    nbytes = int(np.prod(shape)) * layout.storage.itemsize
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), layout.storage).reshape(shape)


def rows(layout: KvLayout, view: npt.NDArray[Any], pages: npt.NDArray[np.uint32], tokens: range) -> npt.NDArray[Any]:
    """These tokens of a request, out of a layer's view: shape (parts, rank_heads, tokens, head_dim). A copy."""
    at = np.arange(tokens.start, tokens.stop)
    picked = view[:, pages[at // layout.page_tokens], :, at % layout.page_tokens]  # tokens first: two index arrays
    return picked.transpose(1, 2, 0, 3)


def fill(
    layout: KvLayout, rank: int, layer: int, view: npt.NDArray[Any], pages: npt.NDArray[np.uint32], kv: npt.NDArray[Any]
) -> None:
    """Puts the tokens of whole_kv into a rank's layer, as a model would."""
    heads = layout.heads_of(rank)
    at = np.arange(kv.shape[3])
    mine = kv[layer, :, heads.start : heads.stop]
    view[:, pages[at // layout.page_tokens], :, at % layout.page_tokens] = mine.transpose(2, 0, 1, 3)


def bits(array: npt.NDArray[Any]) -> Bytes:
    """Its bytes: NaNs of one kind equal each other."""
    return np.frombuffer(array.tobytes(), np.uint8)
