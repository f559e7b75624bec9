"""One rank's update: each bucket is read from the pinned memory of its owner, one-sided, and handed to the worker.

    reads     | bucket 0 | bucket 1 | bucket 2 | ...      into one half of the buffer, then into the other
    worker               | bucket 0 | bucket 1 | ...      loads from the half that was read before

Ranks do not wait for each other between buckets. Each begins with another owner, so that all owners are read at once.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from crossrail._extras import needs
from crossrail.errors import CrossrailError, RemoteRegionClosed, UsageError, WaitTimeout
from crossrail.integrations.checkpoint_engine.errors import CheckpointUpdateFailed
from crossrail.integrations.checkpoint_engine.meeting import Done, Meeting
from crossrail.integrations.checkpoint_engine.store import P2PStore, give_up
from crossrail.integrations.checkpoint_engine.worker import Worker
from crossrail.regions import Region
from crossrail.transfers import Transfer

with needs(__name__, "'crossrail[checkpoint-engine]'"):
    import checkpoint_engine.ps as theirs
    import torch

_ALIGN = 256
_SLICE_S = 0.1


class Bucket(NamedTuple):
    """The part of one owner's memory that goes into half of the buffer. bucket: checkpoint-engine's, with ranges and
    items.
    """

    owner: int
    bucket: Any


def bucket_bytes_max(metas: Mapping[int, Any], free_bytes: int, mem_fraction: float) -> int:
    """As theirs without a buffer for the host's copies: PS_MAX_BUCKET_SIZE_GB (8), or as long as the longest tensor,
    and at most half of the part of the free memory that may be used. UsageError when the longest does not fit.
    """
    longest: int = max(
        m.aligned_size for items in metas.values() for of in items.memory_buffer_metas_list for m in of.metas
    )
    half = int(free_bytes * mem_fraction) // (2 * _ALIGN) * _ALIGN
    if longest > half:
        raise UsageError(
            f"the longest tensor has {longest} bytes, the buffer has two halves, and one can have at most {half}: "
            f"{free_bytes} bytes of the device are free, mem_fraction is {mem_fraction:g}"
        )
    limit = int(float(os.getenv("PS_MAX_BUCKET_SIZE_GB", "8")) * (1 << 30))
    return min(max(limit, longest), half)


def in_turns(metas: Mapping[int, Any], bucket_bytes: int, rank: int) -> list[Bucket]:
    """All buckets of all owners, theirs as they cut them: one of each owner in turns, other ranks with other owners."""
    of_owner: dict[int, list[Bucket]] = {}
    for _, owner, bucket in theirs._gen_h2d_buckets(metas, bucket_bytes, {}, {}, None):
        of_owner.setdefault(owner, []).append(Bucket(owner, bucket))
    first = rank % len(of_owner)
    queues = list(of_owner.values())
    queues = queues[first:] + queues[:first]
    return [queue[turn] for turn in range(max(map(len, queues))) for queue in queues if turn < len(queue)]


class Delivery:
    """The buffer, what is read into it, and the worker that loads from it. Threads: one.

    1. made: the buffer is allocated and registered. 2. run. 3. close: nothing is read into it any more. Idempotent.
    """

    def __init__(self, store: P2PStore, device: Any, metas: Mapping[int, Any], buckets: list[Bucket]) -> None:
        for of_owner in metas.values():
            store.revive(of_owner.p2p_store_addr)
        self._store = store
        self._device = device
        self._metas = metas
        self._buckets = buckets
        # Files that were pinned where they are have tensors of any length: views of types need an aligned second half.
        self._half_bytes = -(-max(each.bucket.size for each in buckets) // _ALIGN) * _ALIGN
        self._buffer: torch.Tensor | None = torch.empty(
            2 * self._half_bytes, dtype=torch.uint8, device=device.device_type
        )
        device.device_module.synchronize()  # torch gives memory out again that kernels may still be using
        self._handle: Any = theirs.reduce_tensor(self._buffer)
        self._region: Region | None = store.engine.register(self._buffer, access="local")
        self._reads: list[Transfer] = []

    def run(self, worker: Worker, meeting: Meeting) -> None:
        """Raises CheckpointUpdateFailed, and what reads raise."""
        self._begin(0)
        worker.send(self._handle)
        for at, (_, bucket) in enumerate(self._buckets):
            self._finish(at, meeting)
            worker.answer()  # it has loaded the bucket before, and the next may be read over that
            self._begin(at + 1)
            worker.send(theirs._to_named_tensor(bucket.items, at % 2 * self._half_bytes))
        worker.answer()
        meeting.exchange("loaded", Done())  # no worker finishes before all have everything
        worker.send(None)
        worker.answer()
        self.close()
        worker.send(None)
        worker.answer()

    def close(self) -> None:
        """WaitTimeout: something still is read into the buffer, which is kept."""
        reads, self._reads = self._reads, []
        give_up(reads)
        if self._region is None:
            return
        self._region.close()
        self._region = None
        self._buffer = self._handle = None
        module = self._device.device_module
        module.synchronize()
        gc.collect()
        module.ipc_collect()
        module.empty_cache()

    def _begin(self, at: int) -> None:
        """Begins to read that bucket, if there is one, into its half."""
        if at >= len(self._buckets):
            return
        assert self._region is not None
        owner, bucket = self._buckets[at]
        metas = self._metas[owner]
        offset = at % 2 * self._half_bytes
        for part in bucket.ranges:
            address = metas.memory_buffer_metas_list[part.idx].ptr + part.offset
            self._reads += self._store.submit_read(self._region, offset, metas.p2p_store_addr, address, part.size)
            offset += part.size

    def _finish(self, at: int, meeting: Meeting) -> None:
        """Returns when that bucket has come."""
        owner = self._buckets[at].owner
        deadline = time.monotonic() + meeting.timeout_s
        while self._reads:
            try:
                self._reads[-1].wait(_SLICE_S)
            except WaitTimeout:
                meeting.look()
                if time.monotonic() > deadline:
                    raise CheckpointUpdateFailed(
                        f"a bucket of rank {owner} has not come within {meeting.timeout_s:g} s"
                    ) from None
            except RemoteRegionClosed as error:
                gone = "that rank has unregistered, or replaced, the checkpoint since gather_metas or get_metas"
                raise CheckpointUpdateFailed(f"the weights of rank {owner} are gone, {gone}: {error}") from error
            except CrossrailError as error:
                raise CheckpointUpdateFailed(f"the weights of rank {owner} cannot be read: {error}") from error
            else:
                self._reads.pop()
        meeting.sign()
