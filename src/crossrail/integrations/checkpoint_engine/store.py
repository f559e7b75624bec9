"""checkpoint-engine's P2PStore over an engine: other ranks read what a rank registered, one-sided, without Mooncake.

The real ParameterServer takes it too, for its updates of some ranks (`update(ranks=[...])`):

    import checkpoint_engine.ps
    from crossrail.integrations.checkpoint_engine import P2PStore
    checkpoint_engine.ps.P2PStore = P2PStore       # before a ParameterServer is made
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import crossrail as xr
from crossrail._extras import needs
from crossrail._options import check_seconds
from crossrail.errors import CrossrailError, UsageError, WaitTimeout
from crossrail.integrations.checkpoint_engine import place
from crossrail.integrations.checkpoint_engine.versions import check_version
from crossrail.integrations.secret import shared_secret
from crossrail.regions import Region
from crossrail.transfers import Transfer

with needs(__name__, "'crossrail[checkpoint-engine]'"):
    import torch
    from checkpoint_engine.device_utils import get_ip

_PLACES_MAX = 4096  # of owners, as text, that are kept decoded


class P2PStore:
    """Registered tensors of this rank, and reads of those of others. Reads may come from several threads.

    Invariant: each named tensor has one open region, which keeps it alive. Peers may read it and not write to it.
    The signatures are those of checkpoint_engine.p2p_store.P2PStore; errors are ours instead of assertions.
    """

    def __init__(
        self,
        device_manager: Any,
        *,
        rank: int | None = None,
        transport: str = "auto",
        rails: int | Sequence[str] = 1,
        port: int = 0,
        secret_file: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """device_manager: of checkpoint-engine, for the number of GPUs. rank: None: the value of RANK.

        transport, rails, port: as of crossrail.Engine. secret_file: None: the value of CROSSRAIL_SECRET.
        timeout_s: how long batch_transfer_sync_read waits.
        """
        check_seconds(timeout_s=timeout_s)
        check_version()
        self.rank = int(os.environ["RANK"]) if rank is None else rank
        self._secret = shared_secret(secret_file, "the parameter server", "the arguments of ParameterServer")
        self._timeout_s = timeout_s
        self.ip: str = get_ip()
        # checkpoint-engine groups ranks by this: those with the same one take turns at reading. Each engine has its own
        # rails.
        ordinal = self.rank % device_manager.device_module.device_count()
        self.device = f"crossrail{ordinal}"
        # The weights are in pinned host memory; ranks of one host spread over its NICs as their GPUs do.
        gpu = f"cuda:{ordinal}" if device_manager.device_type == "cuda" else None
        self.engine = xr.Engine(
            f"checkpoint-engine-{self.rank}",
            transport=transport,
            rails=rails,
            port=port,
            secret=self._secret,
            device=gpu,
        )
        self.named_tensors: dict[str, torch.Tensor] = {}
        self._regions: dict[str, Region] = {}
        self._places: dict[str, list[place.Range]] = {}
        self._trying = threading.Lock()

    @property
    def addr(self) -> str:
        """Everything that others need in order to read what is registered now."""
        ranges = [place.Range(region.base, region.descriptor) for region in self._regions.values()]
        return place.to_text(self.ip, ranges, self._secret)

    def register_named_tensors(self, named_tensors: dict[str, torch.Tensor]) -> None:
        """Registers all of them or none. UsageError for a name that is taken."""
        if taken := sorted(named_tensors.keys() & self._regions.keys()):
            raise UsageError(f"{taken[0]!r} is registered already")
        made: dict[str, Region] = {}
        try:
            for name, tensor in named_tensors.items():
                made[name] = self.engine.register(tensor, access="read")
        except BaseException:
            for region in made.values():
                region.close()
            raise
        self._regions |= made
        self.named_tensors |= named_tensors

    def unregister_named_tensors(self, names: list[str]) -> int:
        """How many of these there were. Returns when nobody reads them any more; who tries is refused.

        WaitTimeout: somebody still reads one; all are closed to others, and stay named: call it again. Names that are
        not registered, or are not any more, count as done.
        """
        regions = {name: self._regions[name] for name in names if name in self._regions}
        for region in regions.values():
            with suppress(WaitTimeout):
                region.close(0.0)  # no new reads of any, before one that is slow is waited for
        for region in regions.values():
            region.close()
        for name in regions:
            del self._regions[name], self.named_tensors[name]
        return len(regions)

    def descriptors_of(self, tensors: Sequence[torch.Tensor]) -> list[bytes]:
        """The descriptors by which others read it; empty if it is not registered. Registering again changes them."""
        of_address = {region.base: bytes(region.descriptor) for region in self._regions.values() if not region.closed}
        return [of_address.get(tensor.data_ptr(), b"") for tensor in tensors]

    def batch_transfer_sync_read(
        self, target_hostname: str, buf_ptrs: list[int], remote_ptrs: list[int], lens: list[int]
    ) -> None:
        """Reads lens[i] bytes at remote_ptrs[i] of the rank whose addr this is to buf_ptrs[i] here, and returns when
        all have come. Both are addresses within what each has registered. Raises what reads of an engine raise, and
        WaitTimeout; nothing is written here any more then.
        """
        self.revive(target_hostname)
        transfers: list[Transfer] = []
        deadline = time.monotonic() + self._timeout_s
        try:
            for local, remote, nbytes in zip(buf_ptrs, remote_ptrs, lens, strict=True):
                region, offset = self._local(local, nbytes)
                transfers += self.submit_read(region, offset, target_hostname, remote, nbytes)
            for transfer in transfers:
                transfer.wait(max(deadline - time.monotonic(), 0.0))
        except BaseException:
            give_up(transfers)
            raise

    def submit_read(self, dst: Region, dst_offset: int, owner: str, address: int, nbytes: int) -> list[Transfer]:
        """Begins to read that many bytes at that address of the rank with this `owner` addr; none: nothing to read."""
        if nbytes == 0:
            return []
        descriptor, offset = place.find(self.ranges_of(owner), address, nbytes)
        return [self.engine.submit_read(dst, descriptor, nbytes, dst_offset=dst_offset, src_offset=offset)]

    def revive(self, owner: str) -> None:
        """If our engine has given up the rank with this addr, the next read tries it again. It may have been frozen or
        cut off.
        """
        addresses = {each.descriptor.owner for each in self.ranges_of(owner)}
        with self._trying:  # otherwise one thread would forget what another has just found again
            for address in addresses:
                if self.engine.peer_state(address) == "lost":
                    self.engine.forget_peer(address)

    def ranges_of(self, owner: str) -> list[place.Range]:
        """The ranges that this rank had registered when it issued this addr."""
        if owner not in self._places:
            if len(self._places) >= _PLACES_MAX:
                self._places.clear()
            self._places[owner] = place.from_text(owner, self._secret)
        return self._places[owner]

    def close(self) -> None:
        """Returns when nobody reads or writes anything here any more. Idempotent."""
        self.engine.close()
        self._regions.clear()
        self.named_tensors.clear()

    def _local(self, address: int, nbytes: int) -> tuple[Region, int]:
        for region in self._regions.values():
            if region.base <= address and address + nbytes <= region.base + region.nbytes:
                return region, address - region.base
        raise UsageError(f"{nbytes} bytes at {address:#x} are in no registered tensor of this rank")


def give_up(transfers: Sequence[Transfer], timeout_s: float = 60.0) -> None:
    """Cancels unfinished reads, and returns when none touches memory any more. Raises WaitTimeout."""
    for transfer in transfers:
        transfer.cancel()
    deadline = time.monotonic() + timeout_s
    for transfer in transfers:
        try:
            transfer.wait(max(deadline - time.monotonic(), 0.0))
        except WaitTimeout:
            raise
        except CrossrailError:
            pass  # cancelled, or failed before: it is over
