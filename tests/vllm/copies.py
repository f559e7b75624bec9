"""What tests mix into vLLM's workers (`worker_extension_cls`), to look into their KV caches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch


class Copies:
    """Called by collective_rpc. Raises AssertionError, which ends the test."""

    model_runner: Any

    def expect_copies(self, blocks: int, caches: int) -> None:
        """In each of so many KV caches, so many blocks are there twice, byte for byte. Those of zeros do not count."""
        found = {cache.data_ptr(): cache for cache in self.model_runner.kv_caches}
        assert len(found) == caches, f"{len(found)} KV caches"
        for cache in found.values():
            filled = (block.contiguous().view(torch.uint8) for block in cache if block.count_nonzero())
            contents = Counter(block.numpy().tobytes() for block in filled)
            assert [*contents.values()].count(2) == blocks, contents.values()
