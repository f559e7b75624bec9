"""Generation with a model whose experts are distributed, where ranks take different numbers of steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossrail.cli.child import Child, Children

RANKS = 2
DEADLINE_S = 200.0


@pytest.mark.timeout(300)
def test_ranks_whose_answers_differ_in_length_generate_what_one_process_does(tmp_path: Path) -> None:
    with Children([Child("tests.moe.generating_rank", f"rank {rank}") for rank in range(RANKS)]) as ranks:
        common = {"ranks": RANKS, "meeting": str(tmp_path / "meeting")}
        same = ranks.each("generate", [common | {"rank": rank} for rank in range(RANKS)], DEADLINE_S)
    assert same == [[True, True]] * RANKS
