"""A causal language model of transformers as a crossrail.kv Model, on the CPU.

The computation is stock transformers code, attention included. Ours are the cache that it writes to (paged.py), and a
hook after each layer's attention that raises the sender's word.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any, NamedTuple, TypeVar

import numpy as np

from crossrail._extras import needs
from crossrail._options import check_counts
from crossrail.errors import UsageError
from crossrail.kv.model import Cache, Logits, Pages, Tokens, check_vocabulary
from crossrail.kv.models.paged import Row, paged_cache
from crossrail.kv.models.steps import Steps, until_over
from crossrail.kv.transfer.layout import KvLayout, Order

with needs(__name__, "'crossrail[transformers]'"):
    import torch
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

Result = TypeVar("Result")

_SAMPLED_BYTES = 2048  # of each weight, for the fingerprint


@dataclass(frozen=True)
class HostOptions:
    """How a node keeps its KV and runs the model; all but dtype may differ between nodes.

    pages, page_tokens, order, separate_kv, tp: as in KvLayout. dtype: of weights, KV and computation; "": the
    checkpoint's, or float32. threads: torch's, in this process; 0: torch's choice. batch: most decode steps to run as
    one; with 1 each request's numbers are independent of what else runs, down to the last bit.
    """

    pages: int = 512
    page_tokens: int = 16
    order: Order = "HND"
    separate_kv: bool = True
    tp: int = 1
    dtype: str = ""
    threads: int = 0
    batch: int = 8

    def __post_init__(self) -> None:
        check_counts(0, threads=self.threads)
        check_counts(1, batch=self.batch)


class KvShape(NamedTuple):
    """What a model caches per token, found by running it. key_dim: as for paged_cache."""

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def is_latent(self) -> bool:
        """MLA: one compressed vector and a rotary part."""
        return self.key_dim != self.value_dim

    def layout(self, dtype: str, options: HostOptions) -> KvLayout:
        return KvLayout(
            layers=self.layers,
            pages=options.pages,
            page_tokens=options.page_tokens,
            kv_heads=self.kv_heads,
            head_dim=self.key_dim + self.value_dim if self.is_latent else self.key_dim,
            dtype=dtype,
            kind="MLA" if self.is_latent else "GQA",
            order=options.order,
            separate_kv=options.separate_kv,
            tp=options.tp,
        )


class Step(NamedTuple):
    """One token of one request, to be run."""

    cache: Cache
    token: int
    position: int
    pages: Pages


class _Abandoned(Exception):
    """Ends a forward pass whose result nobody wants."""


class _AllAttended(Exception):
    """Ends a forward pass that only had to fill the KV: nothing needs what the last layer does after its attention."""


class HostedModel:
    """A crossrail.kv.model.Model. Equal weights give equal names, and nodes with different names never serve one
    request.

    Numbers: equal chunks give equal KV, bit by bit, on processors of one kind. Other chunks, as after a cached prefix,
    and other companions in a batch of decode steps, give what torch's kernels compute for other shapes: equal up to
    rounding, and so equal tokens unless two are almost equally likely.

    Threads: coroutines on the event loop; the model runs in one thread of its own, which close() ends. Owner of model:
    this object. Raises UsageError for a model whose cache cannot be kept in pages.
    """

    tail_bytes = 0

    def __init__(self, model: Any, label: str, end_tokens: frozenset[int], options: HostOptions) -> None:
        self.end_tokens = end_tokens
        self._model = model.eval().requires_grad_(False)
        if options.threads:
            torch.set_num_threads(options.threads)
        attentions = _attentions(model)
        self._shape = _kv_shape(model, len(attentions))
        self.layout = self._shape.layout(str(model.dtype).removeprefix("torch."), options)
        self.name = f"{label}-{_fingerprint(model)}"
        for attention in attentions:
            attention.register_forward_hook(self._attention_done)
        attentions[-1].register_forward_hook(self._all_attended)
        self._layer_done: Callable[[], None] | None = None
        self._abandoned = Event()  # tells the running call to stop
        self._steps: Steps[Step, Logits] = Steps(partial(self._in_thread, self._decode), options.batch)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="crossrail-kv-model")

    def close(self) -> None:
        """Ends the thread once its current call has returned. Idempotent."""
        self._thread.shutdown()

    def check(self, prompt: Tokens, max_tokens: int) -> None:
        check_vocabulary(prompt, self._model.config.vocab_size)
        most = getattr(self._model.config, "max_position_embeddings", None)
        if most is not None and len(prompt) + max_tokens > most:
            raise UsageError(f"{len(prompt)} + {max_tokens} tokens, model {self.name!r} has positions for {most}")

    async def prefill(
        self, cache: Cache, tokens: Tokens, start: int, pages: Pages, layer_done: Callable[[], None]
    ) -> bytes:
        await self._in_thread(self._prefill, cache, tokens, start, pages, layer_done)
        return b""

    async def step(self, cache: Cache, token: int, position: int, pages: Pages, tail: bytes) -> tuple[Logits, bytes]:
        return await self._steps.step(Step(cache, token, position, pages)), tail

    # --- on the loop ---

    async def _in_thread(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Runs the call in the model's thread. If cancelled, still waits until the call no longer uses the pages."""
        over, abandoned = asyncio.Event(), Event()

        def end(future: asyncio.Future[Result]) -> None:
            future.exception()  # mark as retrieved: nobody looks at an abandoned call's exception
            over.set()

        future = asyncio.get_running_loop().run_in_executor(self._thread, self._run, abandoned, call, *arguments)
        future.add_done_callback(end)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            abandoned.set()
            await until_over(over)
            raise

    # --- in the model's thread ---

    def _run(self, abandoned: Event, call: Callable[..., Result], *arguments: Any) -> Result:
        if abandoned.is_set():
            raise _Abandoned
        self._abandoned = abandoned
        return call(*arguments)

    def _prefill(self, cache: Cache, tokens: Tokens, start: int, pages: Pages, layer_done: Callable[[], None]) -> None:
        row = self._row(pages, start, len(tokens) - start)
        self._layer_done = layer_done
        try:
            with torch.inference_mode(), suppress(_AllAttended):
                self._model.base_model(
                    input_ids=torch.from_numpy(tokens[start:].astype(np.int64))[None],
                    position_ids=torch.arange(start, len(tokens))[None],
                    past_key_values=paged_cache(cache, self.layout, self._shape.key_dim, [row]),
                    use_cache=True,
                )
        finally:
            self._layer_done = None

    def _decode(self, steps: Sequence[Step]) -> Sequence[Logits]:
        by_cache: dict[int, list[Step]] = {}
        for step in steps:
            by_cache.setdefault(id(step.cache), []).append(step)
        logits = {
            id(step): result
            for of_one in by_cache.values()
            for step, result in zip(of_one, self._decode_of_one_cache(of_one), strict=True)
        }
        return [logits[id(step)] for step in steps]

    def _decode_of_one_cache(self, steps: Sequence[Step]) -> Sequence[Logits]:
        rows = [self._row(step.pages, step.position, 1) for step in steps]
        longest = max(row.end for row in rows)
        lengths = torch.tensor([row.end for row in rows])
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor([[step.token] for step in steps]),
                position_ids=torch.tensor([[step.position] for step in steps]),
                # Shorter rows begin with padding. No mask if there is none: it would cost another kernel.
                attention_mask=None
                if bool((lengths == longest).all())
                else torch.arange(longest) >= longest - lengths[:, None],
                past_key_values=paged_cache(steps[0].cache, self.layout, self._shape.key_dim, rows),
                use_cache=True,
            )
        return list(output.logits[:, -1].float().numpy())

    def _row(self, pages: Pages, start: int, count: int) -> Row:
        return Row(torch.from_numpy(np.asarray(pages, np.int64)), start, count, self.layout.page_tokens)

    def _attention_done(self, *_: Any) -> None:
        """Runs after each layer's attention, output projection included: by then its KV is in the pages."""
        if self._abandoned.is_set():
            raise _Abandoned
        if self._layer_done is not None:
            self._layer_done()

    def _all_attended(self, *_: Any) -> None:
        if self._layer_done is not None:
            raise _AllAttended


def _attentions(model: Any) -> list[Any]:
    """The attention modules of the layers, in order. transformers numbers them, to find their part of the cache."""
    found = [
        module
        for module in model.modules()
        if hasattr(module, "layer_idx") and type(module).__name__.endswith("Attention")
    ]
    return sorted(found, key=lambda module: int(module.layer_idx))


def _kv_shape(model: Any, attentions: int) -> KvShape:
    """Runs two tokens and looks at what transformers' own cache holds then."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model.base_model(input_ids=torch.zeros((1, 2), dtype=torch.int64), past_key_values=cache, use_cache=True)
    what = f"{type(model).__name__}: crossrail keeps keys and values of equal layers"
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
        raise UsageError(f"{what}, not {', '.join(sorted({type(layer).__name__ for layer in cache.layers}))}")
    shapes = {(*layer.keys.shape, layer.values.shape[1], layer.values.shape[3]) for layer in cache.layers}
    if len(shapes) != 1 or len(cache.layers) != attentions:
        raise UsageError(f"{what}, this one has {attentions} attentions that cache {len(cache.layers)}: {shapes}")
    _, key_heads, _, key_dim, value_heads, value_dim = shapes.pop()
    if key_heads != value_heads or (key_dim != value_dim and key_heads != 1):
        raise UsageError(
            f"{what}, this one has {key_heads} x {key_dim} for keys, {value_heads} x {value_dim} for values"
        )
    return KvShape(len(cache.layers), key_heads, key_dim, value_dim)


def _fingerprint(model: Any) -> str:
    """Tells models with different weights or configuration values apart, from a sample of every weight."""
    said = model.config.to_dict()
    for of_this_host in ("_name_or_path", "transformers_version"):
        said.pop(of_this_host, None)
    digest = hashlib.blake2b(json.dumps(said, sort_keys=True, default=str).encode(), digest_size=6)
    for name, weight in model.named_parameters():
        flat = weight.detach().flatten()
        sample = flat[:: max(len(flat) * weight.element_size() // _SAMPLED_BYTES, 1)].contiguous()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
