"""torch.distributed over gloo: isend and irecv between two ranks, over TCP."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from crossrail.cli.bench.peers.base import Role, TwoSided, private_memory

_DATA, _MESSAGE = 1, 2
_TIMEOUT = timedelta(seconds=60)


class Gloo(TwoSided):
    """A process group of two. Its own threads move the bytes."""

    def __init__(self, role: Role, pool_bytes: int) -> None:
        super().__init__(role, pool_bytes)
        self._tensors: dict[tuple[int, int], Any] = {}
        self._store = ""

    def open(self) -> bytes:
        """The receiver makes the file by which they meet."""
        import torch
        import torch.distributed as dist

        self._dist = dist
        torch.set_num_threads(1)
        self.memory = private_memory(self.memory_bytes)
        self._all = torch.from_numpy(self.memory)
        if not self.is_sender:
            descriptor, self._store = tempfile.mkstemp(prefix="crossrail-gloo-")
            os.close(descriptor)
        return self._store.encode()

    def meet(self, theirs: bytes) -> None:
        """The process group."""
        rank, store = (0, theirs.decode()) if self.is_sender else (1, self._store)
        self._other = 1 - rank
        self._dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=_TIMEOUT)

    def _tensor(self, offset: int, nbytes: int) -> Any:
        """A view of a place, made once."""
        key = offset, nbytes
        if key not in self._tensors:
            self._tensors[key] = self._all[offset : offset + nbytes]
        return self._tensors[key]

    def post(self, src_offset: int, dst_offset: int, nbytes: int) -> Any:
        """Send."""
        return self._dist.isend(self._tensor(src_offset, nbytes), self._other, tag=_DATA)

    def expect(self, dst_offset: int, nbytes: int) -> Any:
        """Receive."""
        return self._dist.irecv(self._tensor(dst_offset, nbytes), self._other, tag=_DATA)

    def finish(self, handle: Any) -> None:
        """Wait."""
        handle.wait()

    def message(self, nbytes: int) -> None:
        """Blocking send."""
        self._dist.send(self._tensor(self.outgoing, nbytes), self._other, tag=_MESSAGE)

    def take(self, nbytes: int) -> None:
        """Blocking receive."""
        self._dist.recv(self._tensor(self.incoming, nbytes), self._other, tag=_MESSAGE)

    def close(self) -> None:
        """The process group; the file is the receiver's."""
        self._dist.destroy_process_group()
        if self._store:
            Path(self._store).unlink(missing_ok=True)
