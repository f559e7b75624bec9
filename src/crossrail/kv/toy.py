"""A numpy model for tests and the demo: its tokens mean nothing, but each depends on every byte of the KV before it.

Each layer keeps, per token, numbers drawn from that token's state; "attention" is their sum, weighted by odd numbers,
modulo 2**64. A changed byte times an odd weight is never 0 modulo 2**64, and everything else is a bijection of the
state: so one wrong, lost or late byte changes the state of every later token, and with it the output.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from crossrail._options import check_seconds, check_whole
from crossrail.errors import UsageError
from crossrail.kv.model import Cache, Logits, Pages, Tokens, check_vocabulary
from crossrail.kv.transfer.layout import KvLayout

_U64 = npt.NDArray[np.uint64]
_VOCABULARY = 257  # bytes, plus the end token
_TAIL_BYTES = 64
_SEED_MAX = (1 << 128) - 1
_NOTHING = np.uint64(0)
_EMBED_TOKEN, _EMBED_POSITION = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)


class ToyTokenizer:
    """A Tokenizer: tokens are bytes of UTF-8. The toy model's output is not text: printable characters stand for its
    tokens.
    """

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(0x21 + token % 94) for token in tokens if token < 256)


class ToyModel:
    """A Model. Equal seeds, and layouts that differ only in pages, order and TP, give equal tokens.

    seed: 0 to 2**128 - 1. token_s: artificial duration of a layer per token, behind which a transfer can hide.
    """

    end_tokens = frozenset({_VOCABULARY - 1})
    tail_bytes = _TAIL_BYTES

    def __init__(self, layout: KvLayout, seed: int = 1, token_s: float = 0.0) -> None:
        check_whole(seed=seed)
        if not 0 <= seed <= _SEED_MAX:
            raise UsageError(f"seed={seed} must be in 0..2**128-1")
        check_seconds(token_s=token_s)
        self.name = f"toy-{layout.layers}x{layout.kv_heads}x{layout.head_dim}-{seed}"
        self.layout = layout
        self._token_s = token_s
        self._bits = np.dtype(f"u{layout.storage.itemsize}")
        shape = (layout.layers, layout.parts, layout.kv_heads, layout.head_dim)
        draw = np.random.Generator(np.random.Philox(key=seed))
        odd = np.uint64(1)
        self._write = draw.integers(0, 1 << 64, shape, np.uint64) | odd
        self._read = draw.integers(0, 1 << 64, shape, np.uint64) | odd
        self._replica = draw.integers(0, 1 << 64, shape, np.uint64) | odd
        self._words = draw.integers(0, 1 << 64, _VOCABULARY, np.uint64)

    def check(self, prompt: Tokens, max_tokens: int) -> None:
        check_vocabulary(prompt, _VOCABULARY)

    async def prefill(
        self, cache: Cache, tokens: Tokens, start: int, pages: Pages, layer_done: Callable[[], None]
    ) -> bytes:
        await self._run(cache, tokens[start:], start, pages, layer_done)
        return self._tail_after(cache, len(tokens), pages)

    async def step(self, cache: Cache, token: int, position: int, pages: Pages, tail: bytes) -> tuple[Logits, bytes]:
        # A tail that contradicts the KV before it changes everything from here on; the right one changes nothing.
        right = np.frombuffer(self._tail_after(cache, position, pages), np.uint64)
        wrong = np.bitwise_xor.reduce((np.frombuffer(tail, np.uint64) ^ right) * _odd(_TAIL_BYTES // 8))
        state = (await self._run(cache, np.array([token], np.int32), position, pages, lambda: None, wrong))[-1]
        logits = (_mixed(self._words ^ state) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 20)
        return logits, self._tail_after(cache, position + 1, pages)

    async def _run(
        self,
        cache: Cache,
        tokens: Tokens,
        start: int,
        pages: Pages,
        layer_done: Callable[[], None],
        wrong: np.uint64 = _NOTHING,
    ) -> _U64:
        """The last layer's output for each token. wrong: disturbs the first one."""
        positions = np.arange(start, start + len(tokens), dtype=np.uint64)
        embedded = tokens.astype(np.uint64) * _EMBED_TOKEN + positions * _EMBED_POSITION
        embedded[0] ^= wrong
        state = _mixed(embedded)
        for layer in range(self.layout.layers):
            self._store(cache, layer, state, start, pages)
            state = _mixed(state ^ self._attend(cache, layer, start, len(tokens), pages))
            await asyncio.sleep(self._token_s * len(tokens))
            layer_done()
        return state

    def _places(self, begin: int, end: int, pages: Pages) -> tuple[Pages, Pages]:
        positions = np.arange(begin, end)
        return np.asarray(pages)[positions // self.layout.page_tokens], positions % self.layout.page_tokens

    def _store(self, cache: Cache, layer: int, state: _U64, start: int, pages: Pages) -> None:
        page, slot = self._places(start, start + len(state), pages)
        drawn = _mixed(state[:, None, None, None] * self._write[layer])
        values = (drawn >> np.uint64(64 - 8 * self._bits.itemsize)).astype(self._bits)
        for rank, layers in enumerate(cache):
            heads = self.layout.heads_of(rank)
            layers[layer].view(self._bits)[:, page, :, slot, :] = values[:, :, heads.start : heads.stop]

    def _attend(self, cache: Cache, layer: int, start: int, count: int, pages: Pages) -> _U64:
        """For each new token the weighted sum over itself and all tokens before it; shape (count,)."""
        sums = self._sums(cache, layer, 0, start + count, pages) * _odd(start + count)
        return np.cumsum(sums, dtype=np.uint64)[start:]

    def _tail_after(self, cache: Cache, position: int, pages: Pages) -> bytes:
        """The tail implied by the KV of the token before this position; zeros before the first."""
        if position == 0:
            return bytes(_TAIL_BYTES)
        sums = self._sums(cache, self.layout.layers - 1, position - 1, position, pages)
        return _mixed(sums ^ _odd(_TAIL_BYTES // 8)).tobytes()

    def _sums(self, cache: Cache, layer: int, begin: int, end: int, pages: Pages) -> _U64:
        """For each of these tokens the weighted sum of all that one layer holds; shape (end - begin,)."""
        page, slot = self._places(begin, end, pages)
        held = [layers[layer].view(self._bits)[:, page, :, slot, :] for layers in cache]
        sums = np.zeros(end - begin, np.uint64)
        for rank, values in enumerate(held):
            heads = slice(self.layout.heads_of(rank).start, self.layout.heads_of(rank).stop)
            if rank % self.layout.replicas == 0:
                sums += _weighted(values, self._read[layer][:, heads])
            else:  # a replica contributes only where it differs
                differs = values.astype(np.uint64) - held[rank - rank % self.layout.replicas]
                sums += _weighted(differs, self._replica[layer][:, heads])
        return sums


def _weighted(values: npt.NDArray[np.unsignedinteger[Any]], weights: _U64) -> _U64:
    """The weighted sum of each token's values. Most of the toy's time is spent here, and einsum does not copy all of
    them to 64 bits.
    """
    sums: _U64 = np.einsum("tphd,phd->t", values, weights, dtype=np.uint64, casting="safe")
    return sums


def _odd(count: int) -> _U64:
    return np.arange(count, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def _mixed(values: _U64) -> _U64:
    """A bijection of 64-bit numbers that leaves no pattern: xor-shifts and multiplications by odd numbers."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
        values = (values ^ (values >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return values ^ (values >> np.uint64(32))
