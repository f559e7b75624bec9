"""The parameters of a simulation besides the plan: the costs on GPUs, the rails, and the faults."""

from __future__ import annotations

from dataclasses import dataclass, replace

from crossrail.errors import UsageError
from crossrail.sim.profiles import CX7, NicProfile


@dataclass(frozen=True)
class Costs:
    """The costs of a trainer's lanes. Rates are in 1e9 bytes of the trainers' dtype per second.

    Defaults are those of a rank of Table 5 (Kimi-K2, H200): 9.4 GB of shards to the device in 184 ms; 138 GB gathered
    in 518 ms, fused in 18 ms, quantised in 88 ms. Every rank gathers, fuses and quantises all that its meshes hold: if
    it were only what it sends, quantising would run at a tenth of its GPU's rate. A submit took 23 us there.
    barrier_ms: between groups, and at the end: over the CPUs' network; nobody has published it.
    """

    h2d: float = 51.2
    gather: float = 267.0
    fuse: float = 7690.0
    quantise: float = 1500.0
    submit_us: float = 23.0
    barrier_ms: float = 2.0


@dataclass(frozen=True)
class Setting:
    """collective: every rank takes part in gathering everything that its meshes hold, at the same time as the others,
    as with full_tensor(); groups are separated by barriers. Otherwise each rank does its own tasks, and reads what it
    lacks by its NIC.

    watermark_bytes: of the tasks that a trainer has begun; a single task that needs more is refused. rails: of each
    trainer and target; together 400 Gb/s.

    Faults of trainer 0: straggler: its lanes take so many times longer. slow_link: its rails do. rail_down: it loses
    one of them at the beginning, for down_ms, or for ever (None).
    """

    costs: Costs = Costs()
    collective: bool = False
    watermark_bytes: int = 8 << 30
    rails: int = 1
    rail_down: bool = False
    down_ms: float | None = None
    straggler: float = 1.0
    slow_link: float = 1.0
    seed: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.rails <= 4:
            raise UsageError(f"rails={self.rails} must be 1 to 4")
        if self.down_ms is not None and not (self.rail_down and 0 < self.down_ms <= 60_000):
            raise UsageError(f"down_ms={self.down_ms} must be above 0, at most 60,000, with rail_down")
        if self.rail_down and self.rails < 2 and self.down_ms is None:
            raise UsageError("the only rail can only go down for a while: down_ms=, or rails=2")
        for name in ("straggler", "slow_link"):
            if not 1 <= getattr(self, name) <= 1000:
                raise UsageError(f"{name}={getattr(self, name)} must be 1 to 1000")

    def nic(self, slow: float = 1.0) -> NicProfile:
        """One of the rails; slow: its works take so many times longer."""
        share = self.rails * slow
        return replace(CX7, gbps=CX7.gbps / share, ops_per_s=CX7.ops_per_s / self.rails)

    @property
    def link_share(self) -> float:
        """The capacity of trainer 0's rails, as a share of another trainer's."""
        up = self.rails - 1 if self.rail_down and self.down_ms is None else self.rails
        return up / self.rails / self.slow_link
