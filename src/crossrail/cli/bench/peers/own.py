"""crossrail itself, through its Python API like the other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from crossrail.cli.bench.peers.base import Pages, Role, Side, private_memory

if TYPE_CHECKING:
    import crossrail as xr

_DATA = 1
_MESSAGE = 2
_TIMEOUT_S = 60.0


class Crossrail(Side):
    """Every write carries an immediate, and the receiver counts them: it needs no further message."""

    def __init__(self, role: Role, pool_bytes: int, transport: str, private: bool = False) -> None:
        """private: ordinary memory, which the other process cannot map, instead of the engine's own."""
        super().__init__(role, pool_bytes)
        self._transport = transport
        self._private = private

    def open(self) -> bytes:
        """An engine and one region."""
        import crossrail as xr

        rails = 1 if self._transport == "shm" else ["127.0.0.1"]
        self._engine = xr.Engine(f"peers-{self.role}", transport=self._transport, rails=rails)
        if self._private:
            self._region = self._engine.register(private_memory(self.memory_bytes))
        else:
            self._region = self._engine.alloc(self.memory_bytes)
        self.memory = self._region.array()
        self._data = self._engine.imm_counter(_DATA)
        self._messages = self._engine.imm_counter(_MESSAGE)
        return self._region.descriptor.to_bytes()

    def meet(self, theirs: bytes) -> None:
        """The other's region."""
        import crossrail as xr

        self._there = xr.RegionDescriptor.from_bytes(theirs)
        if self.is_sender:
            self._engine.connect(self._there.owner)

    def post(self, src_offset: int, dst_offset: int, nbytes: int) -> xr.Transfer:
        """A write that counts."""
        return self._engine.submit_write(
            self._region, self._there, nbytes, src_offset=src_offset, dst_offset=dst_offset, imm=_DATA
        )

    def finish(self, handle: xr.Transfer) -> None:
        """The write is complete: in the target's memory."""
        handle.wait(_TIMEOUT_S)

    def end_of_stream(self) -> None:
        """Does nothing: the receiver counts."""

    def take_stream(self, places: Sequence[tuple[int, int]], nbytes: int, count: int, window: int) -> None:
        """Count."""
        self._data.wait(count, _TIMEOUT_S)

    def send_pages(self, page_bytes: int, src: Pages, dst: Pages) -> None:
        """Sends all pages in one call."""
        self._engine.submit_paged_writes(self._region, src, self._there, dst, page_bytes, imm=_DATA).wait(_TIMEOUT_S)

    def take_pages(self, page_bytes: int, dst: Pages) -> None:
        """Each page counts."""
        self._data.wait(len(dst), _TIMEOUT_S)

    def message(self, nbytes: int) -> None:
        """A write with another immediate."""
        self._engine.submit_write(
            self._region, self._there, nbytes, src_offset=self.outgoing, dst_offset=self.incoming, imm=_MESSAGE
        )

    def take(self, nbytes: int) -> None:
        """Waits for that one."""
        self._messages.wait(1, _TIMEOUT_S)

    def close(self) -> None:
        """The engine, and with it everything."""
        self._engine.close()
