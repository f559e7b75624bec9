"""What crossrail asks of a model, and the plain run of one that everything disaggregated is compared with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from crossrail.errors import UsageError
from crossrail.kv.layout import KvLayout
from crossrail.kv.messages import Sampling
from crossrail.kv.sampling import sample

Tokens: TypeAlias = npt.NDArray[np.int32]
Logits: TypeAlias = npt.NDArray[np.float32]
Pages: TypeAlias = npt.NDArray[Any]
# By rank and layer: arrays of shape (parts, pages, rank_heads, page_tokens, head_dim), dtype layout.storage, that share
# the memory in which the node keeps its KV (KvLayout.layer_view).
Cache: TypeAlias = Sequence[Sequence[npt.NDArray[Any]]]


@runtime_checkable
class Tokenizer(Protocol):
    """Between text and tokens, for the router's front. Threads: encode() of long texts runs in one of its own, beside
    the others, which run on the event loop.
    """

    def encode(self, text: str) -> Tokens:
        """UsageError for text that it cannot take."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of these tokens; of each alone, so that a stream can be shown as it comes."""


@runtime_checkable
class Model(Protocol):
    """A model as prefillers and decoders use it. Threads: its coroutines run on the node's event loop.

    What takes long must leave the loop free meanwhile: `await asyncio.to_thread(...)`.

    name: nodes of different names never serve one request. tail_bytes: what prefill hands on beside the KV. With 0,
    nothing, decoders go on as soon as the KV of the last layer is there.
    pages, everywhere: those of the request, in order; token t lies in pages[t // page_tokens]. Once a call has ended,
    also by being cancelled, nothing of it touches them.
    """

    name: str
    layout: KvLayout
    end_tokens: frozenset[int]
    tail_bytes: int

    def check(self, prompt: Tokens, max_tokens: int) -> None:
        """UsageError for a prompt that this model cannot run, or not with so many tokens behind it."""

    async def prefill(
        self, cache: Cache, tokens: Tokens, start: int, pages: Pages, layer_done: Callable[[], None]
    ) -> bytes:
        """Writes the KV of tokens[start:]; that of the earlier ones is there. Returns the tail.

        layer_done: called after each layer, once what it wrote may be read by others.
        """

    async def step(self, cache: Cache, token: int, position: int, pages: Pages, tail: bytes) -> tuple[Logits, bytes]:
        """One token: writes its KV, and returns logits for the next, shape (vocabulary,), and the tail after it."""


async def generate(
    model: Model,
    cache: Cache,
    prompt: Tokens,
    pages: Pages,
    sampling: Sampling,
    tail: bytes | None = None,
    *,
    chunk_tokens: int = 1 << 30,
) -> AsyncIterator[int]:
    """Tokens that follow the prompt. With tail, the KV of all of the prompt but its last token is there already.

    Without, the prompt is prefilled here, chunk_tokens at a time.
    """
    if tail is None:
        tail = bytes(model.tail_bytes)
        for start in range(0, len(prompt) - 1, chunk_tokens):
            end = min(start + chunk_tokens, len(prompt) - 1)
            tail = await model.prefill(cache, prompt[:end], start, pages, lambda: None)
    token, position = int(prompt[-1]), len(prompt) - 1
    for _ in range(sampling.max_tokens):
        logits, tail = await model.step(cache, token, position, pages, tail)
        position += 1
        token = sample(logits, sampling, position)
        yield token
        if token in model.end_tokens and not sampling.ignore_end:
            return


def check_vocabulary(tokens: Tokens, vocabulary: int) -> None:
    """UsageError unless all are in 0..vocabulary - 1."""
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise UsageError(f"tokens must be in 0..{vocabulary - 1}, not {tokens.min()}..{tokens.max()}")
