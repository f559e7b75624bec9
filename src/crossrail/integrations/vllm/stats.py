"""A worker's counts per interval, as plain data that can be summed over workers and intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# name: (what it counts, for people)
COUNTERS = {
    "loaded": "Requests whose KV was fetched.",
    "failed": "Requests whose KV could not be fetched.",
    "cancelled": "Fetches that vLLM cancelled.",
    "loaded_bytes": "Bytes of KV fetched.",
    "sent": "Transfers written to a decoder's rank.",
    "send_failed": "Transfers to a decoder's rank that were withdrawn, or failed.",
    "leases_expired": "Prefilled prompts that no decoder came for.",
    "messages_dropped": "Control messages that were malformed, or not sealed with our secret.",
}
SERIES = {"load_seconds": "From a request's blocks being there until its KV was."}
BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)

Data = dict[str, Any]


def empty() -> Data:
    return {**dict.fromkeys(COUNTERS, 0), **{name: [] for name in SERIES}}


def added(one: Mapping[str, Any], other: Mapping[str, Any]) -> Data:
    return {name: one[name] + other[name] for name in (*COUNTERS, *SERIES)}


def is_empty(data: Mapping[str, Any]) -> bool:
    return not any(data.values())


def reduced(data: Mapping[str, Any]) -> dict[str, int | float]:
    """One number each, for a log line."""
    seconds = sorted(data["load_seconds"])
    shown: dict[str, int | float] = {name: data[name] for name in COUNTERS if data[name]}
    if seconds:
        shown["median load (ms)"] = round(seconds[len(seconds) // 2] * 1e3, 3)
        shown["longest load (ms)"] = round(seconds[-1] * 1e3, 3)
    return shown
