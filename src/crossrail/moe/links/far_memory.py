"""The memory for rows that go over the rails: its parts, their sizes and offsets, the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from crossrail import _core
from crossrail.moe.bounds import Bounds
from crossrail.moe.config import Config
from crossrail.moe.links.board import PARITIES

SIGNALS = ("rows", "results")
_LINE = 64


@dataclass(frozen=True)
class FarPart:
    """One of the two regions, for one parity. sizes: bytes of what is in it; offsets: where each begins.

    parity_bytes: of all of that.
    """

    sizes: dict[str, int]
    offsets: dict[str, int]
    parity_bytes: int

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> FarPart:
        """In this order."""
        offsets, end = {}, 0
        for name, nbytes in sizes.items():
            offsets[name] = end
            end += -(-nbytes // _LINE) * _LINE
        return cls(dict(sizes), offsets, max(end, _LINE))  # no region is empty

    @property
    def nbytes(self) -> int:
        """Bytes of the region, for both parities."""
        return PARITIES * self.parity_bytes


@dataclass(frozen=True)
class FarMemory:
    """routes: host memory, routes_in and routes_out. rows: rows_in, results_in, rows_out and results_out, see
    moe/proxy.h; and signals of ranks that write there by themselves, uint64 [SIGNALS, world].
    """

    bounds: Bounds
    routes: FarPart
    rows: FarPart
    route_bytes: int
    stride_bytes: int
    y_bytes: int

    @classmethod
    def of(cls, config: Config, layout: _core.moe.Layout) -> FarMemory:
        """For ranks that are laid out like this."""
        far_groups = max(layout.far_groups(other) for other in range(config.world))
        # In larger groups a group whose member of our index is near may have other members that are far.
        returned_groups = config.groups if config.dp_size > 1 else None
        nodes = ranks = None
        if config.node_sums:
            nodes, ranks = layout.nodes - 1, max(len(_core.moe.origins(layout, one)) for one in range(config.world))
        bounds = Bounds.of(config, far_groups, returned_groups, nodes, ranks)
        hash_bytes = 8 if config.dp_size > 1 else 0
        route_bytes = -(-(4 * config.experts + hash_bytes + _core.moe.FAREWELL_BYTES) // _LINE) * _LINE
        routes = FarPart.of({"routes_in": config.world * route_bytes, "routes_out": route_bytes})
        rows = FarPart.of(
            {
                "rows_in": bounds.far_rows * config.stride_bytes,
                "results_in": bounds.result_rows * config.y_bytes,
                "rows_out": bounds.sent_rows * config.stride_bytes,
                "results_out": bounds.returned_rows * config.y_bytes,
                "signals": 8 * len(SIGNALS) * config.world,
            }
        )
        return cls(bounds, routes, rows, route_bytes, config.stride_bytes, config.y_bytes)

    def note_in(self, rank: int) -> int:
        """Where that rank's note is, in the region of routes: where its row of even rounds has the reason of its
        farewell, its row of odd ones has this.
        """
        return self._note_at(self.routes.offsets["routes_in"] + rank * self.route_bytes)

    @property
    def note_out(self) -> int:
        """Likewise, of our own note, which is sent from there."""
        return self._note_at(self.routes.offsets["routes_out"])

    def _note_at(self, row: int) -> int:
        return self.routes.parity_bytes + row + self.route_bytes - _core.moe.FAREWELL_BYTES

    def as_native(self) -> _core.moe.FarMemory:
        """The parts that a Proxy needs."""
        routes, rows = self.routes.offsets, self.rows.offsets
        return _core.moe.FarMemory(
            routes_in=routes["routes_in"],
            routes_out=routes["routes_out"],
            routes_parity_bytes=self.routes.parity_bytes,
            rows_in=rows["rows_in"],
            results_in=rows["results_in"],
            rows_out=rows["rows_out"],
            results_out=rows["results_out"],
            rows_parity_bytes=self.rows.parity_bytes,
            route_bytes=self.route_bytes,
            stride_bytes=self.stride_bytes,
            y_bytes=self.y_bytes,
        )
