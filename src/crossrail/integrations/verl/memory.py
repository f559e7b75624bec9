"""The memory of a rank during an update: two halves for buckets, and two for their tables."""

from __future__ import annotations

import torch

from crossrail import Engine
from crossrail._torch import wait_for_kernels
from crossrail.integrations.verl.buckets import ALIGN, DIGEST_BYTES, TABLE_BYTES

SHARES_MAX = 4096
HALF_TABLES_BYTES = 8 + TABLE_BYTES + (SHARES_MAX - 1) * DIGEST_BYTES  # length, table, digests of the other shares


class Memory:
    """Registered. bucket_bytes: of a half. device: of the buckets; tables are the host's. Threads: one.

    Close it before the engine, and when nobody uses views of it any more.
    """

    def __init__(self, engine: Engine, bucket_bytes: int, device: str) -> None:
        self.bucket_bytes = bucket_bytes // ALIGN * ALIGN
        self._buffer: torch.Tensor | None = torch.empty(2 * self.bucket_bytes, dtype=torch.uint8, device=device)
        self.devices = [str(self._buffer.device)] if self._buffer.is_cuda else []
        wait_for_kernels(self.devices)  # torch gives memory out again that kernels may still be using
        self.weights = engine.register(self._buffer)
        self.tables = engine.alloc(2 * HALF_TABLES_BYTES)

    def half(self, index: int) -> torch.Tensor:
        """The bytes of that half, as a view."""
        assert self._buffer is not None
        return self._buffer[index * self.bucket_bytes : (index + 1) * self.bucket_bytes]

    def close(self) -> None:
        """Releases the memory; nobody may write here any more. Idempotent."""
        self.weights.close()
        self.tables.close()
        self._buffer = None
        if self.devices:
            torch.cuda.empty_cache()  # what torch keeps of a device, others that need it now cannot have
