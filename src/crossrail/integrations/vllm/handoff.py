"""How a request's KV is handed over in vLLM's terms: its kv_transfer_params.

A producer's instance travels in them as an opaque line (integrations.instance). The other parameters have the names
that vLLM's routers know already.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from crossrail.errors import UsageError
from crossrail.integrations.instance import LINE_MAX

TRANSFER_ID_MAX = 96  # with rank and TP behind it, a Name of kv.messages

TransferId = Annotated[str, Meta(min_length=1, max_length=TRANSFER_ID_MAX)]


class Parameters(Struct, frozen=True, kw_only=True):
    """kv_transfer_params of a request; keys that are not here are other connectors' business.

    do_remote_decode: prefill here, keep the KV for others. do_remote_prefill: the KV is with that instance.
    transfer_id: how the two sides name the request between them. A proxy that lets both begin at once draws it; else
    the producer's own id serves, and comes back from it with all the rest.
    remote_num_tokens: length of the prompt that was prefilled; None: not known yet, as long as ours.
    crossrail_choices: other data-parallel replicas of the producer may hold the same, for choices of the same request.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    transfer_id: TransferId | None = None
    crossrail_instance: Annotated[str, Meta(max_length=LINE_MAX)] | None = None
    remote_num_tokens: Annotated[int, Meta(ge=1, le=1 << 40)] | None = None
    crossrail_choices: bool = False

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
            raise UsageError(
                "kv_transfer_params: do_remote_prefill needs transfer_id and crossrail_instance, as a producer with "
                "CrossrailConnector answers; this router has not passed that on, or the producer has another connector"
            )
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


def transfer_id_of(request_id: str) -> str:
    """For a request that no proxy has named: its id at the producer, shortened if it must be."""
    if len(request_id) <= TRANSFER_ID_MAX:
        return request_id
    return hashlib.sha256(request_id.encode()).hexdigest()
