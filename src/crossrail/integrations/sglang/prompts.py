"""What a request's KV is computed from beside the model, in digests: a decode server's half may be of another request,
read by another tokenizer, or mean another adapter by the same name.

SGLang shows a backend no requests. So its queues are watched where they make a sender or receiver for one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from crossrail._latest import Latest
from crossrail.integrations.sglang.hooks import hook_around
from crossrail.kv import messages as m

QUEUES = {
    "prefill": ("sglang.srt.disaggregation.prefill", "PrefillBootstrapQueue.create_sender"),
    "decode": ("sglang.srt.disaggregation.decode", "DecodePreallocQueue._create_receiver_and_enqueue"),
}
_DIGEST_BYTES = 16
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_REMEMBERED = 1024

Digest = Annotated[bytes, Meta(max_length=_DIGEST_BYTES)]


class Prompt(Struct, frozen=True):
    """tokens, weights: digests, b"" where that is not known here. adapter: of LoRA, by its name; "": none."""

    tokens: Digest = b""
    adapter: m.Text = ""
    weights: Digest = b""


def differ(theirs: Prompt | None, ours: Prompt | None) -> str:
    """In what the decoder's prompt is another than the one here, for people; "" if in nothing that can be compared."""
    if theirs is None or ours is None:
        return ""
    if theirs.adapter != ours.adapter:
        named = (f"LoRA adapter {name!r}" if name else "no LoRA adapter" for name in (theirs.adapter, ours.adapter))
        return "the decoder's request has {}, the one prefilled here {}".format(*named)
    if theirs.weights != ours.weights and theirs.weights and ours.weights:
        return f"the LoRA adapter {ours.adapter!r} has other weights at the decoder than here: load the same one again"
    if theirs.tokens != ours.tokens and theirs.tokens and ours.tokens:
        return "the decoder's prompt has other tokens than the one prefilled here"
    return ""


def watch_queue(mode: str) -> bool:
    """Has this process, if it is a scheduler, tell its senders or receivers their prompts. Idempotent."""
    module, method = QUEUES[mode]
    return hook_around(module, method, {"prefill": told_sender, "decode": told_receiver}[mode])


def told_sender(original: Callable[..., Any], queue: Any, request: Any, *more: Any, **named: Any) -> Any:
    """PrefillBootstrapQueue.create_sender."""
    made = original(queue, request, *more, **named)
    _tell(getattr(request, "disagg_kv_sender", None), queue, request)
    return made


def told_receiver(original: Callable[..., Any], queue: Any, request: Any, *more: Any, **named: Any) -> Any:
    """DecodePreallocQueue._create_receiver_and_enqueue."""
    made = original(queue, request, *more, **named)
    _tell(made.kv_receiver, queue, request)
    return made


def _tell(one: Any, queue: Any, request: Any) -> None:
    """one: a sender or receiver, of ours or of SGLang's backend for health checks."""
    if hasattr(one, "prompt"):
        manager = getattr(queue.scheduler.tp_worker.model_runner, "lora_manager", None)
        one.prompt = prompt_of(request, manager, one.kv_mgr.adapters)


class Adapters:
    """Digests of LoRA adapters' weights, each computed once: SGLang gives whatever it loads an id of its own.

    Threads: the scheduler's.
    """

    def __init__(self) -> None:
        self._known: Latest[str, bytes] = Latest(_REMEMBERED)

    def digest_of(self, lora_id: str, adapter: Any) -> bytes:
        """Of samples of the weights in memory, which differ everywhere after training, and how they are scaled."""
        if lora_id not in self._known:
            self._known[lora_id] = _digest_of(adapter)
        return self._known[lora_id]


def prompt_of(request: Any, lora_manager: Any, adapters: Adapters) -> Prompt | None:
    """A request's of SGLang (Req). None: not known, as its adapter is not."""
    tokens, name, weights = b"", "", b""
    if (lora_id := request.lora_id) is not None:
        if lora_manager is None or lora_id not in lora_manager.lora_refs:
            return None
        name = str(lora_manager.lora_refs[lora_id].lora_name)
        weights = adapters.digest_of(lora_id, lora_manager.loras[lora_id])
    if request.multimodal_inputs is None:  # else there are hashes of media among the tokens, which nobody promises
        digest = hashlib.sha256()
        for part in (request.origin_input_ids, request.output_ids):  # the latter: of one that was retracted
            digest.update(np.asarray(part, "<i8").tobytes())
        tokens = digest.digest()[:_DIGEST_BYTES]
    return Prompt(tokens, m.clipped(name), weights)


def _digest_of(adapter: Any) -> bytes:
    """adapter: SGLang's LoRAAdapter."""
    import torch

    tensors = sorted(_tensors_of(adapter), key=lambda named: named[0])
    digest = hashlib.sha256(repr((adapter.scaling, [(name, tuple(tensor.shape)) for name, tensor in tensors])).encode())
    for _, tensor in tensors[:: len(tensors) // _SAMPLES + 1]:
        values = tensor.detach().reshape(-1)[tensor.numel() // 2 :]
        some = values[: _SAMPLE_BYTES // values.element_size()].cpu().contiguous()
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.digest()[:_DIGEST_BYTES]


def _tensors_of(adapter: Any) -> Iterator[tuple[str, Any]]:
    for layer in adapter.layers:
        yield from layer.weights.items()
    yield from adapter.embedding_layers.items()
    yield from adapter.added_tokens_embeddings.items()
