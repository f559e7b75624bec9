"""Campaigns on simulated hosts: prefillers are killed and frozen while they write, and what was promised holds."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace

import pytest

import crossrail as xr
from crossrail import sim
from crossrail.kv import KvLayout, NoPages, PagesInUse, PageState, Reception, SendJob, TransferStopped
from tests.kv.instances import Decoder, Prefiller, assert_all_free
from tests.support.seeds import Seed

LAYOUT = KvLayout(layers=3, pages=40, page_tokens=4, kv_heads=2, head_dim=8, dtype="bfloat16", tp=2)
REQUESTS = 80
TOKENS_MAX = 60
ANSWER_S = 0.5  # how long the decoder waits for a confirmation before it fences


class SimPrefiller(Prefiller):
    """One on a host of its own, which may be killed or frozen; its model takes time."""

    def __init__(self, world: sim.World, name: str, layout: KvLayout, *, layer_s: float = 2e-5) -> None:
        self.layer_s = layer_s
        self.host = world.host(name)
        super().__init__(layout, [self.host.engine(name, peer_timeout_s=1)])
        self.name = name
        self.is_dead = False

    async def serve(self, job: SendJob, ends: list[int]) -> None:
        """What its service does with a request, for as long as it lives."""
        try:
            for end in ends:
                async with self.model:
                    self.sender.begin_step([(job, end)])
                    for layer in range(self.layout.layers):
                        await asyncio.sleep(self.layer_s)
                        self.compute(job, layer)
                        self.sender.layer_done()
            await job.finish()
        except xr.CrossrailError:
            pass
        if not self.is_dead:
            await asyncio.wait([job._end])
            job.lease.release()


@dataclass
class Campaign:
    """Requests that each go from prefiller to prefiller until one has sent them.

    Invariant: pages in use hold their request's KV until they are released.
    """

    world: sim.World
    random: random.Random
    prefillers: list[SimPrefiller]
    decoder: Decoder
    fenced: int = 0
    lost: int = 0
    known_dead: set[str] = field(default_factory=set)
    work: set[asyncio.Task[None]] = field(default_factory=set)

    async def request(self, number: int) -> None:
        tokens = self.random.randint(1, TOKENS_MAX)
        await asyncio.sleep(self.random.random() * 0.05)
        reception = await self._reserve(f"request-{number}", tokens)
        while True:
            prefiller = self.random.choice([p for p in self.prefillers if p.name not in self.known_dead])
            target = reception.dispatch(prefiller.layout, prefiller.name)
            if prefiller.is_dead:  # and nobody has noticed
                await self._withdraw(reception, prefiller, None)
                continue
            try:
                lease = prefiller.pool.reserve(prefiller.layout.pages_of(tokens), target.request)
                job = prefiller.sender.open(target, lease)
            except xr.CrossrailError:  # no pages there, or it holds this request from before: it refused
                await reception.withdraw(_confirmed, 1.0)
                await asyncio.sleep(0.001)
                continue
            ends = sorted({self.random.randint(1, tokens), tokens})
            self.work.add(asyncio.create_task(prefiller.serve(job, ends)))
            try:
                await reception.arrived(self.random.choice([0.0001, 0.001, 2.0]))
                break
            except (xr.WaitTimeout, TransferStopped):  # late, or another request of its has fenced it
                await self._withdraw(reception, prefiller, job)
        for _ in range(3):
            self.decoder.assert_holds(reception, prefiller.kv_of(reception.request, tokens))
            await asyncio.sleep(self.random.random() * 0.01)
        reception.release()

    async def _withdraw(self, reception: Reception, prefiller: SimPrefiller, job: SendJob | None) -> None:
        engine, address = self.decoder.ranks[0].engine, prefiller.engines[0].address

        async def ask() -> None:
            # A message there and back, which a frozen one does not answer and a dead one cannot take.
            try:
                await engine.submit_send(address, b"stop " + reception.request.encode())
            except xr.PeerLost:
                self.known_dead.add(prefiller.name)
                self.lost += 1
                raise
            assert job is not None
            await job.cancel()

        try:
            await reception.withdraw(ask, self.random.choice([ANSWER_S, 10 * ANSWER_S]))
        except xr.WaitTimeout:
            assert reception.state is PageState.QUARANTINED
            with pytest.raises(PagesInUse):
                reception.release()
            await self.decoder.receiver.fence(prefiller.name, 10.0)
            await reception.withdraw(ask, ANSWER_S)
            self.fenced += 1
        assert reception.state is PageState.RESERVED

    async def _reserve(self, request: str, tokens: int) -> Reception:
        while True:
            try:
                return self.decoder.reserve(request, tokens)
            except NoPages:
                await asyncio.sleep(0.001)

    async def faults(self) -> None:
        """Kills all prefillers but one, and freezes that for a while."""
        *mortal, last = self.prefillers
        for prefiller in mortal:
            await asyncio.sleep(self.random.random() * 0.01)
            prefiller.is_dead = True
            self.world.kill(prefiller.host)
        await asyncio.sleep(self.random.random() * 0.01)
        self.world.freeze(last.host, for_s=0.8)  # longer than ANSWER_S, shorter than it takes to be lost


async def _confirmed() -> None:
    pass


@pytest.mark.parametrize("run", range(2))
def test_prefillers_that_die_and_freeze_take_no_request_and_no_page_with_them(seed: Seed, run: int) -> None:
    layouts = [LAYOUT, replace(LAYOUT, tp=1, page_tokens=8), replace(LAYOUT, order="NHD", separate_kv=False)]

    async def main(world: sim.World) -> None:
        prefillers = [SimPrefiller(world, f"prefiller-{i}", layout) for i, layout in enumerate(layouts)]
        for prefiller in prefillers:
            prefiller.engines[0].submit_recvs(64, 64, lambda message: None)
        decoder = Decoder(LAYOUT, [world.host("decoder").engine("decoder", peer_timeout_s=1)])
        campaign = Campaign(world, random.Random(world.seed), prefillers, decoder)
        await asyncio.gather(campaign.faults(), *(campaign.request(number) for number in range(REQUESTS)))

        assert_all_free(decoder.pool)
        await asyncio.sleep(5)
        await asyncio.wait(campaign.work, timeout=60)
        assert_all_free(prefillers[-1].pool)
        assert campaign.fenced + campaign.lost > 0
        await prefillers[-1].sender.close()
        decoder.receiver.close()

    with sim.World(seed=int(seed.rng(run).integers(2**31))) as world:
        sim.run(main, world=world)
