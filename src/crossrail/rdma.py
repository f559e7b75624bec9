"""Options that only RDMA transports take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RdmaOptions:
    """Options of verbs, and of RoCE where noted. The defaults are right unless the network's operator says otherwise.

    gid_index: into the port's GID table, on RoCE; None: RoCE v2 before v1, routable before link-local. traffic_class:
        on RoCE, 0..255: the DSCP is its upper six bits. service_level: 0..15. path_mtu: 256, 512, 1024, 2048 or 4096
        bytes; None: the port's. partition: the P_Key to use on InfiniBand, 0x800b or 0x000b alike; None: the first of
        which the port is a full member. chain_length: how many writes share one doorbell of the NIC, 1..32.
    """

    gid_index: int | None = None
    traffic_class: int = 0
    service_level: int = 0
    path_mtu: int | None = None
    partition: int | None = None
    chain_length: int = 16

    def as_tuple(self) -> tuple[int, int, int, int, int, int]:
        """For the native engine, which checks the bounds."""
        gid_index = -1 if self.gid_index is None else self.gid_index
        path_mtu, partition = self.path_mtu or 0, self.partition or 0
        return gid_index, self.traffic_class, self.service_level, path_mtu, partition, self.chain_length
