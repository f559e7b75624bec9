"""Tokens of a decoder's requests that are ready together travel together; none waits for another."""

import asyncio
import random

import msgspec
import numpy as np
import pytest

from crossrail.control.mailbox import NoAnswer
from crossrail.kv import messages as m
from crossrail.kv.nodes.outbox import Outbox
from crossrail.kv.router.requests import Chunk, Chunks
from tests.kv.scripts import SHORT, Town
from tests.support.kv_cluster import prompt_of
from tests.support.kv_net import Net
from tests.support.limits import WAIT_S
from tests.support.seeds import Seed


class Pair:
    """A decoder's mailbox and a router's, which notes the messages that come."""

    def __init__(self, seed: Seed) -> None:
        net = Net(random.Random(seed.number()))
        self.decoder, self.router = (m.mailbox(net.wire(name), b"s3cret") for name in ("decoder", "router"))
        self.outbox = Outbox(self.decoder, WAIT_S)
        self.came: list[list[str]] = []
        self.unwanted: set[str] = set()
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.router.handle(m.Tokens, self._on_tokens)
        self.router.handle(m.TokensOfSeveral, self._on_several)
        self.decoder.start()
        self.router.start()

    async def _on_tokens(self, _: bytes, tokens: m.Tokens) -> m.Message:
        self.came.append([tokens.request])
        await self.goes_on.wait()
        return m.Taken(tokens.request not in self.unwanted)

    async def _on_several(self, _: bytes, tokens: m.TokensOfSeveral) -> m.Message:
        self.came.append([piece.request for piece in tokens.pieces])
        await self.goes_on.wait()
        return m.TakenOfSeveral([piece.request not in self.unwanted for piece in tokens.pieces])

    async def offer(self, request: str, count: int = 1, end: m.End | None = None) -> bool | None:
        tokens = m.Tokens(request, 0, m.pack_few([7] * count), end)
        return await self.outbox.offer(self.router.address, tokens)

    async def close(self) -> None:
        await self.decoder.close()
        await self.router.close()


async def test_what_is_ready_together_is_one_message_and_each_hears_of_its_own(seed: Seed) -> None:
    pair = Pair(seed)
    pair.unwanted = {"r1"}
    assert await asyncio.gather(*(pair.offer(f"r{n}") for n in range(3))) == [True, False, True]
    assert await pair.offer("r3") is True
    assert pair.came == [["r0", "r1", "r2"], ["r3"]]
    await pair.close()


async def test_what_comes_while_a_message_is_not_answered_does_not_wait_for_that(seed: Seed) -> None:
    pair = Pair(seed)
    pair.goes_on.clear()
    first = [asyncio.ensure_future(pair.offer(f"r{n}")) for n in range(2)]
    while not pair.came:
        await asyncio.sleep(0)
    pair.router.handle(m.Tokens, _taken)
    assert await asyncio.wait_for(pair.offer("r2"), WAIT_S) is True
    assert not any(offer.done() for offer in first)
    pair.goes_on.set()
    assert await asyncio.gather(*first) == [True, True]
    await pair.close()


async def _taken(_: bytes, __: m.Tokens) -> m.Message:
    return m.Taken()


@pytest.mark.parametrize("kind", ["tokens", "timelines", "many"])
async def test_message_of_much_is_several_each_of_one_packet(seed: Seed, kind: str) -> None:
    pair = Pair(seed)
    spans = [m.Span("prefiller: prefill 1000", 0.0, 1.0)] * 100
    end = m.End("length", "x" * 100, spans) if kind == "timelines" else None
    offers = [pair.offer(f"r{n}", 4096 if kind == "tokens" else 1, end) for n in range(600 if kind == "many" else 20)]
    assert await asyncio.gather(*offers) == [True] * len(offers)
    assert [request for message in pair.came for request in message] == [f"r{n}" for n in range(len(offers))]
    assert 1 < len(pair.came) < len(offers)
    packed = [m.Tokens(f"r{n}", 0, m.pack_few([7] * 4096)) for n in range(2)]
    assert len(msgspec.msgpack.encode(m.Envelope(m.TokensOfSeveral(packed)))) < 60_000
    await pair.close()


async def test_message_that_is_not_answered_is_taken_of_none(seed: Seed) -> None:
    pair = Pair(seed)

    async def fails(_: bytes, __: m.TokensOfSeveral) -> m.Message:
        raise NoAnswer("not now")

    pair.router.handle(m.TokensOfSeveral, fails)
    assert await asyncio.gather(*(pair.offer(f"r{n}") for n in range(3))) == [None] * 3
    await pair.close()


async def test_answer_to_others_than_were_offered_is_none(seed: Seed) -> None:
    pair = Pair(seed)

    async def short(_: bytes, __: m.TokensOfSeveral) -> m.Message:
        return m.TakenOfSeveral([True])

    pair.router.handle(m.TokensOfSeveral, short)
    assert await asyncio.gather(*(pair.offer(f"r{n}") for n in range(2))) == [None] * 2
    await pair.close()


async def test_mistake_of_ours_is_raised_to_all_who_wait(seed: Seed) -> None:
    pair = Pair(seed)
    offers = [pair.offer("r0"), pair.offer("r" * 200)]
    outcomes = await asyncio.gather(*offers, return_exceptions=True)
    assert ["cannot be sent" in str(outcome) for outcome in outcomes] == [True, True]
    await pair.close()


async def test_router_answers_for_each_request_of_a_message(town: Town) -> None:
    decoder = await town.add("a", "pause")
    running = asyncio.ensure_future(town.complete())
    while not decoder.started:
        await asyncio.sleep(0.001)
    pieces = [
        m.Tokens("stranger", 0, m.pack_few([9]), m.End("length")),
        m.Tokens(decoder.started[0], 0, m.pack_few([4, 5, 6]), m.End("length")),
    ]
    message = m.TokensOfSeveral(pieces)
    answer = await decoder.mailbox.ask(town.router.mailbox.address, message, m.TakenOfSeveral, WAIT_S)
    assert answer.wanted == [False, True]
    assert await running == [4, 5, 6]
    decoder.go_on.set()


# --- what the router keeps for a client ---


async def test_client_who_takes_nothing_has_one_chunk_of_all_tokens() -> None:
    chunks = Chunks()
    for token in range(1000):
        chunks.put(Chunk([token], model="model"))
    chunks.put(Chunk([], m.End("length")))
    assert await chunks.take() == Chunk(list(range(1000)), m.End("length"), "model")


async def test_chunk_that_comes_is_taken_at_once_and_the_next_is_another() -> None:
    chunks = Chunks()
    waiting = asyncio.ensure_future(chunks.take())
    await asyncio.sleep(0)
    chunks.put(Chunk([1]))
    first = await waiting
    chunks.put(Chunk([2]))
    assert first == Chunk([1])
    assert await chunks.take() == Chunk([2])


async def test_time_that_is_up_ends_a_wait_and_not_what_is_here() -> None:
    chunks = Chunks()
    waiting = asyncio.ensure_future(chunks.take())
    await asyncio.sleep(0)
    chunks.time_is_up()
    assert await waiting is None
    chunks.put(Chunk([1]))
    assert await chunks.take() == Chunk([1])
    assert await chunks.take() is None


async def test_client_that_left_takes_no_chunk_with_him(town: Town) -> None:
    await town.add("a", "pause")
    chunks = town.router.complete(prompt_of(1), SHORT)
    waiting = asyncio.ensure_future(anext(chunks))
    while not town.scripts["a"].started:
        await asyncio.sleep(0.001)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await chunks.aclose()
    assert town.router.requests == 0
    while not town.scripts["a"].cancelled:
        await asyncio.sleep(0.001)
    town.scripts["a"].go_on.set()


# --- tokens as they travel ---


@pytest.mark.parametrize("tokens", [[], [0], [5, 2**31 - 1], list(range(300))])
def test_few_tokens_are_packed_as_many_are(tokens: list[int]) -> None:
    packed = m.pack_few(tokens)
    assert packed == m.pack_tokens(np.array(tokens, np.int32))
    assert m.unpack_few(packed) == tokens


@pytest.mark.parametrize("tokens", [[-1], [2**31], [1.5]], ids=["negative", "large", "no-integer"])
def test_few_tokens_that_are_none_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="tokens must be integers in"):
        m.pack_few(tokens)


@pytest.mark.parametrize("data", [b"\x00", b"\x00\x00\x00\x80"], ids=["length", "negative"])
def test_bytes_that_are_no_tokens_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="token"):
        m.unpack_few(data)
