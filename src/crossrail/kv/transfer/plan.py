"""Which bytes of a request go where, as arrays for submit_paged_writes, and how many counts they make. Pure functions.

Both sides of a transfer compute the same plan from the two layouts and the request's name, and exchange no more than
page numbers. The unit of a transfer is the longest run of tokens that lies within one page on either side: the greatest
common divisor of the two page sizes. A unit is sent once, with all its rows, when its last token is computed or
the request ends in it: what lies behind the last token is whatever the source page holds there.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crossrail._options import check_kind, check_whole
from crossrail.errors import UsageError
from crossrail.kv.transfer.layout import KvLayout, compatible
from crossrail.kv.transfer.shard import Route, lanes, route

Pages = npt.NDArray[np.integer]


class PageWrites(NamedTuple):
    """One submit_paged_writes per layer: the same indices for all layers, offsets from the layer's first byte."""

    source: int
    target: int
    page_bytes: int
    src_pages: npt.NDArray[np.uint32]
    dst_pages: npt.NDArray[np.uint32]
    src_stride: int
    dst_stride: int
    src_offset: int
    dst_offset: int


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """How KV is sent from instances of one layout to those of another. Made by plan_transfer; immutable, any thread."""

    src: KvLayout
    dst: KvLayout
    unit_tokens: int
    routes: tuple[Route, ...]

    def ready(self, tokens: int, prefix_tokens: int, begin: int, end: int) -> range:
        """Units to send once the request's tokens begin..end-1 are computed, those before begin having been.

        tokens: all that are to arrive; prefix_tokens: of these, at the target already, a multiple of its page size.
        The ranges of successive chunks (one's end is the next one's begin, the last end is tokens) are a partition of
        the units behind the prefix.
        """
        _check_tokens(self.dst, tokens, prefix_tokens)
        if not 0 <= begin <= end <= tokens:
            raise UsageError(f"chunk {begin}..{end} of {tokens} tokens must be an ascending range in it")
        first = max(begin, prefix_tokens) // self.unit_tokens
        stop = end // self.unit_tokens if end < tokens else -(-tokens // self.unit_tokens)
        return range(first, max(first, stop))

    def writes(
        self, src_pages: Pages, dst_pages: Pages, units: range, sources: Collection[int] | None = None
    ) -> list[PageWrites]:
        """What each source rank writes for these units, per layer.

        src_pages, dst_pages: whole numbers, one dimension: the page of either side that holds the request's first
        page_tokens tokens, the next, and so on, from the request's first token on.
        sources: ranks to plan for, None: all.
        """
        if not units:
            return []
        _check_pages("src_pages", src_pages, self.src, units.stop * self.unit_tokens)
        _check_pages("dst_pages", dst_pages, self.dst, units.stop * self.unit_tokens)
        return [
            PageWrites(
                source=r.lane.source,
                target=r.lane.target,
                page_bytes=r.piece_bytes,
                src_pages=r.src.indices(src_pages, units),
                dst_pages=r.dst.indices(dst_pages, units),
                src_stride=r.src.stride,
                dst_stride=r.dst.stride,
                src_offset=r.src.offset,
                dst_offset=r.dst.offset,
            )
            for r in self.routes
            if sources is None or r.lane.source in sources
        ]

    def check_dst_pages(self, dst_pages: Pages, tokens: int) -> None:
        """UsageError unless these are pages of the target for so many tokens."""
        if tokens:
            _check_pages("dst_pages", dst_pages, self.dst, tokens)

    @cached_property
    def unit_counts(self) -> tuple[int, ...]:
        """How many counts one unit makes in one layer, for each target rank."""
        counts = [0] * self.dst.tp
        for r in self.routes:
            counts[r.lane.target] += r.pieces
        return tuple(counts)

    def describe(self) -> str:
        """The cost of one unit, in one line for people."""
        sizes = sorted({r.piece_bytes for r in self.routes})
        pieces = sum(self.unit_counts)
        return (
            f"TP {self.src.tp} -> {self.dst.tp}, {self.src.order} -> {self.dst.order}: {self.unit_tokens} tokens of a "
            f"layer go as {pieces} pieces of {' or '.join(map(str, sizes))} bytes"
        )


def plan_transfer(src: KvLayout, dst: KvLayout, request: str = "") -> TransferPlan:
    """The plan from a prefiller's layout to a decoder's. Raises LayoutMismatch when they do not fit.

    request: its name, which decides between source ranks that hold the same heads.
    """
    check_kind(src, "src", KvLayout, "a KvLayout")
    check_kind(dst, "dst", KvLayout, "a KvLayout")
    return _plan(src, dst, zlib.crc32(request.encode()) % src.replicas)


@lru_cache(maxsize=1024)
def _plan(src: KvLayout, dst: KvLayout, spread: int) -> TransferPlan:
    compatible(src, dst, sides=("prefiller", "decoder"))
    unit_tokens = gcd(src.page_tokens, dst.page_tokens)
    routes = tuple(route(src, dst, lane, unit_tokens) for lane in lanes(src, dst, spread))
    return TransferPlan(src, dst, unit_tokens, routes)


def expected_count(
    src: KvLayout, dst: KvLayout, rank: int, tokens: int, *, prefix_tokens: int = 0, tail: bool = False
) -> int:
    """How many immediates a request makes at one rank of the decoder: for all layers and chunks, and its tail.

    It depends neither on how the prompt was cut into chunks nor on which of several equal source ranks sent.
    """
    check_whole(rank=rank, tokens=tokens, prefix_tokens=prefix_tokens)
    plan = plan_transfer(src, dst)
    if not 0 <= rank < dst.tp:
        raise UsageError(f"rank={rank} must be in 0..{dst.tp - 1}")
    units = plan.ready(tokens, prefix_tokens, 0, tokens)
    return len(units) * plan.unit_counts[rank] * dst.layers + tail


def _check_tokens(dst: KvLayout, tokens: int, prefix_tokens: int) -> None:
    if tokens < 0:
        raise UsageError(f"tokens={tokens} must be 0 or more")
    if not 0 <= prefix_tokens <= tokens or prefix_tokens % dst.page_tokens:
        raise UsageError(
            f"prefix_tokens={prefix_tokens} must be a multiple of the target's {dst.page_tokens} tokens a page, and at "
            f"most the {tokens} tokens of the request"
        )


def _check_pages(name: str, pages: Pages, layout: KvLayout, tokens: int) -> None:
    if pages.ndim != 1 or pages.dtype.kind not in "iu":
        raise UsageError(f"{name} must be a one-dimensional numpy array of whole numbers")
    needed = layout.pages_of(tokens)
    if len(pages) < needed:
        raise UsageError(f"{name} has {len(pages)} pages, {needed} are needed")
    used = pages[:needed]
    if int(used.min()) < 0 or int(used.max()) >= layout.pages:
        raise UsageError(f"{name} has {used.min()}..{used.max()}, must be pages 0..{layout.pages - 1}")
