"""Scenarios in which nothing breaks: the bytes moved are checked, and the speed."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

import numpy as np

import crossrail as xr
from crossrail.sim.scenarios.base import Run

_MIB = 1 << 20
_GIB = 1 << 30
_WAIT_S = 60.0
_TRIES_MAX = 1000


def gbps(nbytes: int, seconds: float) -> float:
    """10**9 bits per second."""
    return nbytes * 8 / seconds / 1e9 if seconds > 0 else 0.0


async def until_counted(
    run: Run, sender: xr.Engine, source: xr.Region, receiver: xr.Engine, target: xr.Region, offset: int, nbytes: int
) -> int:
    """Writes these bytes to the same offset until they are done and counted. How often that had to be repeated."""
    for repeated in range(_TRIES_MAX):
        # A write in doubt fails where a NIC cannot tell which immediates arrived: some of its count may be there. So
        # the next try has another number.
        counter = receiver.alloc_imm()
        transfer = sender.submit_write(
            source, target.descriptor, nbytes, src_offset=offset, dst_offset=offset, imm=counter.imm
        )
        try:
            await run.track(transfer, f"write at {offset}")
        except xr.PeerLost:
            sender.forget_peer(receiver.address)
            await asyncio.sleep(0.01)
            continue
        except xr.TransferError:
            continue
        await counter.wait_async(1, timeout_s=_WAIT_S)
        run.check.equal(f"further counts of the write at {offset}", counter.poll(), 0)
        return repeated
    raise RuntimeError(f"the write at {offset} failed {_TRIES_MAX} times")


# --- pair ---


async def pair(run: Run) -> None:
    """Two engines with unequal rails write to and read from each other, at once, in pieces of all lengths."""
    kind = run.rng.choice(["cx7", "efa200"])
    engines = [run.host(name, nic=f"{run.rng.randint(1, 4)}x{kind}").engine(name) for name in ("left", "right")]
    began_s = run.world.now_s
    moved = await asyncio.gather(*(_exchange(run, here, there) for here, there in itertools.permutations(engines)))
    run.figure("both ways", gbps(sum(moved), run.world.now_s - began_s), "Gb/s")


async def _exchange(run: Run, here: xr.Engine, there: xr.Engine) -> int:
    lengths = [int(2 ** run.rng.uniform(0, 21)) for _ in range(40)]
    starts = list(itertools.accumulate(lengths, initial=0))
    source, target = here.alloc(starts[-1]), there.alloc(starts[-1])
    data = run.random_bytes(starts[-1])
    source.array()[:] = data
    counter = run.counter(there)
    room = asyncio.Semaphore(run.rng.randint(1, 16))

    async def write(start: int, length: int) -> None:
        async with room:
            transfer = here.submit_write(
                source, target.descriptor, length, src_offset=start, dst_offset=start, imm=counter.imm
            )
            await run.track(transfer, f"write of {length} bytes")

    await asyncio.gather(*(write(start, length) for start, length in zip(starts, lengths, strict=False)))
    await counter.wait_async(len(lengths), timeout_s=_WAIT_S)
    run.check.same_bytes(f"what {here.name} wrote", target.array(), data)
    run.seal(f"what {here.name} wrote", target.array())
    back = here.alloc(starts[-1])
    await run.track(here.submit_read(back, target.descriptor), "read of all")
    run.check.same_bytes(f"what {here.name} read back", back.array(), data)
    run.seal(f"what {here.name} read back", back.array())
    return 2 * starts[-1]


# --- paged-push ---

_LAYERS = 8
_PAGE_BYTES = 32 << 10
_LAYER_COMPUTE_S = 2e-3
_POOL_PAGES = 64


@dataclass
class _Request:
    """A decoder's request to the prefiller: where the pages go and what announces them."""

    pages: np.ndarray[tuple[int], np.dtype[np.int64]]
    target: xr.RegionDescriptor
    imm: int

    def to_bytes(self) -> bytes:
        descriptor = bytes(self.target)
        return b"".join(
            (self.imm.to_bytes(4, "big"), len(descriptor).to_bytes(2, "big"), descriptor, self.pages.tobytes())
        )

    @staticmethod
    def from_bytes(data: bytes) -> _Request:
        cut = 6 + int.from_bytes(data[4:6], "big")
        target = xr.RegionDescriptor.from_bytes(data[6:cut])
        return _Request(np.frombuffer(data[cut:], np.int64), target, int.from_bytes(data[:4], "big"))


async def paged_push(run: Run) -> None:
    """A prefiller pushes KV-cache pages layer by layer, while it computes; decoders start when the count is full."""
    prefill = run.host("prefill", nic="2xefa200").engine("prefill")
    decoders = [run.host(f"decode{i}", nic="2xefa200").engine(f"decode{i}") for i in range(3)]
    cache = prefill.alloc(_LAYERS * _POOL_PAGES * _PAGE_BYTES)
    cache.array()[:] = run.random_bytes(cache.nbytes)
    server = asyncio.create_task(_prefill_server(run, prefill, cache))
    latencies = await asyncio.gather(*(_decode(run, engine, prefill.address, cache) for engine in decoders))
    server.cancel()
    every = sorted(latency for of_one in latencies for latency in of_one)
    run.figure("median to the first token", 1e3 * every[len(every) // 2], "ms")
    run.figure("longest", 1e3 * every[-1], "ms")


async def _prefill_server(run: Run, engine: xr.Engine, cache: xr.Region) -> None:
    computing = asyncio.Lock()  # one request at a time on the GPU; their transfers overlap

    async def serve(request: _Request) -> None:
        source_pages = np.arange(len(request.pages), dtype=np.int64)
        for layer in range(_LAYERS):
            async with computing:
                await asyncio.sleep(_LAYER_COMPUTE_S)
            transfer = engine.submit_paged_writes(
                cache,
                source_pages + layer * _POOL_PAGES,
                request.target,
                request.pages + layer * _POOL_PAGES,
                _PAGE_BYTES,
                imm=request.imm,
            )
            await run.track(transfer, f"layer {layer}")

    serving: set[asyncio.Task[None]] = set()
    with engine.submit_recvs(16, 64 << 10) as pool:
        async for message in pool:
            serving.add(asyncio.create_task(serve(_Request.from_bytes(message.data))))


async def _decode(run: Run, engine: xr.Engine, prefiller: xr.Address, cache: xr.Region) -> list[float]:
    memory = engine.alloc(cache.nbytes)
    latencies = []
    for _ in range(3):
        await asyncio.sleep(run.rng.uniform(0, 0.05))
        began_s = run.world.now_s
        pages = np.array(run.rng.sample(range(_POOL_PAGES), run.rng.randint(1, 48)), np.int64)
        counter = run.counter(engine)
        request = _Request(pages, memory.descriptor, counter.imm)
        await run.track(engine.submit_send(prefiller, request.to_bytes()), "request")
        await counter.wait_async(_LAYERS * len(pages), timeout_s=_WAIT_S)
        latencies.append(run.world.now_s - began_s)
        got = memory.array("uint8", (_LAYERS, _POOL_PAGES, _PAGE_BYTES))[:, pages]
        sent = cache.array("uint8", (_LAYERS, _POOL_PAGES, _PAGE_BYTES))[:, : len(pages)]
        run.check.same_bytes(f"pages of {engine.name}", got.reshape(-1), sent.reshape(-1))
        counter.release()
    run.seal(f"the cache of {engine.name}", memory.array())
    return latencies


# --- weight-fanout ---

_TRAINERS = 8
_RANKS = 8
_SHARD_BYTES = 16 * _GIB


async def weight_fanout(run: Run) -> None:
    """Eight trainers give eight inference ranks a terabyte of weights, of which no byte exists."""
    trainers = [run.host(f"train{i}").engine(f"train{i}") for i in range(_TRAINERS)]
    ranks = [run.host(f"infer{i}").engine(f"infer{i}") for i in range(_RANKS)]
    shards = [engine.register_phantom(_RANKS * _SHARD_BYTES) for engine in trainers]
    models = [engine.register_phantom(_TRAINERS * _SHARD_BYTES) for engine in ranks]
    counters = [run.counter(engine) for engine in ranks]
    began_s = run.world.now_s

    async def train(t: int) -> None:
        order = [(t + step) % _RANKS for step in range(_RANKS)]  # so that no rank is everybody's first
        for r in order:
            transfer = trainers[t].submit_write(
                shards[t],
                models[r].descriptor,
                _SHARD_BYTES,
                src_offset=r * _SHARD_BYTES,
                dst_offset=t * _SHARD_BYTES,
                imm=counters[r].imm,
            )
            await run.track(transfer, f"shard {t} for rank {r}")

    await asyncio.gather(
        *(train(t) for t in range(_TRAINERS)),
        *(counter.wait_async(_TRAINERS, timeout_s=60.0) for counter in counters),
    )
    took_s = run.world.now_s - began_s
    run.figure("weights", _TRAINERS * _RANKS * _SHARD_BYTES / 2**40, "TiB")
    run.figure("time", took_s, "s")
    run.figure("each rank", gbps(_TRAINERS * _SHARD_BYTES, took_s), "Gb/s")


# --- moe-scatter ---

_EXPERT_RANKS = 8
_HOSTS = 4
_TOKENS = 64
_TOP_K = 4
_TOKEN_BYTES = 1024


async def moe_scatter(run: Run) -> None:
    """Ranks of four hosts send tokens to the ranks of their experts and get them back, in rounds with barriers."""
    hosts = [run.host(f"node{i}") for i in range(_HOSTS)]
    engines = [hosts[i % _HOSTS].engine(f"rank{i}") for i in range(_EXPERT_RANKS)]
    members = [_Rank(run, engine, i) for i, engine in enumerate(engines)]
    for member in members:
        member.meet(members)
    began_s = run.world.now_s
    rounds = 6
    await asyncio.gather(*(member.play(rounds) for member in members))
    run.figure("a round", 1e6 * (run.world.now_s - began_s) / rounds, "us")


class _Rank:
    """For each other rank it has a slot of _TOKENS tokens, in both directions, and a row of the table of lengths."""

    def __init__(self, run: Run, engine: xr.Engine, index: int) -> None:
        slots = _EXPERT_RANKS * _TOKENS * _TOKEN_BYTES
        self.run, self.engine, self.index = run, engine, index
        self.out, self.received, self.returned = engine.alloc(slots), engine.alloc(slots), engine.alloc(slots)
        self.lengths_in = engine.alloc(8 * _EXPERT_RANKS)
        self.routes, self.dispatch, self.combine, self.barrier = (run.counter(engine, imm) for imm in range(4))

    def meet(self, ranks: list[_Rank]) -> None:
        self.ranks = ranks
        self.group = self.engine.add_peer_group([rank.engine.address for rank in ranks if rank is not self])
        self.others = [rank for rank in ranks if rank is not self]

    async def play(self, rounds: int) -> None:
        for round_index in range(rounds):
            sent = await self._dispatch()
            await self._give_back()
            await self.combine.wait_async(len(self.others), timeout_s=_WAIT_S)
            for rank, tokens in sent.items():
                start = rank.index * _TOKENS * _TOKEN_BYTES
                got = self.returned.array()[start : start + len(tokens)]
                self.run.check.same_bytes(
                    f"round {round_index}, rank {self.index} from {rank.index}", got, tokens ^ 0xFF
                )
            await self.run.track(self.engine.submit_barrier(self.group, 3), "barrier")
            await self.barrier.wait_async(len(self.others), timeout_s=_WAIT_S)

    async def _dispatch(self) -> dict[_Rank, np.ndarray[tuple[int], np.dtype[np.uint8]]]:
        """Draws which tokens go where, tells each rank how many come, and sends them."""
        rng, others = self.run.rng, self.others
        routed = [0] * len(others)
        for _ in range(_TOKENS):
            for choice in rng.sample(range(len(others)), _TOP_K):
                routed[choice] += 1
        lengths = [count * _TOKEN_BYTES for count in routed]
        sent = {}
        for rank, length in zip(others, lengths, strict=True):
            start = rank.index * _TOKENS * _TOKEN_BYTES
            self.out.array()[start : start + length] = sent[rank] = self.run.random_bytes(length)
        for rank, length in zip(others, lengths, strict=True):
            table = self.engine.register(np.array([length], np.uint64))
            announced = self.engine.submit_write(table, rank.lengths_in.descriptor, dst_offset=8 * self.index, imm=0)
            await self.run.track(announced, "route")
            table.close()
        await self.routes.wait_async(len(others), timeout_s=_WAIT_S)
        await self._scatter([rank.received for rank in others], self.out, lengths, imm=1)
        await self.dispatch.wait_async(len(others), timeout_s=_WAIT_S)
        return sent

    async def _give_back(self) -> None:
        """What an expert does: inverts every bit."""
        lengths = [int(self.lengths_in.array("uint64")[rank.index]) for rank in self.others]
        np.bitwise_xor(self.received.array(), 0xFF, out=self.received.array())
        await self._scatter([rank.returned for rank in self.others], self.received, lengths, imm=2)

    async def _scatter(self, targets: list[xr.Region], source: xr.Region, lengths: list[int], imm: int) -> None:
        slot = _TOKENS * _TOKEN_BYTES
        transfer = self.engine.submit_scatter(
            source,
            [target.descriptor for target in targets],
            lengths=lengths,
            src_offsets=[rank.index * slot for rank in self.others],
            dst_offsets=self.index * slot,
            group=self.group,
            imm=imm,
        )
        await self.run.track(transfer, "scatter")
