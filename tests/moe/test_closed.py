"""An AllToAll that was closed and lives on: what it takes, and what it still says."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.moe import AllToAll, Dispatched
from tests.moe.ranks import Ranks
from tests.support.limits import eventually

TOKENS, HIDDEN = 512, 4096
SIZES: dict[str, Any] = {
    "experts": 2, "hidden": HIDDEN, "top_k": 2, "max_tokens": TOKENS, "dtype": "float32", "scale_block": None,
    "out_dtype": "float32", "layout": "masked",
}  # fmt: skip
SLACK_BYTES = 4 << 20  # of engines, which share memory, too


def shared_bytes() -> int:
    """Of this process's resident memory, what is shared: boards, and what far ranks write to."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem"))
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("node_size", [None, 1])
def test_it_keeps_no_memory_but_that_of_arrays_that_somebody_has(node_size: int | None, nothing_leaks: None) -> None:
    def run(part: AllToAll, rank: int) -> Dispatched:
        x = np.full((TOKENS, HIDDEN), rank, np.float32)
        got = part.dispatch(x, None, np.tile(np.arange(2), (TOKENS, 1)), np.ones((TOKENS, 2), np.float32))
        part.expert_output(got)[:] = 1
        part.combine(part.expert_output(got), got)
        return got

    before = shared_bytes()
    with Ranks(2, **SIZES, node_size=node_size) as ranks:
        got = ranks.each(run)
        said = [(part.explain(), part.stats(), part.masked) for part in ranks.parts]
        memories = [weakref.ref(part._inbox._bytes) for part in ranks.parts]
        assert shared_bytes() > before + 4 * SLACK_BYTES
        for part in ranks.parts:
            part.close()
        eventually(lambda: shared_bytes() < before + SLACK_BYTES, "shared memory is released")
        np.testing.assert_array_equal(got[0].x[:: 2 * TOKENS - 1], np.repeat([[0], [1]], HIDDEN, 1))
        got.clear()
        assert all(memory() is None for memory in memories)
        assert [(part.explain(), part.stats(), part.masked) for part in ranks.parts] == said


def test_its_calls_say_that_it_is_closed(nothing_leaks: None) -> None:
    with Ranks(1, **SIZES) as ranks:
        part = ranks.parts[0]
        opened = part.dispatch_send(np.ones((1, HIDDEN), np.float32), None, np.zeros((1, 2), int) - 1)
        other = part.dispatch(np.ones((1, HIDDEN), np.float32), None, np.zeros((1, 2), int) - 1)
        part.close()
        calls = [
            lambda: part.arriving(opened),
            lambda: part.advance(opened),
            lambda: part.expert_output(other),
            lambda: part.check_combine(other, np.ones((1, 2), np.float32)),
            lambda: part.combine(other.x, other),
            lambda: part.dispatch_recv(opened),
        ]
        for call in calls:
            with pytest.raises(xr.UsageError, match=r"^this AllToAll is closed$"):
                call()
        assert part.open_rounds == ()
