"""How tests ask the router's front: a completion whose tokens are known, and bytes as they are."""

import asyncio
import contextlib

from crossrail.kv import messages as m
from crossrail.kv.toy import ToyTokenizer
from tests.support.kv_cluster import monolithic
from tests.support.limits import WAIT_S

TEXT = "To be, or not to be, that is the question."
SLOW_S = 0.0004
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\n"


def body(**changes: object) -> dict[str, object]:
    return {"prompt": TEXT, "max_tokens": 8, "temperature": 0.7, "seed": 3, "ignore_eos": True} | changes


async def expected(max_tokens: int = 8) -> list[int]:
    sampling = m.Sampling(max_tokens, temperature=0.7, seed=3, ignore_end=True)
    return await monolithic(ToyTokenizer().encode(TEXT), sampling)


async def answer_of(url: str, sent: bytes) -> bytes:
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    try:
        return await asyncio.wait_for(reader.read(4096), WAIT_S)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
