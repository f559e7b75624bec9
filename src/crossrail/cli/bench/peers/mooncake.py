"""Mooncake's Transfer Engine over its TCP transport, peers meeting by P2PHANDSHAKE.

Written from the Python API of mooncake-transfer-engine 0.3 (mooncake.engine) and its documentation.
"""

from __future__ import annotations

import json
from typing import Any

from crossrail.cli.bench.peers.base import Pages, Role, Side, private_memory

_HOST = "127.0.0.1"


class Mooncake(Side):
    """Writes by address into a segment. A completion is the sender's; the receiver looks at its memory, because the
    notification that the engine has is a remote call after the transfer, and slower than looking."""

    def __init__(self, role: Role, pool_bytes: int) -> None:
        super().__init__(role, pool_bytes)
        self._sent = 0
        self._taken = 0

    def open(self) -> bytes:
        """An engine, and its memory registered."""
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        self._check(self._engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", ""), "initialize")
        self.memory = private_memory(self.memory_bytes)
        self._base = self.memory.ctypes.data
        self._check(self._engine.register_memory(self._base, self.memory_bytes), "register_memory")
        return json.dumps({"base": self._base, "session": f"{_HOST}:{self._engine.get_rpc_port()}"}).encode()

    def meet(self, theirs: bytes) -> None:
        """Nothing to do: its segment opens with the first transfer."""
        there = json.loads(theirs)
        self._base_there, self._session = there["base"], there["session"]

    def post(self, src_offset: int, dst_offset: int, nbytes: int) -> int:
        """Begin one write."""
        batch: int = self._engine.transfer_submit_write(
            self._session, self._base + src_offset, self._base_there + dst_offset, nbytes
        )
        if batch == 0 or batch == -1:
            raise RuntimeError(f"transfer_submit_write returned {batch}")
        return batch

    def finish(self, handle: int) -> None:
        """Poll: 1 is done, 0 under way, below failed."""
        state = 0
        while state == 0:
            state = self._engine.transfer_check_status(handle)
        self._check(0 if state == 1 else state, "transfer_check_status")

    def send_pages(self, page_bytes: int, src: Pages, dst: Pages) -> None:
        """Sends all pages in one batch, blocking."""
        here = (src * page_bytes + self._base).tolist()
        there = (dst * page_bytes + self._base_there).tolist()
        self._check(
            self._engine.batch_transfer_sync_write(self._session, here, there, [page_bytes] * len(here)), "a batch"
        )

    def message(self, nbytes: int) -> None:
        """A write whose last byte is a changing number."""
        self._sent = self._sent % 255 + 1
        self.memory[self.outgoing + nbytes - 1] = self._sent
        self._check(
            self._engine.transfer_sync_write(
                self._session, self._base + self.outgoing, self._base_there + self.incoming, nbytes
            ),
            "a message",
        )

    def take(self, nbytes: int) -> None:
        """Look until that byte is the next number."""
        self._taken = self._taken % 255 + 1
        last, view = self.incoming + nbytes - 1, self.memory.data
        while view[last] != self._taken:
            pass

    def close(self) -> None:
        """The memory; the engine has no call to close it."""
        self._check(self._engine.unregister_memory(self._base), "unregister_memory")
        del self._engine

    def _check(self, code: Any, what: str) -> None:
        if code != 0:
            raise RuntimeError(f"{what} returned {code}")
