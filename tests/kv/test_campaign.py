"""Many requests at once, ended at random moments: each arrives whole or is given up, and every page comes back."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

import crossrail as xr
from crossrail.kv import KvLayout, PageState, Reception, SendJob, TransferStopped, page_hashes
from tests.conftest import EngineFactory
from tests.kv.instances import Decoder, Prefiller, assert_all_free, closing
from tests.support.limits import WAIT_S
from tests.support.seeds import Seed

LAYOUT = KvLayout(layers=3, pages=48, page_tokens=4, kv_heads=2, head_dim=8, dtype="bfloat16", tp=2)
REQUESTS = 80
TOKENS_MAX = 60


@dataclass
class Campaign:
    """Invariant: a page that a request has in use holds that request's KV until it is released."""

    random: random.Random
    prefillers: list[Prefiller]
    decoder: Decoder
    arrived: int = 0
    impatient: int = 0  # give up when the first attempt does not arrive at once

    async def request(self, number: int) -> None:
        """One request: waits for pages, is sent by one prefiller after another, or given up."""
        tokens = self.random.randint(1, TOKENS_MAX)
        impatient = self.random.random() < 0.3
        self.impatient += impatient
        reception = await self._eventually(lambda: self.decoder.reserve(f"request-{number}", tokens))
        while True:
            prefiller = self.random.choice(self.prefillers)
            writer = prefiller.engines[0].name if self.random.random() < 0.7 else None
            target = reception.dispatch(prefiller.layout, writer)
            job = await self._eventually(lambda: prefiller.open(target))  # noqa: B023  # awaited in the same turn
            sending = asyncio.create_task(self._send(prefiller, job))
            patience_s = self.random.choice([0, 0.001, 0.01, WAIT_S])
            try:
                await reception.arrived(patience_s)
                break
            except xr.WaitTimeout:
                await reception.withdraw(job.cancel, WAIT_S)
                assert reception.state is PageState.RESERVED
            finally:
                await sending
            if impatient:
                reception.release()
                return
        await self._use(reception, prefiller)

    async def _send(self, prefiller: Prefiller, job: SendJob) -> None:
        tokens = job.target.tokens
        ends = sorted({*(self.random.randint(1, tokens) for _ in range(2)), tokens})
        prefiller.poison(job)
        try:
            for end in ends:
                await asyncio.sleep(self.random.choice([0, 0.001]))
                await prefiller.step([(job, end)])
        except TransferStopped:  # refused: it is settled already
            assert job.settled
        try:
            await asyncio.wait_for(job.finish(), WAIT_S)
        except TransferStopped:
            pass
        job.lease.release()

    async def _use(self, reception: Reception, prefiller: Prefiller) -> None:
        for _ in range(2):  # also a while later
            self.decoder.assert_holds(reception, prefiller.kv_of(reception.request, reception.tokens))
            await asyncio.sleep(0.001)
        names = page_hashes(list(reception.request.encode()), 1)
        reception.lease.publish(names[: reception.tokens // LAYOUT.page_tokens])
        reception.release()
        self.arrived += 1

    async def _eventually(self, take: Callable[[], object]):  # type: ignore[no-untyped-def]
        """Takes what others must give back first."""
        while True:
            try:
                return take()
            except xr.kv.NoPages:
                await asyncio.sleep(0.001)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_every_request_ends_and_every_page_comes_back(
    open_engine: EngineFactory, transport: str, seed: Seed
) -> None:
    layouts = [replace(LAYOUT, tp=1, page_tokens=8), replace(LAYOUT, order="NHD", separate_kv=False)]
    prefillers = [
        Prefiller(layout, [open_engine(f"prefiller-{i}", transport=transport)]) for i, layout in enumerate(layouts)
    ]
    decoder = Decoder(LAYOUT, [open_engine("decoder", transport=transport)])
    campaign = Campaign(random.Random(int(seed.rng().integers(2**32))), prefillers, decoder)
    async with closing(*prefillers):
        requests = [asyncio.create_task(campaign.request(number)) for number in range(REQUESTS)]

        await asyncio.wait_for(asyncio.gather(*requests), 2 * WAIT_S)

    assert REQUESTS - campaign.impatient <= campaign.arrived <= REQUESTS
    assert_all_free(decoder.pool, *(prefiller.pool for prefiller in prefillers))
    decoder.receiver.close()
