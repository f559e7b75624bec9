"""What a request's KV is computed from, as bytes that one side compares with the other's.

Of images, audio and video it has vLLM's hashes. They depend on what the instance calls the model, and on settings of
its hasher: where the two sides differ in that, such inputs are not compared. Nor are adapters' weights where one side
does not know them.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

_MARK = b"\0more"
_DIGEST_BYTES = 16
_UNKNOWN = bytes(_DIGEST_BYTES)
_TAIL_BYTES = len(_MARK) + 3 * _DIGEST_BYTES


def hasher_of(vllm_config: Any) -> bytes:
    """Equal where vLLM's hashes of equal images are; b"" where it does not hash them, or there are none."""
    model = vllm_config.model_config
    media = getattr(model, "multimodal_config", None)
    if media is None:
        return b""
    if not media.mm_processor_cache_gb and not vllm_config.cache_config.enable_prefix_caching:
        return b""  # it numbers them instead
    return _digest([str(model.model), str(getattr(media, "mm_hasher_algorithm", ""))])


def prompt_of(request: Any, hasher: bytes, weights: bytes = b"") -> bytes:
    """A request's prompt; b"" for one that is not tokens. hasher: of this instance, hasher_of(). weights: a digest of
    its LoRA adapter's, b"": not known.

    Tokens as int32, little-endian, behind them the name of the LoRA adapter, a digest of cache_salt (whoever has
    another one must not learn that the prompts are equal), and what is compared if both sides know it.
    """
    if not request.prompt_token_ids:
        return b""
    lora = getattr(request, "lora_request", None)
    adapter = b"" if lora is None else b"LoRA " + str(lora.lora_name).encode()
    salt = getattr(request, "cache_salt", None)
    apart = b"" if salt is None else b"salt " + _digest([str(salt)])
    tokens = np.asarray(request.prompt_token_ids, "<i4").tobytes()
    known = hasher or weights
    tail = _MARK + (hasher or _UNKNOWN) + _media(request) + (weights or _UNKNOWN) if known else b""
    return tokens + adapter + apart + tail


def _media(request: Any) -> bytes:
    told = []
    for feature in getattr(request, "mm_features", None) or ():
        place = feature.mm_position
        told += [str(feature.mm_hash or feature.identifier), str(place.offset), str(place.length)]
    return _digest(told)


def differ(theirs: bytes, ours: bytes) -> str:
    """In what the decoder's prompt is another than the one here, for people; "" if in nothing that can be compared."""
    if not theirs or not ours:
        return ""
    (there, *theirs_more), (here, *ours_more) = _split(theirs), _split(ours)
    if there != here:
        return "the decoder's prompt, its LoRA adapter or its cache_salt is another than the one prefilled here"
    (their_hasher, their_media, their_weights), (our_hasher, our_media, our_weights) = theirs_more, ours_more
    if their_hasher == our_hasher != _UNKNOWN and their_media != our_media:
        return "the decoder's prompt has other images, audio or video than the one prefilled here"
    if their_weights != our_weights and _UNKNOWN not in (their_weights, our_weights):
        return "the decoder's LoRA adapter has other weights than the one of that name here"
    return ""


def _split(prompt: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """What always is compared; hasher, media, and the adapter's weights."""
    tail = prompt[-_TAIL_BYTES:]
    if len(tail) < _TAIL_BYTES or not tail.startswith(_MARK):
        return prompt, _UNKNOWN, _UNKNOWN, _UNKNOWN
    first = len(_MARK)
    hasher, media, weights = (tail[at : at + _DIGEST_BYTES] for at in range(first, _TAIL_BYTES, _DIGEST_BYTES))
    return prompt[:-_TAIL_BYTES], hasher, media, weights


def _digest(parts: list[str]) -> bytes:
    told = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(told.encode("utf-8", "surrogatepass")).digest()[:_DIGEST_BYTES]
