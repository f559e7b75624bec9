"""What crossrail asks of a model, and the plain run of a model that every disaggregated run is compared with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Container, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from crossrail._options import check_counts, check_kind, check_texts
from crossrail.errors import UsageError
from crossrail.kv.foreign import exceptions_only
from crossrail.kv.messages import Sampling, check_name
from crossrail.kv.sampling import sample
from crossrail.kv.transfer.layout import KvLayout

__all__ = ["Cache", "Logits", "Model", "Pages", "Tokenizer", "Tokens", "check_vocabulary", "generate"]

Tokens: TypeAlias = npt.NDArray[np.int32]
Logits: TypeAlias = npt.NDArray[np.float32]
Pages: TypeAlias = npt.NDArray[Any]
# Indexed by rank and layer: arrays of shape (parts, pages, rank_heads, page_tokens, head_dim), dtype layout.storage,
# that share the node's KV memory (KvLayout.layer_view).
Cache: TypeAlias = Sequence[Sequence[npt.NDArray[Any]]]


@runtime_checkable
class Tokenizer(Protocol):
    """Converts between text and tokens, for the router's HTTP front end.

    Threads: encode() of long texts runs in a thread of its own, concurrently with other calls, which run on the event
    loop.
    """

    def encode(self, text: str) -> Tokens:
        """UsageError for text that it cannot encode."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens. Also called for single tokens, to show a stream as it arrives."""


@runtime_checkable
class Model(Protocol):
    """A model as prefillers and decoders use it. Threads: its coroutines run on the node's event loop.

    Long computations must not block the loop: use `await asyncio.to_thread(...)`.

    name: 1 to 128 characters; nodes with different names never serve the same request. tail_bytes: length of what
        prefill passes on besides the KV. If it is 0, decoders continue as soon as the KV of the last layer has arrived.
    pages, everywhere: those of the request, in order; token t is in pages[t // page_tokens]. Once a call has ended,
        even by cancellation, nothing of it touches them.
    """

    name: str
    layout: KvLayout
    end_tokens: frozenset[int]
    tail_bytes: int

    def check(self, prompt: Tokens, max_tokens: int) -> None:
        """UsageError for a prompt that this model cannot run, or not with this many tokens after it. Any other
        exception refuses the request as well, and is logged.
        """

    async def prefill(
        self, cache: Cache, tokens: Tokens, start: int, pages: Pages, layer_done: Callable[[], None]
    ) -> bytes:
        """Writes the KV of tokens[start:]; that of earlier tokens is already there. Returns the tail.

        layer_done: called once after each layer, before prefill() returns and once others may read what the layer
            wrote; on any thread.
        """

    async def step(self, cache: Cache, token: int, position: int, pages: Pages, tail: bytes) -> tuple[Logits, bytes]:
        """Runs one token: writes its KV, and returns the logits of the next, shape (vocabulary,), and the new tail."""


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
    """Tokens that follow the prompt. With a tail, the KV of the whole prompt except its last token is already there.

    Without one, the prompt is prefilled here, chunk_tokens at a time.
    """
    if tail is None:
        tail = bytes(model.tail_bytes)
        for start in range(0, len(prompt) - 1, chunk_tokens):
            end = min(start + chunk_tokens, len(prompt) - 1)
            tail = await model.prefill(cache, prompt[:end], start, pages, lambda: None)
    token, position = int(prompt[-1]), len(prompt) - 1
    for _ in range(sampling.max_tokens):
        with exceptions_only(awaits=True):
            logits, tail = await model.step(cache, token, position, pages, tail)
        position += 1
        token = sample(logits, sampling, position)
        yield token
        if token in model.end_tokens and not sampling.ignore_end:
            return


def check_model(model: Model) -> None:
    """UsageError for a model that no node can serve: a router would never accept the node with such a name, or every
    request would fail.
    """
    check_kind(model.layout, "the model's layout", KvLayout, "a KvLayout")
    check_texts(**{"the model's name": model.name})
    check_name(model.name, "the model's name")
    check_counts(0, **{"the model's tail_bytes": model.tail_bytes})
    check_kind(model.end_tokens, "the model's end_tokens", Container, "a set of tokens")


def check_vocabulary(tokens: Tokens, vocabulary: int) -> None:
    """UsageError unless all are in 0..vocabulary - 1."""
    outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if outside.size:
        raise UsageError(f"tokens must be in 0..{vocabulary - 1}, and {outside[0]} is not")
