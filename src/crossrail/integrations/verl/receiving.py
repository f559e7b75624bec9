"""A rollout rank's update: it yields tensors as views of one half of its buffer while senders fill the other half."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import torch

from crossrail import ImmCounter
from crossrail._torch import wait_for_kernels
from crossrail.errors import CrossrailError
from crossrail.integrations.verl.buckets import DIGEST_BYTES, TABLE_BYTES, Piece, Table, decode, digest
from crossrail.integrations.verl.errors import VerlUpdateFailed
from crossrail.integrations.verl.memory import HALF_TABLES_BYTES, Memory
from crossrail.integrations.verl.waiting import Peers


class Receiver:
    """Receives one update. Threads: that of the event loop."""

    def __init__(self, memory: Memory, peers: Peers, filled: tuple[ImmCounter, ImmCounter], step: int | None) -> None:
        self._memory = memory
        self._peers = peers
        self._filled = filled
        self._step = step
        self._long: tuple[Piece, torch.Tensor] | None = None  # a tensor of which the next piece has not come

    async def run(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """(name, tensor) pairs. A tensor may be a view of the buffer: it is valid until the next pair is asked for.

        Raises VerlUpdateFailed. Whoever stops before the end has given up.
        """
        index = 0
        while True:
            half = index % 2
            await self._peers.until(self._filled[half], len(self._peers.ranks), f"bucket {index} of the weights")
            table = self._table(half, index)
            for piece in table.pieces:
                tensor = self._tensor(piece, half)
                if tensor is not None:
                    yield piece.name, tensor
            await asyncio.to_thread(wait_for_kernels, self._memory.devices)  # what was to be copied has been
            if table.is_last:
                if self._long is not None:
                    raise VerlUpdateFailed(f"the weights ended within {self._long[0].name!r:.80}")
                return
            free = [rank.halves[half] for rank in self._peers.ranks]
            await self._peers.done([self._peers.tell(self._memory.tables, immediates=free)], "bucket freed")
            index += 1

    def _table(self, half: int, index: int) -> Table:
        content = self._memory.tables.array()[half * HALF_TABLES_BYTES : (half + 1) * HALF_TABLES_BYTES]
        length = int.from_bytes(content[:8].tobytes(), "little")
        if length > TABLE_BYTES:
            raise VerlUpdateFailed(f"the table of bucket {index} has {length} bytes, at most {TABLE_BYTES} have room")
        encoded = content[8 : 8 + length].tobytes()
        expected = digest(encoded)
        for number, rank in enumerate(self._peers.ranks[1:]):
            place = 8 + TABLE_BYTES + number * DIGEST_BYTES
            if content[place : place + DIGEST_BYTES].tobytes() != expected:
                raise VerlUpdateFailed(
                    f"{rank.name} has other weights in bucket {index} than {self._peers.ranks[0].name}, or in another "
                    "order: all trainer ranks must yield the same"
                )
        try:
            table = decode(encoded, self._memory.bucket_bytes)
        except CrossrailError as error:
            raise VerlUpdateFailed(str(error)) from None
        if table.index != index:
            raise VerlUpdateFailed(f"bucket {table.index} came in the place of {index}")
        if self._step is not None and table.step is not None and table.step != self._step:
            raise VerlUpdateFailed(f"the weights of step {table.step} came, those of step {self._step} were expected")
        return table

    def _tensor(self, piece: Piece, half: int) -> torch.Tensor | None:
        """The tensor, once all of it has arrived."""
        dtype = getattr(torch, piece.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise VerlUpdateFailed(f"this torch has no dtype {piece.dtype!r:.40}, of {piece.name!r:.80}")
        if math.prod(piece.shape) * dtype.itemsize != piece.total:
            raise VerlUpdateFailed(
                f"{piece.total} bytes are no {piece.dtype} of shape {piece.shape}: {piece.name!r:.80}"
            )
        data = self._memory.half(half)[piece.at : piece.at + piece.nbytes]
        if piece.is_whole:
            return data.view(dtype).view(piece.shape)
        if self._long is None:
            self._long = (piece, torch.empty(piece.total, dtype=torch.uint8, device=data.device))
        first, whole = self._long
        if (piece.name, piece.total) != (first.name, first.total):
            raise VerlUpdateFailed(f"a piece of {piece.name!r:.80} came within {first.name!r:.80}")
        whole[piece.begin : piece.begin + piece.nbytes].copy_(data)
        if piece.begin + piece.nbytes < piece.total:
            return None
        self._long = None
        return whole.view(dtype).view(piece.shape)
