"""The documentation's table of memory is what would be allocated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from crossrail.moe.config import Config
from crossrail.moe.links.board import PARITIES, BoardLayout

PAGE = Path(__file__).resolve().parents[2] / "docs" / "moe.md"
MEMORY = re.findall(
    r"^\| (\d+) \| (\d+) \| ([\d.]+) GB \| ([\d.]+) GB \| ([\d.]+) GB \|$", PAGE.read_text(), re.MULTILINE
)


@pytest.mark.parametrize(("tokens", "ranks", "grouped", "bounded", "masked"), MEMORY)
def test_memory_is_as_the_table_says(tokens: str, ranks: str, grouped: str, bounded: str, masked: str) -> None:
    def needed(layout: str, capacity_factor: float | None) -> str:
        config = Config(
            world=int(ranks), experts=256, hidden=7168, top_k=8, max_tokens=int(tokens), dtype="float8_e4m3fn",
            scale_block=128, out_dtype="bfloat16", private_tokens=None, padding=1, layout=layout, node_size=None,
            dp_size=1, capacity_factor=capacity_factor, on_lost="raise",
        )  # fmt: skip
        return f"{(BoardLayout(config).nbytes + PARITIES * config.rows_max * config.x_row_bytes) / 1e9:.2f}"

    assert (grouped, bounded, masked) == (needed("grouped", None), needed("grouped", 1.5), needed("masked", None))


def test_the_table_is_there() -> None:
    assert len(MEMORY) == 6
