"""What a decoder tells a prefiller about a request's memory: everything that is needed to write there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from crossrail import RegionDescriptor
from crossrail.errors import UsageError
from crossrail.kv.transfer.layout import KvLayout

_REQUEST_BYTES_MAX = 256


@dataclass(frozen=True)
class RankTarget:
    """One rank of the decoder. imm: the immediate that each piece counts on; ranks of one engine share it.

    regions: of its KV: one with all layers, or one per layer. tail: where the request's tail goes; None: not to this
    rank.
    """

    imm: int
    regions: tuple[RegionDescriptor, ...]
    tail: RegionDescriptor | None = None
    tail_offset: int = 0

    def place(self, layout: KvLayout, layer: int) -> tuple[RegionDescriptor, int]:
        """The region that a layer is in, and the offset of its first byte."""
        if len(self.regions) == 1:
            return self.regions[0], layer * layout.layer_bytes
        return self.regions[layer], 0


@dataclass(frozen=True, eq=False)
class KvTarget:
    """Where the KV of a request goes.

    tokens: how many tokens' KV is to arrive; prefix_tokens: how many of them are already there.
    pages: uint32, the decoder's page for each of the request's pages, from the first token on.
    tail_bytes: length of the tail; 0: none. ranks: one for each rank of the layout; None for ranks that other processes
        of the decoder speak for, to which nothing is written by this target.
    """

    request: str
    layout: KvLayout
    tokens: int
    prefix_tokens: int
    pages: npt.NDArray[np.uint32]
    ranks: tuple[RankTarget | None, ...]
    tail_bytes: int = 0

    def __post_init__(self) -> None:
        check_request(self.request)
        layout = self.layout
        if len(self.ranks) != layout.tp:
            raise UsageError(f"request {self.request!r}: {len(self.ranks)} ranks are given, the layout has {layout.tp}")
        for name in ("tokens", "prefix_tokens", "tail_bytes"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < 1 << 40:
                raise UsageError(f"request {self.request!r}: {name}={value!r} must be a whole number from 0 on")
        if len(self.pages) < layout.pages_of(self.tokens):
            raise UsageError(
                f"request {self.request!r}: {len(self.pages)} pages are given, {self.tokens} tokens take "
                f"{layout.pages_of(self.tokens)}"
            )
        for rank in self.ranks:
            if rank is not None and len(rank.regions) not in (1, layout.layers):
                raise UsageError(
                    f"request {self.request!r}: {len(rank.regions)} regions for {layout.layers} layers: there must be "
                    "1 or one a layer"
                )

    def to_wire(self) -> dict[str, Any]:
        """Ints, strings, bytes, lists and dicts, for a message; the inverse of from_wire."""
        return {
            "request": self.request,
            "layout": self.layout.to_wire(),
            "tokens": self.tokens,
            "prefix_tokens": self.prefix_tokens,
            "pages": self.pages.astype("<u4").tobytes(),
            "tail_bytes": self.tail_bytes,
            "ranks": [
                None
                if rank is None
                else {
                    "imm": rank.imm,
                    "regions": [bytes(region) for region in rank.regions],
                    "tail": b"" if rank.tail is None else bytes(rank.tail),
                    "tail_offset": rank.tail_offset,
                }
                for rank in self.ranks
            ],
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> KvTarget:
        """Raises UsageError for anything that is not a target. The engine checks that its numbers fit the memory."""
        try:
            return cls(
                request=wire["request"],
                layout=KvLayout.from_wire(wire["layout"]),
                tokens=wire["tokens"],
                prefix_tokens=wire["prefix_tokens"],
                pages=np.frombuffer(wire["pages"], "<u4"),
                tail_bytes=wire["tail_bytes"],
                ranks=tuple(_rank_from_wire(rank) for rank in wire["ranks"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"malformed target of a request: {error!r:.200}") from None


def check_request(request: object) -> None:
    """Raises UsageError for what cannot name a request."""
    if not isinstance(request, str) or not 1 <= len(request.encode(errors="replace")) <= _REQUEST_BYTES_MAX:
        raise UsageError(f"request={request!r:.80} must be text of 1..{_REQUEST_BYTES_MAX} bytes")


def _rank_from_wire(wire: Mapping[str, Any] | None) -> RankTarget | None:
    if wire is None:
        return None
    imm, tail_offset = wire["imm"], wire["tail_offset"]
    if type(imm) is not int or type(tail_offset) is not int:
        raise UsageError(f"imm={imm!r:.40} and tail_offset={tail_offset!r:.40} must be whole numbers")
    return RankTarget(
        imm=imm,
        regions=tuple(RegionDescriptor.from_bytes(region) for region in wire["regions"]),
        tail=RegionDescriptor.from_bytes(wire["tail"]) if wire["tail"] else None,
        tail_offset=tail_offset,
    )
