"""How instances of an inference engine describe themselves to each other: a sealed line of text.

An instance describes itself once, as an opaque line, sealed with the secret: whoever carries it cannot make one. Ranks
speak for themselves: a decoder's rank asks each of the prefiller's under a name that says which of how many it is.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

import crossrail as xr
from crossrail._text import plain
from crossrail.errors import UsageError
from crossrail.kv.messages import AddressBytes, Name, Plain, Text
from crossrail.kv.transfer.layout import KvLayout, differences

VERSION = 1
LINE_MAX = 1 << 20
_MAC_BYTES = 32
_VLLM = b"crossrail vllm instance"
# max_model_len is of vLLM's own writing, in some models (MiniMax-M2), and does not change what they compute.
_NOT_THE_MODEL = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "max_model_len"}


class Worker(Struct, frozen=True):
    """One rank of an instance. form: what must agree beside the layout, by name, for people to read."""

    address: AddressBytes
    layout: Plain
    form: dict[Name, Text]


class Instance(Struct, frozen=True):
    """One incarnation of an instance: its workers by rank. All have the same layout and form."""

    name: Name
    workers: Annotated[list[Worker], Meta(min_length=1, max_length=1024)]
    version: int = VERSION

    @property
    def layout(self) -> KvLayout:
        return KvLayout.from_wire(self.workers[0].layout)

    @property
    def form(self) -> dict[str, str]:
        return self.workers[0].form

    @property
    def writer(self) -> str:
        """Names this incarnation and no other: addresses hold one drawn at random. It begins with rank 0's engine's
        name, for messages.
        """
        digest = hashlib.sha256(b"".join(worker.address for worker in self.workers)).hexdigest()
        return f"{engine_name(self.workers[0].address)} {digest}"

    def to_line(self, secret: bytes) -> str:
        return sealed_line(msgspec.msgpack.encode(self), secret, _VLLM)

    @classmethod
    def from_line(cls, line: str, secret: bytes) -> Instance:
        """Raises UsageError for anything that nobody with the secret has made, and for another version."""
        body = opened_line(line, secret, _VLLM)
        try:
            version = msgspec.msgpack.decode(body, type=_Versioned).version
            if version != VERSION:
                raise UsageError(f"the instance speaks version {version}, this one {VERSION}: update the older")
            instance = msgspec.msgpack.decode(body, type=cls)
        except msgspec.MsgspecError as error:
            raise UsageError(f"malformed description of an instance: {error}") from None
        layout = instance.layout
        if len(instance.workers) != layout.tp:
            raise UsageError(f"{len(instance.workers)} workers are described, the layout has TP {layout.tp}")
        if any(worker.layout != instance.workers[0].layout for worker in instance.workers):
            raise UsageError("the instance's workers have different layouts")
        return instance


class _Versioned(Struct):
    version: int = VERSION


def mismatch(producer: Worker, consumer: Worker) -> str:
    """What makes one side's KV useless to the other, with both sides in full. Empty: nothing."""
    theirs, ours = KvLayout.from_wire(producer.layout), KvLayout.from_wire(consumer.layout)
    differs = differences(theirs, ours, sides=("producer", "decoder"))
    for key in sorted(producer.form.keys() | consumer.form.keys()):
        there, here = producer.form.get(key, "(not said)"), consumer.form.get(key, "(not said)")
        if there != here:
            differs.append(f"{key}: producer {there}, decoder {here}")
    if not differs:
        return ""
    sides = (("producer", theirs, producer.form), ("decoder", ours, consumer.form))
    told = [
        f"{side} = [{layout.describe()}; {', '.join(f'{key} {value}' for key, value in sorted(form.items()))}]"
        for side, layout, form in sides
    ]
    return f"KV caches do not match; {'; '.join(differs)}. {', '.join(told)}"  # a line: errors have no others


def model_digest(config: Mapping[str, Any]) -> str:
    """Names a model's shape, not its weights: whoever gives both sides different weights gets what he asked for."""
    kept = {key: value for key, value in config.items() if key not in _NOT_THE_MODEL}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def cache_scheme(*configs: Mapping[str, Any]) -> str:
    """Names what the quantization in configs of a model and its parts says of the KV cache. Empty: nothing."""
    scheme = ""
    for config in configs:
        said = config.get("quantization_config") or config.get("compression_config") or {}
        if of_cache := _cache_entries(said):
            scheme = model_digest(of_cache)
    return scheme


def _cache_entries(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """Also in parts of it."""
    found: dict[str, Any] = {}
    for name, value in quantization.items():
        if "kv_cache" in name and value:
            found[name] = value
        elif isinstance(value, Mapping):
            found |= _cache_entries(value)
    return found


def fingerprint(worker: Worker) -> str:
    """Equal for workers whose KV can be exchanged without conversion: for logs, 16 hexadecimal digits."""
    said = msgspec.json.encode([sorted(worker.layout.items()), sorted(worker.form.items())])
    return hashlib.sha256(said).hexdigest()[:16]


def engine_name(address: bytes) -> str:
    """What the engine at this address calls itself, for people."""
    try:
        return plain(xr.Address.from_bytes(address).name)
    except UsageError:
        return "an engine of malformed address"


def rank_name(transfer_id: str, rank: int, tp: int) -> str:
    """The name of a decoder rank's part of a transfer, which tells the producer how many parts there are."""
    return f"{transfer_id}@{rank}/{tp}"


def parse_rank_name(name: str) -> tuple[str, int, int]:
    """transfer_id, rank, tp. UsageError for anything else."""
    transfer_id, at, part = name.rpartition("@")
    rank, slash, tp = part.partition("/")
    digits = rank.isdecimal() and tp.isdecimal() and len(rank) <= 4 and len(tp) <= 4
    if not (at and slash and digits and transfer_id) or not 0 <= int(rank) < int(tp) <= 1024:
        raise UsageError(f"{name!r:.140} does not name a rank's part of a transfer")
    return transfer_id, int(rank), int(tp)


def sealed_line(body: bytes, secret: bytes, purpose: bytes) -> str:
    """A body as a line that nobody without the secret can make. purpose: what for; lines of another are refused."""
    return base64.urlsafe_b64encode(body + _mac(secret, purpose, body)).decode()


def opened_line(line: str, secret: bytes, purpose: bytes) -> bytes:
    """The inverse. Raises UsageError for anything that nobody with the secret has made."""
    try:
        data = base64.b64decode(line.encode("ascii"), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise UsageError(f"not the description of an instance: {error}") from None
    body, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(secret, purpose, body)):
        raise UsageError("the description of the instance is not sealed with our secret")
    return body


def _mac(secret: bytes, purpose: bytes, body: bytes) -> bytes:
    return hmac.digest(hmac.digest(secret, purpose, "sha256"), body, "sha256")
