"""A trainer rank's update: it gathers tensors into one half of its buffer while the other half is being sent.

    trainer   | bucket 0 | bucket 1 | bucket 2 | ...   copies its share into one half, then into the other
    NIC                  | bucket 0 | bucket 1 | ...   to each of its rollout ranks, once they have freed that half

A share's bytes are in place before its table, or the digest of it, is written, and only that is counted.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator
from typing import Any

import torch

from crossrail import Engine, ImmCounter
from crossrail._torch import wait_for_kernels
from crossrail.integrations.verl.buckets import ALIGN, DIGEST_BYTES, TABLE_BYTES, Plan, Table, digest, encode
from crossrail.integrations.verl.memory import HALF_TABLES_BYTES, Memory
from crossrail.integrations.verl.pairing import Share
from crossrail.integrations.verl.waiting import Peers

log = logging.getLogger("crossrail.verl")


class Sender:
    """Sends one update. Threads: that of the event loop.

    dtype: what floating-point weights become, None: they stay as they are.
    """

    def __init__(
        self, engine: Engine, memory: Memory, peers: Peers, share: Share, free: tuple[ImmCounter, ImmCounter],
        dtype: torch.dtype | None, step: int | None,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._memory = memory
        self._peers = peers
        self._share = share
        self._first, self._end = share.bounds(memory.bucket_bytes, ALIGN)
        self._free = free
        self._dtype = dtype
        self._step = step
        self._plan = Plan(memory.bucket_bytes)
        self._index = 0
        self._under_way: list[asyncio.Task[None] | None] = [None, None]
        self.sent_bytes = 0

    async def run(self, weights: Any) -> None:
        """weights: (name, tensor) pairs, by an iterator of either kind. Raises VerlUpdateFailed, what that raises, and
        what else went wrong here, such as too little memory.

        Rollout ranks are told of a failure at once. If it was not the weights', the rest of them is still asked for:
        the other trainer ranks may be gathering them with us, and would wait. Not when this is cancelled.
        """
        failure: Exception | None = None
        try:
            async for name, weight in _each(weights):
                if failure is not None:
                    continue
                try:
                    await self._put(name, weight)
                except Exception as error:
                    failure = error
                    traceback.clear_frames(error.__traceback__)  # which hold tensors, maybe for want of memory
                    log.warning("an update of weights has failed; gathering the rest with the others: %s", error)
                    self._peers.give_up(self._memory.tables)
            if failure is not None:
                raise failure
            await self._send(is_last=True)
            for task in self._under_way:
                if task is not None:
                    await task
        except BaseException:
            if failure is None:
                self._peers.give_up(self._memory.tables)
            raise
        finally:
            tasks = [task for task in self._under_way if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _put(self, name: str, weight: torch.Tensor) -> None:
        weight = weight.detach()
        if self._dtype is not None and weight.is_floating_point():
            weight = weight.to(self._dtype)
        data = weight.contiguous().reshape(-1).view(torch.uint8)
        dtype = str(weight.dtype).removeprefix("torch.")
        # A GPU may read it later than copy_() returns, when who makes the weights has put the next one there.
        is_late = bool(self._memory.devices) and data.device.type == "cpu" and data.is_pinned()
        is_copied = False
        for piece in self._plan.place(name, dtype, tuple(weight.shape), data.numel()):
            if piece is None:
                await self._send(is_last=False)
                continue
            first, end = max(piece.at, self._first), min(piece.at + piece.nbytes, self._end)
            if first < end:
                begin = piece.begin + first - piece.at
                half = self._memory.half(self._index % 2)
                half[first:end].copy_(data[begin : begin + end - first], non_blocking=True)
                is_copied = True
        if is_late and is_copied:
            await asyncio.to_thread(wait_for_kernels, self._memory.devices)

    async def _send(self, *, is_last: bool) -> None:
        """Sends this half's contents; then the other one can be filled."""
        encoded = encode(Table(self._step, self._index, is_last, self._plan.pieces))
        used = self._plan.used_bytes
        self._plan.clear()
        await asyncio.to_thread(wait_for_kernels, self._memory.devices)  # all has been copied
        self._under_way[self._index % 2] = asyncio.create_task(self._deliver(self._index, used, encoded))
        self._index += 1
        before = self._under_way[self._index % 2]
        if before is not None:
            await before
        await asyncio.sleep(0)  # transfers just begun proceed while the model gathers its next tensors

    async def _deliver(self, index: int, used: int, encoded: bytes) -> None:
        half = index % 2
        what = f"bucket {index} of the weights"
        ranks = self._peers.ranks
        if index >= 2:
            await self._peers.until(self._free[half], len(ranks), f"{what}: no room for it")
        first, end = min(self._first, used), min(self._end, used)
        if first < end:
            at = half * self._memory.bucket_bytes + first
            writes = [
                self._engine.submit_write(
                    self._memory.weights, rank.weights_there, end - first, src_offset=at, dst_offset=at
                )
                for rank in ranks
            ]
            await self._peers.done(writes, what)
            self.sent_bytes += (end - first) * len(ranks)
        at, nbytes = self._write_table(half, encoded)
        tables = [
            self._engine.submit_write(
                self._memory.tables, rank.tables_there, nbytes, src_offset=at, dst_offset=at, imm=rank.halves[half]
            )
            for rank in ranks
        ]
        await self._peers.done(tables, f"{what}: its table")

    def _write_table(self, half: int, encoded: bytes) -> tuple[int, int]:
        """Into our tables; where it lies, here and there, and how long it is. Of a share but the first: its digest."""
        at = half * HALF_TABLES_BYTES
        if self._share.part == 0:
            content = len(encoded).to_bytes(8, "little") + encoded
        else:
            at += 8 + TABLE_BYTES + (self._share.part - 1) * DIGEST_BYTES
            content = digest(encoded)
        self._memory.tables.array()[at : at + len(content)] = bytearray(content)
        return at, len(content)


async def _each(weights: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
    if hasattr(weights, "__aiter__"):
        async for item in weights:
            yield item
    else:
        for item in weights:
            yield item
