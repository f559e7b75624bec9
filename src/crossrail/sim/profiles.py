"""Profiles of simulated NICs: figures fitted to what was published or measured of real ones.

CX7, EFA_200G and EFA_100G reproduce Table 2 of "RDMA Point-to-Point Communication for LLM Systems" (arXiv 2510.27656)
within 10 % at each of its sizes; tests/sim/test_profiles.py says how far off each is. from_bench() makes a profile of
what `crossrail bench --json` measured on a machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crossrail.errors import UsageError

_KIB = 1 << 10
_MIB = 1 << 20
_RAILS_MAX = 16
_RAILS = re.compile(r"(?:(?P<count>\d+)\s*x\s*)?(?P<name>[a-z][a-z0-9-]*)")


@dataclass(frozen=True)
class NicProfile:
    """One rail. A work occupies both ends of the wire while its bytes pass.

    gbps: rate of the wire, 10**9 bits per second. ops_per_s: most works that it starts per second, 0: no limit.
    overhead_ns: time a work occupies the wire besides its bytes. latency_us: from the post to the bytes at the peer, on
    an idle wire. completion_us: from there until the sender knows. jitter_us: upper bound of extra latency, drawn for
    each work. ordered: works of one path land in the order of posting (RC), else in any order (SRD). names_imm_paths:
    the receiver of an immediate knows by which path it came, so that works in doubt can be told apart after a failure.
    works_max: works in flight on one path. work_bytes_max: longest work that it takes.
    """

    name: str
    gbps: float
    ops_per_s: float = 0.0
    overhead_ns: float = 0.0
    latency_us: float = 1.0
    completion_us: float = 1.0
    jitter_us: float = 0.0
    ordered: bool = False
    names_imm_paths: bool = True
    works_max: int = 1024
    work_bytes_max: int = 1 << 30

    def __post_init__(self) -> None:
        _check(0 < self.gbps <= 1e6, "gbps", self.gbps, "above 0, at most 1,000,000")
        _check(0 <= self.ops_per_s <= 1e9, "ops_per_s", self.ops_per_s, "0 (no limit) to 1e9")
        _check(0 <= self.overhead_ns <= 1e9, "overhead_ns", self.overhead_ns, "0 to 1e9")
        for name in ("latency_us", "completion_us", "jitter_us"):
            _check(0 <= getattr(self, name) <= 1e9, name, getattr(self, name), "0 to 1e9")
        _check(1 <= self.works_max <= 1 << 20, "works_max", self.works_max, "1 to 1,048,576")
        _check(4096 <= self.work_bytes_max <= 1 << 40, "work_bytes_max", self.work_bytes_max, "4 KiB to 1 TiB")

    def as_tuple(self) -> tuple[str, int, int, int, int, int, int, bool, bool, int, int]:
        """For the native module, in the order of its NicModel: bytes and works a second, nanoseconds, whole numbers."""
        return (
            self.name,
            max(1, round(self.gbps * 1e9 / 8)),
            max(1, round(self.ops_per_s)) if self.ops_per_s > 0 else 0,
            round(self.latency_us * 1e3),
            round(self.completion_us * 1e3),
            round(self.jitter_us * 1e3),
            round(self.overhead_ns),
            self.ordered,
            self.names_imm_paths,
            self.works_max,
            self.work_bytes_max,
        )


@dataclass(frozen=True)
class LocalProfile:
    """The way between engines of one host, as NVLink is. gbps: 10**9 bits per second in each direction."""

    name: str = "nvlink"
    gbps: float = 3600.0  # 18 links of 200 Gb/s and direction: NVLink of H100 and H200
    latency_us: float = 1.0

    def __post_init__(self) -> None:
        _check(0 < self.gbps <= 1e6, "gbps", self.gbps, "above 0, at most 1,000,000")
        _check(0 <= self.latency_us <= 1e9, "latency_us", self.latency_us, "0 to 1e9")

    def as_tuple(self) -> tuple[int, int]:
        """For the native module: bytes a second, nanoseconds."""
        return max(1, round(self.gbps * 1e9 / 8)), round(self.latency_us * 1e3)


def _check(holds: bool, name: str, given: object, bound: str) -> None:
    if not holds:
        raise UsageError(f"{name} is {given}, must be {bound}")


# --- NICs of the paper ---

# The fit, in the order in which the table decides it: ops_per_s is the rate at the smallest pages, gbps the slope
# between the long single writes, overhead_ns what 8 and 16 KiB pages lack of it, and latency + completion the time that
# short single writes take beside the wire's. How these divide between the two directions the table does not tell: the
# halves are ours. Jitter: none in its medians; a tenth of the latency, so that arrivals do get out of order.
CX7 = NicProfile(
    "cx7",
    gbps=386.0,
    ops_per_s=11.1e6,
    overhead_ns=30.0,
    latency_us=5.35,
    completion_us=5.35,
    jitter_us=0.5,
    ordered=True,
)
EFA_200G = NicProfile(
    "efa200",
    gbps=182.0,
    ops_per_s=1.05e6,
    overhead_ns=20.0,
    latency_us=14.8,
    completion_us=14.8,
    jitter_us=1.5,
    names_imm_paths=False,
)
# 97.4 Gb/s is the single NIC of le.qun.ch's series on p5 (3108 Gb/s of 32). The rest is that of EFA_200G: nobody
# published it for this generation.
EFA_100G = replace(EFA_200G, name="efa100", gbps=97.4)
# A wire of round numbers for tests that only want a network: no jitter, nothing to fit.
PLAIN = NicProfile("plain", gbps=100.0, ops_per_s=10e6, latency_us=2.0, completion_us=2.0)

PROFILES: Mapping[str, NicProfile] = {nic.name: nic for nic in (CX7, EFA_200G, EFA_100G, PLAIN)}
DEFAULT = "cx7"

Rails = str | NicProfile | Sequence[str | NicProfile]


def rails_of(nic: Rails) -> list[NicProfile]:
    """The rails that `nic=` means: a profile, its name, "2xefa200" for two of them, or a list of any of these.

    1..16 rails. Raises UsageError for a name that nobody knows.
    """
    parts = [nic] if isinstance(nic, (str, NicProfile)) else list(nic)
    rails = [rail for part in parts for rail in ([part] if isinstance(part, NicProfile) else _named(part))]
    if not 1 <= len(rails) <= _RAILS_MAX:
        raise UsageError(f"nic names {len(rails)} rails, must be 1 to {_RAILS_MAX}")
    return rails


def _named(text: str) -> list[NicProfile]:
    match = _RAILS.fullmatch(text.strip().lower())
    if match is None or match["name"] not in PROFILES:
        raise UsageError(f"nic {text!r} is not known; there are {', '.join(PROFILES)}, and 2xefa200 for two of them")
    return [PROFILES[match["name"]]] * int(match["count"] or 1)


# --- a machine's own ---


def from_bench(file: str | Path, name: str = "bench") -> NicProfile:
    """A rail as fast as what `crossrail bench --transport tcp|verbs|ofi --json FILE` measured. Blocks to read it.

    Rate: the best of the long writes with 16 under way. Overhead: what shuffled pages of 1 KiB take beyond their bytes.
    Latency: the ping-pong one way, less that. Completion: what short writes with one under way take beyond all this.
    Raises UsageError for a file without these, OSError.
    """
    values = _bench_values(Path(file))
    byte_s = 1 / (1e9 * max(_figure(values, file, "write-32m-w16"), _figure(values, file, "write-1m-w16")))
    page_s = 1e-6 / _figure(values, file, "paged-1k")
    overhead_s = max(0.0, page_s - _KIB * byte_s)
    latency_s = max(0.0, 1e-6 * _figure(values, file, "ping-pong") - overhead_s)
    short = next((size for size in (64, 256) if f"write-{size}k-w1" in values), 256) * _KIB
    short_s = short / (1e9 * _figure(values, file, f"write-{short // _KIB}k-w1"))
    return NicProfile(
        name,
        gbps=8e-9 / byte_s,
        overhead_ns=1e9 * overhead_s,
        latency_us=1e6 * latency_s,
        completion_us=1e6 * max(0.0, short_s - short * byte_s - overhead_s - latency_s),
        ordered=True,
    )


def _bench_values(file: Path) -> dict[str, float]:
    try:
        content: Any = json.loads(file.read_text())
        results = content["results"]
        return {result["name"]: float(result["value"]) for result in results if result["value"] is not None}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file} was not written by `crossrail bench --json`: {error!r}") from None


def _figure(values: Mapping[str, float], file: str | Path, measure: str) -> float:
    value = values.get(measure, 0.0)
    if value <= 0:
        raise UsageError(f"{file} has no {measure}: write it by `crossrail bench --transport tcp --json {file}`")
    return value
