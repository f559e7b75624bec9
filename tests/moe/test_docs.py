"""The documentation's table of memory is what would be allocated."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from crossrail.errors import UsageError
from crossrail.moe import AllToAll, memory_bounds
from crossrail.moe.bounds import Bounds, private_rows
from crossrail.moe.config import ITEM_BYTES, Config
from crossrail.moe.links.board import PARITIES, BoardLayout
from crossrail.moe.links.far_memory import FarMemory
from crossrail.moe.meeting import make_layout
from tests.moe.ranks import Ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "moe-inside.md"
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
        return f"{(BoardLayout(config, 0).nbytes + PARITIES * config.output_rows[0] * config.x_row_bytes) / 1e9:.2f}"

    assert (grouped, bounded, masked) == (needed("grouped", None), needed("grouped", 1.5), needed("masked", None))


def test_the_table_is_there() -> None:
    assert len(MEMORY) == 6


# ---- the formulas, as they stand there

SMALL: dict[str, Any] = {
    "world": 6, "experts": 9, "hidden": 48, "top_k": 3, "max_tokens": 7, "dtype": "bfloat16", "scale_block": None,
    "out_dtype": "float32", "private_tokens": None, "padding": 1, "layout": "grouped", "node_size": 2, "dp_size": 1,
    "capacity_factor": None, "on_lost": "raise",
}  # fmt: skip
DECODE: dict[str, Any] = SMALL | {
    "world": 2, "experts": 256, "hidden": 7168, "top_k": 8, "max_tokens": 128, "dtype": "float8_e4m3fn",
    "scale_block": 128, "out_dtype": "bfloat16", "node_size": 1,
}  # fmt: skip
VARIANTS: list[dict[str, Any]] = [
    SMALL,
    SMALL | {"padding": 4, "experts": 14},
    SMALL | {"experts_per_rank": [0, 5, 1, 1, 2, 0], "padding": 2},
    SMALL | {"private_tokens": 40, "dtype": "float8_e4m3fn", "scale_block": 10},
    DECODE,
    DECODE | {"world": 64, "node_size": 8, "padding": 16},
    SMALL | {"node_size": [4, 1, 1]},
]


def formula(name: str, known: dict[str, int]) -> int:
    """What the page has for it, with these letters. Its dots are products; some names have several words."""
    found = re.search(rf"^{name} +=(.*?)(?:, each| {{3,}}|, up to|,  F = |$)", PAGE.read_text(), re.MULTILINE)
    assert found is not None, name
    text = found[1].strip().replace("·", "*").replace("bytes of ", "bytes_of_").replace("far ", "far_")
    return int(eval(text, {"__builtins__": {}, "min": min, "max": max, "ceil": math.ceil}, known))


def letters(config: Config, far_groups: int) -> dict[str, int]:
    """Those of the page."""
    tokens, top_k, local = config.max_tokens, config.top_k, max(config.experts_per_rank or ())
    most = min(top_k, local)
    return {
        "T": tokens, "K": top_k, "E": config.experts, "p": config.padding, "R": config.world, "G": config.groups,
        "N": config.groups * tokens, "L": local, "m": most, "F": min(local, config.groups * tokens * most),
        "hidden": config.hidden, "scale_block": config.scale_block or 1, "stride": config.stride_bytes,
        "bytes_of_dtype": ITEM_BYTES[config.dtype], "bytes_of_out_dtype": ITEM_BYTES[config.out_dtype],
        "rows": max(config.output_rows), "far_groups": far_groups,
        "far_rows": far_groups * max(private_rows(config), tokens * most),
    }  # fmt: skip


@pytest.mark.parametrize("arguments", VARIANTS, ids=str)
def test_formulas_are_what_is_allocated(arguments: dict[str, Any]) -> None:
    """But for rounding up, which the page says: boards to pages, far memory to 64 bytes."""
    config = Config(**arguments)
    layout = make_layout(config, config.nodes_given or (0,) * config.world)
    far_groups = max(layout.far_groups(rank) for rank in range(config.world))
    known, memory = letters(config, far_groups), memory_bounds(**arguments)
    assert formula("rows", known) == max(config.output_rows) == memory.output_rows
    assert 0 <= memory.board_bytes - formula("board", known) <= PARITIES * 4 * 4096 + 4096
    if config.scale_block is not None:
        assert 0 <= memory.output_bytes - formula("output", known) <= PARITIES * 2 * 4096
        assert formula("stride", known) <= config.stride_bytes < formula("stride", known) + 16
    assert 0 <= memory.far_bytes - formula("far", known) <= PARITIES * 64 * (config.world + 1 + 6)
    far = FarMemory.of(config, layout)
    assert far.bounds == Bounds.of(config, far_groups)
    assert memory.far_bytes == far.rows.nbytes + far.routes.nbytes


def test_the_example_of_far_memory_is_what_the_page_says() -> None:
    assert f"far from each other: {memory_bounds(**DECODE).far_bytes / 1e6:.0f} MB" in PAGE.read_text()


@pytest.mark.parametrize("node_size", [2, 1])
def test_memory_of_a_rank_is_what_it_says_and_what_was_foretold(node_size: int, nothing_leaks: None) -> None:
    arguments = {name: value for name, value in SMALL.items() if name != "world"}
    arguments |= {"max_tokens": 2000, "node_size": node_size}
    memory = memory_bounds(world=2, **arguments)
    with Ranks(2, **arguments) as ranks:
        part: AllToAll = ranks.parts[0]
        far = part._far
        assert memory.board_bytes == part._board.region.nbytes
        assert memory.output_bytes == part._inbox.nbytes
        assert memory.far_bytes == (0 if far is None else far.rows.nbytes + far.routes.nbytes)
        assert memory.total_bytes == memory.board_bytes + memory.output_bytes + memory.far_bytes
        said = part.explain()
        assert f"board {memory.board_bytes / 1e6:.1f} MB" in said
        assert ("share no memory" in said) == (far is not None)
        assert far is None or f"rows {far.rows.nbytes / 1e6:.1f} MB" in said


@pytest.mark.parametrize("layout", ["grouped", "masked"])
@pytest.mark.parametrize("node_size", [4, 2, 1])
def test_memory_of_ranks_that_have_more_experts_and_fewer(node_size: int, layout: str, nothing_leaks: None) -> None:
    split = [3, 0, 1, 5]
    arguments = {name: value for name, value in SMALL.items() if name != "world"}
    arguments |= {"max_tokens": 500, "experts_per_rank": split, "node_size": node_size, "layout": layout}
    with Ranks(4, **arguments) as ranks:
        for rank, part in enumerate(ranks.parts):
            memory = memory_bounds(world=4, rank=rank, **arguments)
            assert memory.board_bytes == part._board.region.nbytes
            assert memory.output_bytes == part._inbox.nbytes
            assert memory.output_rows == 4 * 500 * (min(3, split[rank]) if layout == "grouped" else split[rank])
    assert memory_bounds(world=4, **arguments) == memory_bounds(world=4, rank=3, **arguments)
    wrong: Any = "3"
    with pytest.raises(UsageError, match="rank must be a whole number, not str"):
        memory_bounds(world=4, rank=wrong, **arguments)
    with pytest.raises(UsageError, match="rank is 4, must be one of 4"):
        memory_bounds(world=4, rank=4, **arguments)
