"""MPICH through mpi4py: one-sided puts into a window, or sends and receives."""

from __future__ import annotations

from typing import Any

import numpy as np

from crossrail.cli.bench.peers.base import Side, TwoSided, private_memory

_DATA, _MESSAGE = 1, 2


class _Mpi(Side):
    """What both variants share: the communicator, and messages by MPI_Send and MPI_Recv."""

    def open(self) -> bytes:
        """MPI starts with its import, and ends with the process."""
        from mpi4py import MPI

        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        self._other = 1 - self._world.rank
        return b""

    def meet(self, theirs: bytes) -> None:
        """Does nothing: they are connected already."""

    def message(self, nbytes: int) -> None:
        """MPI_Send."""
        self._world.Send(self.memory[self.outgoing : self.outgoing + nbytes], self._other, _MESSAGE)

    def take(self, nbytes: int) -> None:
        """MPI_Recv."""
        self._world.Recv(self.memory[self.incoming : self.incoming + nbytes], self._other, _MESSAGE)

    def finish(self, handle: Any) -> None:
        """MPI_Wait."""
        handle.Wait()

    def close(self) -> None:
        """MPI_Finalize comes with the end of the process."""


class MpiSend(_Mpi, TwoSided):
    """MPI_Isend and MPI_Irecv."""

    def open(self) -> bytes:
        """Ordinary memory."""
        self.memory = private_memory(self.memory_bytes)
        return super().open()

    def post(self, src_offset: int, dst_offset: int, nbytes: int) -> Any:
        """Send."""
        return self._world.Isend(self.memory[src_offset : src_offset + nbytes], self._other, _DATA)

    def expect(self, dst_offset: int, nbytes: int) -> Any:
        """Receive."""
        return self._world.Irecv(self.memory[dst_offset : dst_offset + nbytes], self._other, _DATA)


class MpiPut(_Mpi):
    """MPI_Rput into memory of MPI_Win_allocate, which processes of one host share, in a passive epoch."""

    def open(self) -> bytes:
        """The window is collective: both open at once."""
        super().open()
        self._window = self._mpi.Win.Allocate(self.memory_bytes, 1, self._mpi.INFO_NULL, self._world)
        self.memory = np.frombuffer(self._window.tomemory(), np.uint8)
        self._window.Lock_all()
        return b""

    def post(self, src_offset: int, dst_offset: int, nbytes: int) -> Any:
        """Put. The request ends when the source may be used again."""
        source = self.memory[src_offset : src_offset + nbytes]
        return self._window.Rput(source, self._other, (dst_offset, nbytes, self._mpi.BYTE))

    def end_of_stream(self) -> None:
        """MPI_Win_flush: afterwards the bytes are there; a message says so."""
        self._window.Flush(self._other)
        super().end_of_stream()

    def take(self, nbytes: int) -> None:
        """MPI_Recv, and the window's memory as others wrote it."""
        super().take(nbytes)
        self._window.Sync()

    def close(self) -> None:
        """Collective, too."""
        self._window.Unlock_all()
        del self.memory
        self._window.Free()
