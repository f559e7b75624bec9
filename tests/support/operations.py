"""One operation of each kind between the same two places, so that a fault test can loop over the kinds."""

from collections.abc import Sequence

import numpy as np

import crossrail as xr

KINDS = ("write", "read", "paged_writes", "scatter", "barrier", "send")
DATA_KINDS = ("write", "read", "paged_writes", "scatter")


class Operations:
    """Submits operations from (for read: into) `region` to `descriptors`, each as long as the region.

    Owner: the caller owns region and engine; nothing here outlives them.
    """

    def __init__(
        self,
        engine: xr.Engine,
        region: xr.Region,
        descriptors: Sequence[xr.RegionDescriptor],
        *,
        imm: int | None = None,
        page_bytes: int = 4096,
        seed: int = 0,
    ) -> None:
        self.engine = engine
        self.region = region
        self.descriptors = list(descriptors)
        self.imm = imm
        self.page_bytes = page_bytes
        page_count = max(region.nbytes // page_bytes, 1)
        self.pages = np.random.default_rng(seed).permutation(page_count).astype(np.int32)
        self.group = engine.add_peer_group([descriptor.owner for descriptor in descriptors])

    def submit(self, kind: str) -> xr.Transfer:
        submit = getattr(self, f"_{kind}")
        transfer: xr.Transfer = submit()
        return transfer

    def counts(self, kind: str) -> int:
        """How much one operation of this kind adds to the counter at each target."""
        return {"write": 1, "verified_write": 1, "paged_writes": len(self.pages), "scatter": 1, "barrier": 1}.get(
            kind, 0
        )

    def _write(self) -> xr.Transfer:
        return self.engine.submit_write(self.region, self.descriptors[0], imm=self.imm)

    def _verified_write(self) -> xr.Transfer:
        return self.engine.submit_write(self.region, self.descriptors[0], imm=self.imm, verify=True)

    def _read(self) -> xr.Transfer:
        return self.engine.submit_read(self.region, self.descriptors[0])

    def _paged_writes(self) -> xr.Transfer:
        pages = self.pages
        return self.engine.submit_paged_writes(
            self.region, pages, self.descriptors[0], pages[::-1].copy(), self.page_bytes, imm=self.imm
        )

    def _scatter(self) -> xr.Transfer:
        return self.engine.submit_scatter(
            self.region,
            self.descriptors,
            lengths=self.region.nbytes,
            src_offsets=0,
            dst_offsets=0,
            group=self.group,
            imm=self.imm,
        )

    def _barrier(self) -> xr.Transfer:
        return self.engine.submit_barrier(self.group, self.imm or 0)

    def _send(self) -> xr.Transfer:
        return self.engine.submit_send(self.descriptors[0].owner, bytes(1000))
