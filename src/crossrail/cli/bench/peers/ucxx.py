"""UCXX, UCX's own Python binding: tagged sends and receives. It has no one-sided writes in Python.

Written from the API of ucxx 0.52 (ucxx._lib.libucxx, on which its asyncio layer stands: fewer steps, no event loop).
"""

from __future__ import annotations

from typing import Any

from crossrail.cli.bench.peers.base import Role, TwoSided, private_memory

_DATA, _MESSAGE = 1, 2


class Ucxx(TwoSided):
    """One worker, progressed by the calls that wait. No progress thread."""

    def __init__(self, role: Role, pool_bytes: int) -> None:
        super().__init__(role, pool_bytes)
        self._arrays: dict[tuple[int, int], Any] = {}

    def open(self) -> bytes:
        """A worker; its address."""
        from ucxx._lib import arr, libucxx

        self._api = libucxx
        self._array_of = arr.Array
        context = libucxx.UCXContext(feature_flags=(libucxx.Feature.TAG,))
        self._worker = libucxx.UCXWorker(context)
        self._data, self._message = libucxx.UCXXTag(_DATA), libucxx.UCXXTag(_MESSAGE)
        self.memory = private_memory(self.memory_bytes)
        address: bytes = libucxx.UCXAddress.create_from_worker(self._worker).tobytes()
        return address

    def meet(self, theirs: bytes) -> None:
        """An endpoint to the other's worker."""
        address = self._api.UCXAddress.create_from_buffer(theirs)
        self._endpoint = self._api.UCXEndpoint.create_from_worker_address(
            self._worker, address, endpoint_error_handling=False
        )

    def _array(self, offset: int, nbytes: int) -> Any:
        """The library's view of a place, made once."""
        key = offset, nbytes
        if key not in self._arrays:
            self._arrays[key] = self._array_of(self.memory[offset : offset + nbytes])
        return self._arrays[key]

    def post(self, src_offset: int, dst_offset: int, nbytes: int) -> Any:
        """Send."""
        return self._endpoint.tag_send(self._array(src_offset, nbytes), tag=self._data)

    def expect(self, dst_offset: int, nbytes: int) -> Any:
        """Receive."""
        return self._endpoint.tag_recv(self._array(dst_offset, nbytes), tag=self._data)

    def finish(self, handle: Any) -> None:
        """Progress until complete."""
        progress = self._worker.progress
        while not handle.completed:
            progress()
        handle.check_error()

    def message(self, nbytes: int) -> None:
        """Send with another tag."""
        self.finish(self._endpoint.tag_send(self._array(self.outgoing, nbytes), tag=self._message))

    def take(self, nbytes: int) -> None:
        """Receive that."""
        self.finish(self._endpoint.tag_recv(self._array(self.incoming, nbytes), tag=self._message))

    def close(self) -> None:
        """Endpoint, then worker."""
        self._endpoint.close_blocking()
        self._arrays = {}
        del self._endpoint, self._worker
