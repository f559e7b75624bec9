"""Any number of ranks to any number, each with an engine of its own, over shm; and what page has which bytes then."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from crossrail.kv import KvLayout
from tests.conftest import EngineFactory
from tests.kv.instances import Decoder, Prefiller, assert_all_free, closing
from tests.kv.worlds import POWERS
from tests.support.limits import WAIT_S

LAYOUT = KvLayout(layers=2, pages=24, page_tokens=8, kv_heads=8, head_dim=16, dtype="bfloat16")
TOKENS = (37, 50)  # of two requests at once; neither fills its last page


@pytest.mark.parametrize("kv_heads", [8, 2])  # one a rank, at 8 ranks; fewer than ranks: several have the same ones
@pytest.mark.parametrize("decode_tp", POWERS)
@pytest.mark.parametrize("prefill_tp", POWERS)
async def test_every_page_of_every_rank_has_its_bytes(
    open_engine: EngineFactory, prefill_tp: int, decode_tp: int, kv_heads: int
) -> None:
    src = replace(LAYOUT, tp=prefill_tp, kv_heads=kv_heads)
    dst = replace(LAYOUT, tp=decode_tp, kv_heads=kv_heads, page_tokens=16, pages=12)
    prefiller = Prefiller(
        src, [open_engine(f"prefill-{rank}", transport="shm") for rank in range(prefill_tp)], raw=True
    )
    decoder = Decoder(dst, [open_engine(f"decode-{rank}", transport="shm") for rank in range(decode_tp)], raw=True)
    receptions = [decoder.reserve(f"request-{tokens}", tokens) for tokens in TOKENS]
    taken = np.concatenate([reception.lease.pages for reception in receptions])

    async with closing(prefiller):
        jobs = [prefiller.open(reception.dispatch(src)) for reception in receptions]
        await asyncio.gather(
            *(prefiller.prefill(job, [20, job.target.tokens]) for job in jobs),
            *(reception.arrived(WAIT_S) for reception in receptions),
        )

    for reception in receptions:
        decoder.assert_holds(reception, prefiller.kv_of(reception.request, reception.tokens))
    decoder.assert_untouched(np.setdiff1d(np.arange(dst.pages), taken))
    for reception in receptions:
        reception.release()
    assert_all_free(prefiller.pool, decoder.pool)
