"""A prefiller: writes a prompt's KV into the decoder's pages, layer by layer, while the model still computes.

    $ python kv_prefill.py 5841...
    500 tokens in 2 steps of 4 layers: all written to decode

kv_decode.py prints the command for this one.
"""

import asyncio
import sys

import msgspec

import crossrail as xr
from crossrail.kv import KvLayout, KvSender, KvTarget, PagePool, RankMemory
from kv_decode import MESSAGE_BYTES

LAYOUT = KvLayout(layers=4, kv_heads=8, head_dim=64, dtype="float32", pages=100, page_tokens=16)
CHUNK = 256  # tokens of a step


def compute(memory: RankMemory, layer: int, pages: list[int], begin: int, end: int) -> None:
    """Stands for your model: K and V of these tokens, in this layer, go into the prefiller's own pages."""
    for token in range(begin, end):
        memory.layer(layer)[:, pages[token // LAYOUT.page_tokens], :, token % LAYOUT.page_tokens] = token + 1000 * layer


async def main(decoder: xr.Address) -> None:
    with xr.Engine("prefill") as engine, engine.submit_recvs(4, MESSAGE_BYTES) as inbox:
        memory = RankMemory.alloc(engine, LAYOUT)
        sender = KvSender(LAYOUT, {0: memory})
        pool = PagePool(LAYOUT.pages, LAYOUT.page_tokens)

        await engine.submit_send(decoder, msgspec.msgpack.encode(LAYOUT.to_wire()))
        answer = await inbox.recv_async(timeout_s=30)
        target = KvTarget.from_wire(msgspec.msgpack.decode(answer.data))

        lease = pool.reserve(LAYOUT.pages_of(target.tokens), target.request)
        job = sender.open(target, lease)
        ends = [*range(CHUNK, target.tokens, CHUNK), target.tokens]
        for begin, end in zip([0, *ends], ends, strict=False):
            sender.begin_step([(job, end)])  # prepares the writes; none begins before its layer is done
            for layer in range(LAYOUT.layers):
                compute(memory, layer, lease.pages.tolist(), begin, end)
                sender.layer_done()  # the engine writes this layer while the next one is computed
        await job.finish(timeout_s=30)  # all is written: the pages may serve others
        lease.release()
        await sender.close()
        print(f"{target.tokens} tokens in {len(ends)} steps of {LAYOUT.layers} layers: all written to {decoder.name}")


if __name__ == "__main__":
    asyncio.run(main(xr.Address.from_text(sys.argv[1])))
