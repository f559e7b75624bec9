"""A cluster on the simulator: nodes die and join while a thousand requests are in flight."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

import crossrail as xr
from crossrail import sim
from crossrail.kv import KvLayout, NoPages, Reception, SendJob
from tests.kv.instances import Decoder, assert_all_free
from tests.kv.test_simulated import SimPrefiller
from tests.support.seeds import Seed

LAYOUT = KvLayout(layers=3, pages=64, page_tokens=4, kv_heads=2, head_dim=8, dtype="bfloat16")
PREFILL_LAYOUTS = [replace(LAYOUT, pages=300, tp=2), replace(LAYOUT, pages=150, page_tokens=8, separate_kv=False)]
PREFILLERS, DECODERS, REQUESTS = 64, 192, 1000
TOKENS_MAX = 60
LAYER_S = 0.3
FAULT_EVERY_S = 1.0
ANSWER_S = 3.0


class SimDecoder(Decoder):
    def __init__(self, world: sim.World, name: str) -> None:
        self.host = world.host(name)
        super().__init__(LAYOUT, [self.host.engine(name, peer_timeout_s=1)])
        self.is_dead = False


@dataclass
class Cluster:
    """Invariant: every request ends once: served with the right bytes, or because its decoder died."""

    world: sim.World
    random: random.Random
    prefillers: list[SimPrefiller] = field(default_factory=list)
    decoders: list[SimDecoder] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0
    in_flight_max: int = 0
    work: set[asyncio.Task[None]] = field(default_factory=set)

    def add_prefiller(self) -> None:
        name = f"prefiller-{len(self.prefillers)}"
        prefiller = SimPrefiller(self.world, name, self.random.choice(PREFILL_LAYOUTS), layer_s=LAYER_S)
        prefiller.engines[0].submit_recvs(64, 64, lambda message: None)
        self.prefillers.append(prefiller)

    def add_decoder(self) -> None:
        self.decoders.append(SimDecoder(self.world, f"decoder-{len(self.decoders)}"))

    async def disturb(self) -> None:
        """A node dies or joins, every virtual second."""
        while True:
            await asyncio.sleep(FAULT_EVERY_S)
            kind = self.random.choice(["prefiller dies", "decoder dies", "prefiller joins", "decoder joins"])
            self.faults[kind] += 1
            if kind.endswith("joins"):
                (self.add_prefiller if kind.startswith("prefiller") else self.add_decoder)()
                continue
            nodes = self.prefillers if kind.startswith("prefiller") else self.decoders
            victim = self.random.choice([node for node in nodes if not node.is_dead])
            victim.is_dead = True
            self.world.kill(victim.host)

    async def request(self, number: int) -> None:
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight, self.in_flight_max)
        decoder = self.random.choice([node for node in self.decoders if not node.is_dead])
        try:
            await self._serve(decoder, f"request-{number}", self.random.randint(1, TOKENS_MAX))
            self.ends["served"] += 1
        except xr.EngineClosed:
            assert decoder.is_dead
            self.ends["its decoder died"] += 1
        finally:
            self.in_flight -= 1

    async def _serve(self, decoder: SimDecoder, request: str, tokens: int) -> None:
        reception = await _reserve(decoder, request, tokens)
        while True:
            prefiller = self.random.choice([node for node in self.prefillers if not node.is_dead])
            target = reception.dispatch(prefiller.layout, prefiller.name)
            job = prefiller.open(target)
            ends = sorted({self.random.randint(1, tokens), tokens})
            self.work.add(asyncio.create_task(prefiller.serve(job, ends)))
            arrival = asyncio.create_task(reception.arrived())
            try:
                if await self._arrived(arrival, prefiller):
                    break
            finally:
                arrival.cancel()
                await asyncio.wait([arrival])
            await self._withdraw(decoder, reception, prefiller, job)
        decoder.assert_holds(reception, prefiller.kv_of(request, tokens))
        await asyncio.sleep(self.random.random())  # it decodes
        decoder.assert_holds(reception, prefiller.kv_of(request, tokens))
        reception.release()

    async def _arrived(self, arrival: asyncio.Task[None], prefiller: SimPrefiller) -> bool:
        """False: its prefiller is dead, as a heartbeat would say."""
        while not arrival.done():
            await asyncio.wait([arrival], timeout=0.2)
            if prefiller.is_dead and not arrival.done():
                return False
        arrival.result()
        return True

    async def _withdraw(self, decoder: SimDecoder, reception: Reception, prefiller: SimPrefiller, job: SendJob) -> None:
        async def ask() -> None:
            await decoder.ranks[0].engine.submit_send(prefiller.engines[0].address, b"stop")
            await job.cancel()

        try:
            await reception.withdraw(ask, ANSWER_S)
        except xr.WaitTimeout:
            await decoder.receiver.fence(prefiller.name, 10.0)
            await reception.withdraw(ask, ANSWER_S)
        self.faults["dispatched again"] += 1


async def _reserve(decoder: SimDecoder, request: str, tokens: int) -> Reception:
    while True:
        try:
            return decoder.reserve(request, tokens)
        except NoPages:
            await asyncio.sleep(0.01)
            if decoder.is_dead:
                raise xr.EngineClosed("nobody admits requests here any more") from None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_thousand_requests_while_nodes_die_and_join(seed: Seed) -> None:
    async def main(world: sim.World) -> Cluster:
        cluster = Cluster(world, random.Random(world.seed))
        for _ in range(PREFILLERS):
            cluster.add_prefiller()
        for _ in range(DECODERS):
            cluster.add_decoder()
        disturbance = asyncio.create_task(cluster.disturb())
        await asyncio.gather(*(cluster.request(number) for number in range(REQUESTS)))
        disturbance.cancel()
        await asyncio.wait([disturbance, *cluster.work], timeout=60)  # those of dead prefillers never end

        living = [node for node in (*cluster.prefillers, *cluster.decoders) if not node.is_dead]
        assert_all_free(*(node.pool for node in living))
        for node in living:
            if isinstance(node, SimPrefiller):
                await node.sender.close()
            else:
                node.receiver.close()
        return cluster

    with sim.World(seed=int(seed.rng().integers(2**31))) as world:
        cluster = sim.run(main, world=world)

    assert cluster.ends.total() == REQUESTS and cluster.in_flight_max == REQUESTS
    assert cluster.ends["served"] > 0 and cluster.faults["dispatched again"] > 0, cluster.faults
