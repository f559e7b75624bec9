"""Options of routers, prefillers and decoders."""

from __future__ import annotations

from dataclasses import dataclass, fields

from crossrail._options import check_counts, check_seconds, check_waits
from crossrail.kv.limits import SECONDS_MAX

_FROM_ZERO = ("page_wait_s", "queue_s", "restarts_max")


@dataclass(frozen=True)
class _Options:
    """Times in seconds (`..._s`) and counts; all are more than 0, except those of _FROM_ZERO."""

    def __post_init__(self) -> None:
        for field in fields(self):
            given = {field.name: getattr(self, field.name)}
            if not field.name.endswith("_s"):
                check_counts(0 if field.name in _FROM_ZERO else 1, **given)
            elif field.name in _FROM_ZERO:
                check_seconds(**given)
            else:
                check_waits(SECONDS_MAX, **given)


@dataclass(frozen=True)
class NodeOptions(_Options):
    """Options of prefillers and decoders.

    join_s: how long a router may take to answer. retry_s: pause before looking for a router again. lease_s: of the
        node's record in etcd, if it has one.
    chunk_tokens: tokens per prefill step. queue_max: requests that a prefiller accepts besides the one it works on.
    queue_tokens_max: once their prompts have so many tokens it accepts no further ones; this bounds its memory.
    requests_max: requests that a decoder serves concurrently. page_wait_s: how long a prefiller, or a decoder that had
        to give pages back, waits for some before it gives up a request.
    probe_s: how often a decoder asks its prefiller for progress. prefiller_timeout_s: a prefiller that does not answer
        for this long is given up. model_timeout_s: so is one whose model computes and has announced no layer for this
        long, and a decoder whose model has computed no token; neither takes anything new meanwhile.
    answer_timeout_s: how long an answer to other questions may take; a decoder that waits for longer to be named
        another prefiller gives the request's pages back until it is.
    UsageError for an invalid value.
    """

    join_s: float = 3.0
    retry_s: float = 0.5
    chunk_tokens: int = 2048
    queue_max: int = 256
    queue_tokens_max: int = 1 << 24
    requests_max: int = 256
    probe_s: float = 1.0
    prefiller_timeout_s: float = 4.0
    model_timeout_s: float = 120.0
    answer_timeout_s: float = 3.0
    page_wait_s: float = 30.0
    lease_s: float = 4.0


@dataclass(frozen=True)
class RouterOptions(_Options):
    """Options of a router.

    heartbeat_s: how often nodes report. lease_s: a node that has not reported for this long is gone.
    requests_max: requests in progress; further ones are Overloaded. tokens_max: the same for the sum of their prompts
        and max_tokens; a request is always taken when it is the only one. queue_s: how long a request waits for a node
        with room. request_timeout_s: how long one may take in total. answer_timeout_s: how long a node may take to
        answer.
    attempts_max: attempts at prefillers that may fail at one decoder. restarts_max: how many decoders may die during a
        request before it fails. sweep_s: how often members are checked.
    UsageError for an invalid value.
    """

    heartbeat_s: float = 1.0
    lease_s: float = 4.0
    requests_max: int = 1024
    tokens_max: int = 1 << 26
    queue_s: float = 10.0
    request_timeout_s: float = 600.0
    answer_timeout_s: float = 3.0
    attempts_max: int = 8
    restarts_max: int = 2
    sweep_s: float = 0.25
