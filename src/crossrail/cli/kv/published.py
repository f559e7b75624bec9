"""Published figures of KV transfer (arXiv 2510.27656, second version, Table 3), to compare with.

Qwen3-235B at TP 4 on both sides, two EFA rails of 200 Gb/s per GPU, pages of 128 tokens, chunks of at most 16,384.
"""

from __future__ import annotations

from typing import NamedTuple

CHUNK_TOKENS = 16_384
PAGE_TOKENS = 128
RANKS = 4
KV_HEADS = 4
HEAD_DIM = 128
NIC = "2xefa200"  # as crossrail.sim names it


class Row(NamedTuple):
    """Figures of a prompt: milliseconds per layer. pages: of 32 KiB, of a layer of a chunk, over all ranks."""

    compute_ms: float
    transfer_ms: float
    pages: int


ROWS = {  # by tokens
    4 << 10: Row(2.267, 0.661, 256),
    8 << 10: Row(4.578, 0.952, 512),
    16 << 10: Row(9.860, 1.610, 1024),
    32 << 10: Row(13.295, 1.606, 1024),
    64 << 10: Row(20.344, 1.611, 1024),
    128 << 10: Row(34.895, 1.609, 1024),
}
