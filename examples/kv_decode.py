"""A decoder: reserves pages for a prompt's KV, asks a prefiller for it, and counts until all of it is there.

    $ python kv_decode.py
    run: python kv_prefill.py 5841...
    KV of 500 tokens is here, in pages [0, 1, 2, 3] ...

Run the command that it prints in a second shell, on this host or on another. The two send each other one message each,
which between services of your own can go over any channel.
"""

import asyncio

import msgspec
import numpy as np

import crossrail as xr
from crossrail.kv import KvLayout, KvReceiver, PagePool, RankMemory

# Of one model. Each side chooses its own pages, their order, and its tensor parallelism.
LAYOUT = KvLayout(layers=4, kv_heads=8, head_dim=64, dtype="float32", pages=50, page_tokens=32, order="NHD", tp=2)
MESSAGE_BYTES = 64 << 10


def check(ranks: list[RankMemory], pages: list[int], tokens: int) -> None:
    """Each element is token + 1000 x layer: what kv_prefill.py computes."""
    position = np.arange(tokens)
    for memory in ranks:
        for layer in range(LAYOUT.layers):
            for part in memory.layer(layer)[:, pages]:  # K, then V, of shape [pages, heads, tokens, elements]
                rows = part.transpose(0, 2, 1, 3).reshape(-1, LAYOUT.rank_heads, LAYOUT.head_dim)
                assert (rows[:tokens] == (position + 1000 * layer)[:, None, None]).all()


async def main() -> None:
    with xr.Engine("decode") as engine, engine.submit_recvs(4, MESSAGE_BYTES) as inbox:
        ranks = [RankMemory.alloc(engine, LAYOUT) for _ in range(LAYOUT.tp)]
        pool = PagePool(LAYOUT.pages, LAYOUT.page_tokens)
        receiver = KvReceiver(LAYOUT, ranks, pool)
        print("run: python kv_prefill.py", engine.address, flush=True)

        hello = await inbox.recv_async(timeout_s=600)  # a prefiller, and how it keeps its KV
        prefill = KvLayout.from_wire(msgspec.msgpack.decode(hello.data))
        reception = receiver.reserve("request-1", tokens=500, room_tokens=100)
        target = reception.dispatch(prefill, writer="prefill-1")
        await engine.submit_send(hello.peer, msgspec.msgpack.encode(target.to_wire()))

        # Nobody says "done": each piece of a page counts.
        await reception.arrived(timeout_s=30)
        pages = reception.lease.pages.tolist()
        check(ranks, pages[: LAYOUT.pages_of(500)], 500)
        print("KV of 500 tokens is here, in pages", pages[:4], "...")

        reception.release()  # the request has ended: its pages serve others
        await receiver.shut()


if __name__ == "__main__":
    asyncio.run(main())
