"""What instances know of each other, and how it travels in a request's kv_transfer_params.

An instance describes itself once, as an opaque line of text, sealed with the secret: clients and proxies carry it, and
none of them can make one. The other parameters have the names that vLLM's routers know already.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from crossrail.errors import UsageError
from crossrail.kv.layout import KvLayout, differences
from crossrail.kv.messages import AddressBytes, Name, Plain, Text

VERSION = 1
LINE_MAX = 1 << 20
TRANSFER_ID_MAX = 96  # with rank and TP behind it, a Name of kv.messages
_MAC_BYTES = 32

TransferId = Annotated[str, Meta(min_length=1, max_length=TRANSFER_ID_MAX)]


class Worker(Struct, frozen=True):
    """One rank of an instance. form: what must agree beside the layout, by name, for people to read."""

    address: AddressBytes
    layout: Plain
    form: dict[Name, Text]


class Instance(Struct, frozen=True):
    """One incarnation of a vLLM instance: its workers by rank. All have the same layout and form."""

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
        """Names this incarnation and no other: addresses hold one drawn at random."""
        return hashlib.sha256(b"".join(worker.address for worker in self.workers)).hexdigest()

    def to_line(self, secret: bytes) -> str:
        body = msgspec.msgpack.encode(self)
        return base64.urlsafe_b64encode(body + _mac(secret, body)).decode()

    @classmethod
    def from_line(cls, line: str, secret: bytes) -> Instance:
        """Raises UsageError for anything that nobody with the secret has made, and for another version."""
        try:
            data = base64.b64decode(line.encode("ascii"), altchars=b"-_", validate=True)
        except (UnicodeEncodeError, binascii.Error) as error:
            raise UsageError(f"no description of an instance: {error}") from None
        body, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(secret, body)):
            raise UsageError("the description of the instance is not sealed with our secret")
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


class Parameters(Struct, frozen=True, kw_only=True):
    """kv_transfer_params of a request; keys that are not here are other connectors' business.

    do_remote_decode: prefill here, keep the KV for others. do_remote_prefill: the KV is with that instance.
    transfer_id: how the two sides name the request between them. A proxy that lets both begin at once draws it; else
    the producer's own id serves, and comes back from it with all the rest.
    remote_num_tokens: length of the prompt that was prefilled; None: not known yet, as long as ours.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    transfer_id: TransferId | None = None
    crossrail_instance: Annotated[str, Meta(max_length=LINE_MAX)] | None = None
    remote_num_tokens: Annotated[int, Meta(ge=1, le=1 << 40)] | None = None

    @classmethod
    def of(cls, given: dict[str, Any] | None) -> Parameters:
        """Raises UsageError for what is not of its type."""
        if not given:
            return cls()
        try:
            found = msgspec.convert({key: given[key] for key in cls.__struct_fields__ if key in given}, cls)
        except msgspec.ValidationError as error:
            raise UsageError(f"kv_transfer_params: {error}") from None
        if found.do_remote_decode and found.do_remote_prefill:
            raise UsageError("kv_transfer_params: do_remote_decode and do_remote_prefill exclude each other")
        if found.do_remote_prefill and (found.transfer_id is None or found.crossrail_instance is None):
            raise UsageError("kv_transfer_params: do_remote_prefill needs transfer_id and crossrail_instance")
        return found


def reply(transfer_id: str, line: str, engine_id: str, request_id: str, tokens: int, tp: int) -> dict[str, Any]:
    """kv_transfer_params that a producer answers with, and a decoder takes as they are."""
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "crossrail_instance": line,
        "remote_num_tokens": tokens,
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "tp_size": tp,
    }


def mismatch(producer: Worker, consumer: Worker) -> str:
    """What keeps the KV of one from being of use to the other, both sides in full. Empty: nothing."""
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
        f"  {side}: {layout.describe()}; {', '.join(f'{key} {value}' for key, value in sorted(form.items()))}"
        for side, layout, form in sides
    ]
    return "\n".join([f"KV caches do not match; {'; '.join(differs)}.", *told])


def fingerprint(worker: Worker) -> str:
    """Equal for workers whose KV can be exchanged without any conversion: for logs, 16 hexadecimal digits."""
    said = msgspec.json.encode([sorted(worker.layout.items()), sorted(worker.form.items())])
    return hashlib.sha256(said).hexdigest()[:16]


def transfer_id_of(request_id: str) -> str:
    """For a request that no proxy has named: its id at the producer, shortened if it must be."""
    if len(request_id) <= TRANSFER_ID_MAX:
        return request_id
    return hashlib.sha256(request_id.encode()).hexdigest()


def rank_name(transfer_id: str, rank: int, tp: int) -> str:
    """What a decoder's rank calls its part of a transfer, so that the producer knows how many there are."""
    return f"{transfer_id}@{rank}/{tp}"


def parse_rank_name(name: str) -> tuple[str, int, int]:
    """transfer_id, rank, tp. UsageError for anything else."""
    transfer_id, at, part = name.rpartition("@")
    rank, slash, tp = part.partition("/")
    digits = rank.isdecimal() and tp.isdecimal() and len(rank) <= 4 and len(tp) <= 4
    if not (at and slash and digits and transfer_id) or not 0 <= int(rank) < int(tp) <= 1024:
        raise UsageError(f"{name!r:.140} does not name a rank's part of a transfer")
    return transfer_id, int(rank), int(tp)


def _mac(secret: bytes, body: bytes) -> bytes:
    return hmac.digest(hmac.digest(secret, b"crossrail vllm instance", "sha256"), body, "sha256")
