"""A prompt's KV from one simulated instance to another: KvSender and KvReceiver post and count its writes over
simulated NICs. The memory does not exist, and computing takes the published time.
"""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass, replace

import numpy as np

import crossrail as xr
from crossrail.cli.kv.published import CHUNK_TOKENS, HEAD_DIM, KV_HEADS, NIC, PAGE_TOKENS, RANKS, Row
from crossrail.errors import CrossrailError
from crossrail.kv import KvLayout, KvReceiver, KvSender, KvTarget, PagePool, RankMemory, foreign_lease
from crossrail.kv.transfer.job import SendJob
from crossrail.sim import World, run
from crossrail.sim.profiles import NicProfile, rails_of

_WAIT_S = 60.0  # virtual


@dataclass(frozen=True)
class Way:
    """How a layer's pages get there.

    has_rails_each: each rank has its own NICs; otherwise all ranks of an instance share one GPU's. page_ns: time of a
    rail per page, on top of its NIC's profile. start_us: from when a layer is computed until its writes begin.
    """

    name: str
    has_rails_each: bool
    page_ns: float = 0.0
    start_us: float = 0.0

    def rails(self) -> list[NicProfile]:
        return [replace(rail, overhead_ns=rail.overhead_ns + self.page_ns) for rail in rails_of(NIC)]


GPUS = Way("four GPUs", has_rails_each=True)
ONE_GPU = Way("one GPU", has_rails_each=False)
# Two numbers that nothing else published gives: such that 4K and 16K tokens come out as in the table.
FITTED = Way("fitted", has_rails_each=False, page_ns=1031.0, start_us=317.0)
WAYS = (GPUS, ONE_GPU, FITTED)


def layer_ms(tokens: int, row: Row, way: Way, layers: int, seed: int = 1) -> float:
    """Virtual milliseconds from when a layer is computed until all of it is written: the median over layers and chunks.

    layers: of the model; those of a chunk are alike.
    """

    async def main(world: World) -> list[float]:
        return await _transfer(world, tokens, row, way, layers)

    return statistics.median(run(main, seed=seed, limit_s=_WAIT_S)) * 1e3


async def _transfer(world: World, tokens: int, row: Row, way: Way, layers: int) -> list[float]:
    pages = -(-tokens // PAGE_TOKENS)
    layout = KvLayout(layers, pages, PAGE_TOKENS, KV_HEADS, HEAD_DIM, "bfloat16", tp=RANKS)
    here = _engines(world, "prefill", way)
    sender = KvSender(
        layout,
        {rank: RankMemory(one, layout, [one.register_phantom(layout.rank_bytes)]) for rank, one in enumerate(here)},
    )
    there = _engines(world, "decode", way)
    pool = PagePool(pages, PAGE_TOKENS)
    receiver = KvReceiver(layout, [RankMemory.alloc(one, layout) for one in there], pool)
    reception = receiver.reserve("prompt", tokens)
    target = KvTarget.from_wire(reception.dispatch(layout, "prefill").to_wire())
    # In any order, as after many requests: neighbours would travel as one.
    own_pages = np.array(world.rng.sample(range(pages), pages), np.uint32)
    job = sender.open(target, foreign_lease("prompt", own_pages, PAGE_TOKENS))
    computed_s = await _prefill(sender, job, row, way)
    await reception.arrived(_WAIT_S)
    await job.finish(_WAIT_S)
    written = {(layer.end_tokens, layer.layer): layer.at_s for layer in job.written}
    if written.keys() != computed_s.keys():
        raise CrossrailError(f"{len(computed_s)} layers were computed, {len(written)} written")
    return [written[layer] - at_s for layer, at_s in computed_s.items()]


def _engines(world: World, side: str, way: Way) -> list[xr.Engine]:
    """One engine per rank, or the same one for all, which then share its rails."""
    if way.has_rails_each:
        return [world.host(f"{side}{rank}", nic=way.rails()).engine(f"{side}{rank}") for rank in range(RANKS)]
    return [world.host(side, nic=way.rails()).engine(side)] * RANKS


async def _prefill(sender: KvSender, job: SendJob, row: Row, way: Way) -> dict[tuple[int, int], float]:
    """When each layer of each chunk was computed, by the chunk's last token and the layer."""
    loop = asyncio.get_running_loop()
    computed_s: dict[tuple[int, int], float] = {}
    tokens = job.target.tokens
    for end in [*range(CHUNK_TOKENS, tokens, CHUNK_TOKENS), tokens]:
        sender.begin_step([(job, end)])
        for layer in range(sender.layout.layers):
            await asyncio.sleep(row.compute_ms / 1e3)
            computed_s[end, layer] = loop.time()
            loop.call_later(way.start_us / 1e6, sender.layer_done)
    return computed_s
