"""Rounds of dispatch and combine of many GPUs on simulated NICs: AllToAll's own layout, buffers and proxies post the
writes. The memory does not exist, and the GPUs' work takes simulated time.

Nothing here says who writes what: Placement and Proxy do, as for AllToAll. What kernels cost is KernelCosts.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.random import Generator, default_rng

import crossrail as xr
from crossrail import _core
from crossrail.cli.moe.published import NODE_SIZE, TOKENS, Cluster, Gpu, KernelTimes
from crossrail.errors import TransferError, UsageError
from crossrail.moe.config import Config
from crossrail.moe.links.far_memory import FarMemory
from crossrail.moe.meeting import make_layout
from crossrail.moe.nodes import nodes_of
from crossrail.sim import World, run
from crossrail.sim.profiles import rails_of

EXPERTS, HIDDEN, TOP_K = 256, 7168, 8
_BETWEEN_S = 1e-3  # virtual, so that nothing of a step is in flight during the next
_LOOKS_A_STEP = 1000  # how often a rank looks whether all has come, in what the wire takes at least
_LOOK_MIN_S = 0.2e-6

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Setting:
    """tokens: of each rank. private_tokens, node_sums: as AllToAll has them."""

    cluster: Cluster
    ranks: int
    tokens: int
    rounds: int = 1
    private_tokens: int = 256
    node_sums: bool = False
    seed: int = 1

    def __post_init__(self) -> None:
        if EXPERTS % self.ranks != 0 or (self.ranks > NODE_SIZE and self.ranks % NODE_SIZE != 0):
            raise UsageError(f"ranks is {self.ranks}, must be a divisor of {EXPERTS} experts")

    def config(self) -> Config:
        """The config that all ranks would pass to AllToAll."""
        return Config(
            world=self.ranks, experts=EXPERTS, hidden=HIDDEN, top_k=TOP_K, max_tokens=self.tokens,
            dtype="float8_e4m3fn", scale_block=128, out_dtype="bfloat16", private_tokens=self.private_tokens,
            padding=1, layout="grouped", node_size=min(NODE_SIZE, self.ranks), dp_size=1, capacity_factor=None,
            on_lost="raise", node_sums=self.node_sums,
        )  # fmt: skip


class Outcome(NamedTuple):
    """Virtual seconds of a rank's step, all ranks and rounds pooled. Bytes that a rank sends by its rails: the mean."""

    dispatch_s: list[float]
    combine_s: list[float]
    dispatch_bytes: float
    combine_bytes: float

    @property
    def dispatch_us(self) -> float:
        """The median."""
        return float(np.median(self.dispatch_s)) * 1e6

    @property
    def combine_us(self) -> float:
        """The median."""
        return float(np.median(self.combine_s)) * 1e6


class Rows(NamedTuple):
    """Of one rank in one round: its tokens; routes of them to far ranks; rows that it gets of its own and of its mates'
    tokens, and from far; rows of its tokens' results that lie with itself and with its mates, and with far ranks.
    """

    tokens: float
    sent: float
    own: float
    mates: float
    far: float
    result_own: float
    result_mates: float
    result_far: float

    @classmethod
    def of(cls, routes: Array, rank: int, tokens: int) -> Rows:
        """routes: [ranks, ranks], from each to each."""
        first = rank // NODE_SIZE * NODE_SIZE
        node = slice(first, first + NODE_SIZE)
        here, mine = routes[:, rank], routes[rank]
        own = float(here[rank])
        near_in, near_out = float(here[node].sum()), float(mine[node].sum())
        return cls(
            tokens, mine.sum() - near_out, own, near_in - own, here.sum() - near_in, own, near_out - own,
            mine.sum() - near_out,
        )  # fmt: skip


class KernelCosts:
    """Seconds that the four kernels take on a rank: what their bytes take in memory and over NVLink at the rates of the
    data sheet, and a fixed part, which is the rest of what was measured at EP64, decode.
    """

    def __init__(self, gpu: Gpu, measured: KernelTimes, config: Config) -> None:
        self._gpu = gpu
        self._x_bytes = config.stride_bytes
        self._y_bytes = config.y_bytes
        routes = np.full((64, 64), TOKENS["decode"] * TOP_K / 64)
        typical = Rows.of(routes, 0, TOKENS["decode"])
        moved = (
            self._dispatch_send(typical),
            self.pull_near(typical) + self._pull_far(typical),
            self._combine_send(typical),
            self._combine_recv(typical),
        )
        self._fixed = KernelTimes(*(max(0.0, us * 1e-6 - s) for us, s in zip(measured, moved, strict=True)))

    def dispatch_send(self, rows: Rows) -> float:
        """Rows for far ranks, in the order in which they are sent, and each token once for mates."""
        return self._fixed.dispatch_send + self._dispatch_send(rows)

    def pull_near(self, rows: Rows) -> float:
        """While far rows are under way."""
        return rows.mates * self._x_bytes / self._gpu.nvlink + 2 * rows.own * self._x_bytes / self._gpu.memory

    def dispatch_recv(self, rows: Rows) -> float:
        """Once all far rows are here."""
        return self._fixed.dispatch_recv + self._pull_far(rows)

    def combine_send(self, rows: Rows) -> float:
        """Results for far ranks, in the order in which they are sent."""
        return self._fixed.combine_send + self._combine_send(rows)

    def combine_recv(self, rows: Rows) -> float:
        """The sums, once all results are here: of what lies with mates, with us, and has come from far."""
        return self._fixed.combine_recv + self._combine_recv(rows)

    def show_results(self) -> float:
        """Of combine_send, if it copies nothing."""
        return self._fixed.combine_send

    def add_up(self, own: float, mates: float, sums: float) -> float:
        """Sums for a rank of another node: of rows that lie with us and with mates."""
        return mates * self._y_bytes / self._gpu.nvlink + (own + sums) * self._y_bytes / self._gpu.memory

    def _dispatch_send(self, rows: Rows) -> float:
        return 2 * (rows.sent + rows.tokens) * self._x_bytes / self._gpu.memory

    def _pull_far(self, rows: Rows) -> float:
        return 2 * rows.far * self._x_bytes / self._gpu.memory

    def _combine_send(self, rows: Rows) -> float:
        return 2 * rows.far * self._y_bytes / self._gpu.memory

    def _combine_recv(self, rows: Rows) -> float:
        local = rows.result_own + rows.result_far + rows.tokens
        return rows.result_mates * self._y_bytes / self._gpu.nvlink + local * self._y_bytes / self._gpu.memory


class _Node:
    """Where ranks that share memory tell each other their progress: takes no time."""

    def __init__(self, ranks: int) -> None:
        self._missing = ranks
        self._all_here = asyncio.Event()

    async def arrive(self) -> None:
        self._missing -= 1
        if self._missing == 0:
            self._all_here.set()

    async def all_arrived(self) -> None:
        await self._all_here.wait()


@dataclass(frozen=True)
class _Round:
    """What all ranks know of a round once routes have been exchanged."""

    number: int
    counts: npt.NDArray[np.int32]
    placement: _core.moe.Placement
    routes: Array  # [ranks, ranks], from each to each
    node_tokens: Array  # [ranks, nodes], tokens of each that have routes to each
    rows: list[Rows]
    sent: list[_Node]  # by node: the ranks that have sent rows
    returned: list[_Node]


class _Rank:
    """One GPU, and the proxy that AllToAll would have for it."""

    def __init__(
        self, engine: xr.Engine, config: Config, layout: _core.moe.Layout, rank: int, costs: KernelCosts, look_s: float
    ) -> None:
        self.engine = engine
        self.rank = rank
        self._node = rank // NODE_SIZE
        memory = FarMemory.of(config, layout)
        self.routes = engine.register_phantom(memory.routes.nbytes)
        self.rows = engine.register_phantom(memory.rows.nbytes)
        self.proxy = _core.moe.Proxy(engine, layout, rank, memory.as_native(), self.routes, self.rows)
        self._origins = _core.moe.origins(layout, rank) if config.node_sums else []
        self._max_tokens = config.max_tokens
        self._costs = costs
        self._look_s = look_s

    async def dispatch(self, round_: _Round) -> float:
        """Seconds."""
        loop, rows, node = asyncio.get_running_loop(), round_.rows[self.rank], round_.sent[self._node]
        began_s = loop.time()
        self.proxy.send_routes(round_.number, round_.counts[self.rank])
        sending_s = self._costs.dispatch_send(rows)
        await asyncio.sleep(sending_s / 2)  # the paper's transfers begin half-way through this kernel
        self.proxy.send_rows(round_.number)
        await asyncio.sleep(sending_s / 2)
        await node.arrive()
        await asyncio.gather(self._pull_near(node, rows), self._rows_here(round_))
        await asyncio.sleep(self._costs.dispatch_recv(rows))
        return loop.time() - began_s

    async def combine(self, round_: _Round) -> float:
        """Seconds."""
        loop, rows, node = asyncio.get_running_loop(), round_.rows[self.rank], round_.returned[self._node]
        began_s = loop.time()
        if self._origins:
            await asyncio.sleep(self._costs.show_results())
            await node.arrive()
            await node.all_arrived()
            rows = rows._replace(result_far=await self._send_sums(round_))
        else:
            sending_s = self._costs.combine_send(rows)
            await asyncio.sleep(sending_s / 2)
            self.proxy.send_results(round_.number, round_.placement)
            await asyncio.sleep(sending_s / 2)
            await node.arrive()
            await node.all_arrived()
        await self._come("results", round_)
        await asyncio.sleep(self._costs.combine_recv(rows))
        return loop.time() - began_s

    async def _send_sums(self, round_: _Round) -> float:
        """As NodeSums.send: one rank's leave while the next one's are made. Rows that we get of them."""
        self.proxy.take_sums(round_.number)
        first, last = self._node * NODE_SIZE, (self._node + 1) * NODE_SIZE
        for i, origin in enumerate(self._origins):
            own = float(round_.routes[origin, self.rank])
            near = float(round_.routes[origin, first:last].sum())
            sums = int(round_.node_tokens[origin, self._node])
            await asyncio.sleep(self._costs.add_up(own, near - own, sums))
            self.proxy.send_sums(round_.number, origin, i * self._max_tokens, sums)
        return float(round_.node_tokens[self.rank].sum() - round_.node_tokens[self.rank, self._node])

    async def _pull_near(self, node: _Node, rows: Rows) -> None:
        await node.all_arrived()
        await asyncio.sleep(self._costs.pull_near(rows))

    async def _rows_here(self, round_: _Round) -> None:
        await self._come("routes", round_)
        self.proxy.send_remainder(round_.number, round_.placement)
        await self._come("rows", round_)

    async def _come(self, step: str, round_: _Round) -> None:
        """Waits until everything of that step is here."""
        while True:
            result, rank, detail = self.proxy.wait(step, round_.number, 0)
            if result == "ready":
                return
            if result != "late":
                raise TransferError(f"{step} of rank {rank}: {result}, {detail}", op="moe", detail=detail)
            await asyncio.sleep(self._look_s)


def simulate(setting: Setting) -> Outcome:
    """Rounds of uniform routing. Blocks: a second of CPU for a round of 64 ranks with one rail each."""
    return run(lambda world: _run(world, setting), seed=setting.seed)


async def _run(world: World, setting: Setting) -> Outcome:
    config = setting.config()
    layout = make_layout(config, nodes_of(setting.ranks, min(NODE_SIZE, setting.ranks)))
    costs = KernelCosts(setting.cluster.gpu, setting.cluster.kernels, config)
    look_s = _look_s(setting, config)
    ranks: list[_Rank] = []
    for rank in range(setting.ranks):
        engine = world.host(f"gpu-{rank}", setting.cluster.nic).engine(f"rank-{rank}")
        ranks.append(_Rank(engine, config, layout, rank, costs, look_s))
    await _connect(ranks)
    rng = default_rng(setting.seed)
    outcome = Outcome([], [], 0.0, 0.0)
    for number in range(1, setting.rounds + 1):
        round_ = _draw(rng, setting, layout, number)
        for one in ranks:
            one.proxy.wait_sent(number, None)
        before = world.stats["bytes"]
        outcome.dispatch_s.extend(await asyncio.gather(*(one.dispatch(round_) for one in ranks)))
        await asyncio.sleep(_BETWEEN_S)
        between = world.stats["bytes"]
        outcome.combine_s.extend(await asyncio.gather(*(one.combine(round_) for one in ranks)))
        await asyncio.sleep(_BETWEEN_S)
        share = 1 / (setting.ranks * setting.rounds)
        outcome = outcome._replace(
            dispatch_bytes=outcome.dispatch_bytes + (between - before) * share,
            combine_bytes=outcome.combine_bytes + (world.stats["bytes"] - between) * share,
        )
    return outcome


async def _connect(ranks: list[_Rank]) -> None:
    """Connects as AllToAll does: each rank tells the others by which numbers to count, and where its memory is."""
    hellos = []
    for one in ranks:
        far = [ranks[other] for other in one.proxy.far_ranks()]
        for there in far:
            imms = there.proxy.imms_for(one.rank)
            one.proxy.connect(there.rank, there.routes.descriptor, there.rows.descriptor, imms)
        if far:
            for dsts in ([there.routes.descriptor for there in far], [there.rows.descriptor for there in far]):
                hellos.append(one.engine.submit_scatter(one.routes, dsts, lengths=0, src_offsets=0, dst_offsets=0))
    await asyncio.gather(*hellos)


def _draw(rng: Generator, setting: Setting, layout: _core.moe.Layout, number: int) -> _Round:
    """Each token goes to different experts, all as likely."""
    counts = np.empty((setting.ranks, EXPERTS), np.int32)
    node_tokens = np.empty((setting.ranks, layout.nodes), np.int32)
    for rank in range(setting.ranks):
        keys = rng.random((setting.tokens, EXPERTS), np.float32)
        indices = np.argpartition(keys, TOP_K, axis=1)[:, :TOP_K]
        counts[rank] = np.bincount(indices.ravel(), minlength=EXPERTS)
        node_tokens[rank] = _core.moe.node_tokens(layout, np.ascontiguousarray(indices))
    routes = counts.reshape(setting.ranks, setting.ranks, -1).sum(axis=2)
    size = min(NODE_SIZE, setting.ranks)
    nodes = range(setting.ranks // size)
    return _Round(
        number,
        counts,
        _core.moe.Placement(layout, counts),
        routes,
        node_tokens,
        [Rows.of(routes, rank, setting.tokens) for rank in range(setting.ranks)],
        [_Node(size) for _ in nodes],
        [_Node(size) for _ in nodes],
    )


def _look_s(setting: Setting, config: Config) -> float:
    """How often ranks look."""
    rate = sum(rail.gbps for rail in rails_of(setting.cluster.nic)) * 1e9 / 8
    return max(_LOOK_MIN_S, setting.tokens * TOP_K * config.stride_bytes / rate / _LOOKS_A_STEP)
