"""Policies: which paths the owner of an engine allows bytes to take.

A policy is text, comma-separated clauses that must all hold: "tcp, rails>=4, speed>=400". It is parsed once, and
checked against what is there, never against what was asked for. Any thread may call any of this; parse, unmet, check
and speed_of are pure.

engine.py imports this when it is first needed, and this imports crossrail.topology when that is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from crossrail import _core
from crossrail.errors import TransportError, UsageError

if TYPE_CHECKING:
    from crossrail.engine import Engine
    from crossrail.peers import Explanation
    from crossrail.topology import Topology

VOCABULARY = (
    "shm, tcp, verbs, ofi, rdma (verbs or ofi), gpudirect, rails>=N (also rails=N, rails>N; N whole, 1 or more; "
    "several on one interface count once), speed>=X (Gb/s, more than 0)"
)

# The transports that satisfy each transport clause.
_TRANSPORTS = {
    "shm": frozenset({"shm"}),
    "tcp": frozenset({"tcp"}),
    "verbs": frozenset({"verbs"}),
    "ofi": frozenset({"ofi"}),
    "rdma": frozenset({"verbs", "ofi"}),
}
_RDMA = _TRANSPORTS["rdma"]

_COMPARED = re.compile(r"(rails|speed)\s*(>=|=|>)\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)")
_HOLDS: dict[str, Callable[[float, float], bool]] = {
    ">=": lambda found, bound: found >= bound,
    ">": lambda found, bound: found > bound,
    "=": lambda found, bound: found == bound,
}


@dataclass(frozen=True)
class Clause:
    """One condition. text: as written; name: a transport's, "rdma", "gpudirect", "rails" or "speed".

    relation, bound: of rails (a count) and speed (Gb/s), else "" and 0.
    """

    text: str
    name: str
    relation: str = ""
    bound: float = 0


@dataclass(frozen=True)
class Found:
    """What there is, of an engine or of the path to one peer.

    what: the thing, for people. transports: of an engine those it opened, of a path the one it takes; reason: why.
    rails: those that share no interface (netdev, port of a NIC) with another, where they have any: of an engine, on the
    transport with most; of a path, the fewer of both ends'. rails_reason: why so many.
    gbit_per_s: of the rails' interfaces, None when that is not known; speed_reason: of what it is the sum.
    lost: why the peer cannot be reached any more, else "".
    is_path: what to do next differs.
    no_gpudirect: why memory of GPUs cannot go that way; empty: it can.
    missing: why verbs and ofi have no rail on this machine, by name; not those that have.
    """

    what: str
    transports: tuple[str, ...]
    reason: str
    rails: int
    rails_reason: str
    gbit_per_s: float | None = None
    speed_reason: str = ""
    no_gpudirect: str = "its transports give no NIC a GPU's memory"
    is_path: bool = False
    lost: str = ""
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Unmet:
    """A clause that does not hold: what was found and why, in one phrase, and what to do next."""

    clause: Clause
    found: str
    remedy: str


# --- clauses ---


def parse(text: str) -> tuple[Clause, ...]:
    """The clauses of a policy, in order. Raises UsageError that names a malformed one and lists the vocabulary."""
    if not isinstance(text, str):
        raise UsageError(f"require must be text or None, not {type(text).__name__}; clauses: {VOCABULARY}")
    return tuple(_parse_one(part.strip(), text) for part in text.split(","))


def _parse_one(part: str, text: str) -> Clause:
    if part in _TRANSPORTS or part == "gpudirect":
        return Clause(part, part)
    match = _COMPARED.fullmatch(part)
    if match is not None:
        name, relation, number = match.groups()
        bound = float(number)
        if (name == "rails" and bound >= 1 and "." not in number) or (name == "speed" and relation == ">=" and bound):
            return Clause(part, name, relation, bound)
    raise UsageError(f"require={text!r}: clause {part!r} is none of: {VOCABULARY}")


def unmet(clauses: Iterable[Clause], found: Found) -> list[Unmet]:
    """The clauses that do not hold, in order. Pure."""
    failures = (_JUDGES.get(clause.name, _judge_transport)(clause, found) for clause in clauses)
    return [failure for failure in failures if failure is not None]


def check(clauses: Sequence[Clause], found: Found) -> None:
    """Raises TransportError that names every clause that does not hold, with what was found, why, and what to do.

    Not UsageError: the call is well-formed, and this machine or this peer is not what it takes.
    """
    if found.lost:
        names = ", ".join(clause.text for clause in clauses)
        raise TransportError("require", 0, f"{names}: {found.lost}", "get the peer's new address and connect() again")
    failures = unmet(clauses, found)
    if not failures:
        return
    text = "; ".join(f"{failure.clause.text}: {failure.found}" for failure in failures)
    remedies = dict.fromkeys(failure.remedy for failure in failures)
    raise TransportError("require", 0, text, "; ".join(remedies))


def _judge_transport(clause: Clause, found: Found) -> Unmet | None:
    accepted = _TRANSPORTS[clause.name]
    if not accepted.isdisjoint(found.transports):
        return None
    have = ", ".join(found.transports) or "none"
    phrase = f"{found.what} {'goes over' if found.is_path else 'has'} {have} ({found.reason})"
    if accepted <= found.missing.keys():
        whys = "; ".join(f"{name}: {found.missing[name]}" for name in sorted(accepted))
        return Unmet(clause, f"{phrase}; {whys}", "see crossrail doctor")
    if found.is_path:
        remedy = f"open both engines with transport='{_word(clause)}'; print(engine.explain(peer)) shows the path"
    else:
        remedy = f"open the engine with transport='{_word(clause)}' or 'auto'"
    return Unmet(clause, phrase, remedy)


def _word(clause: Clause) -> str:
    return "verbs' or 'ofi" if clause.name == "rdma" else clause.name


def _judge_gpudirect(clause: Clause, found: Found) -> Unmet | None:
    if not found.no_gpudirect:
        return None
    remedy = (
        "open engines with transport='verbs', or 'ofi' on EFA, where NICs and NVIDIA's driver are; see crossrail doctor"
    )
    return Unmet(clause, f"{found.what} has none: {found.no_gpudirect}", remedy)


def _judge_rails(clause: Clause, found: Found) -> Unmet | None:
    if _HOLDS[clause.relation](found.rails, clause.bound):
        return None
    wanted = int(clause.bound) + (clause.relation == ">")
    who = "both engines" if found.is_path else "the engine"
    return Unmet(
        clause,
        f"{found.what} has {found.rails} rail(s), {found.rails_reason}",
        f"open {who} with rails={wanted} where there are so many interfaces, or with a list of {wanted}; "
        "crossrail topo shows what there is",
    )


def _judge_speed(clause: Clause, found: Found) -> Unmet | None:
    if found.gbit_per_s is not None and _HOLDS[clause.relation](found.gbit_per_s, clause.bound):
        return None
    have = "an unknown speed" if found.gbit_per_s is None else f"{found.gbit_per_s:g} Gb/s"
    remedy = "bind rails to faster interfaces, rails=[...]; crossrail topo shows the speed of each"
    return Unmet(clause, f"{found.what} has {have} ({found.speed_reason})", remedy)


_JUDGES: dict[str, Callable[[Clause, Found], Unmet | None]] = {
    "gpudirect": _judge_gpudirect,
    "rails": _judge_rails,
    "speed": _judge_speed,
}


# --- what there is ---


def of_engine(engine: Engine, transport: str, clauses: Iterable[Clause]) -> Found:
    """What an open engine has. transport: as requested. Reads the topology only if a clause is about speed."""
    speed, speed_reason = None, ""
    if any(clause.name == "speed" for clause in clauses):
        speed, speed_reason = _engine_speed(engine)
    rails, rails_reason = _engine_rails(engine)
    return Found(
        what=f"engine '{engine.name}'",
        transports=engine.address.transports,
        reason=f"opened with transport='{transport}'",
        rails=rails,
        rails_reason=rails_reason,
        gbit_per_s=speed,
        speed_reason=speed_reason,
        no_gpudirect=_no_gpudirect(engine, engine.address.transports, clauses),
        missing=_missing(clauses),
    )


def of_path(engine: Engine, explanation: Explanation, clauses: Iterable[Clause]) -> Found:
    """What explain() says of the path to a peer.

    Several of our rails that share one of the peer's make the path no wider, so the smaller number of both ends counts.
    """
    rails, rails_reason = _path_rails(engine, explanation)
    speed, speed_reason = None, ""
    if any(clause.name == "speed" for clause in clauses):
        speed, speed_reason = _path_speed(explanation)
    return Found(
        what=f"the path from engine '{engine.name}' to peer '{explanation.peer}'",
        transports=(explanation.transport,),
        reason=explanation.reason,
        rails=rails,
        rails_reason=rails_reason,
        gbit_per_s=speed,
        speed_reason=speed_reason,
        no_gpudirect=_no_gpudirect(engine, (explanation.transport,), clauses),
        is_path=True,
        lost=_lost(explanation),
        missing=_missing(clauses),
    )


def _engine_rails(engine: Engine) -> tuple[int, str]:
    """The rails of the transport with most rails: all bytes to one peer use the same transport."""
    devices = max(engine._rail_devices.values(), key=lambda names: len(set(names)), default=())
    shared = _shared(devices)
    if not shared:
        return len(devices) or engine.rails, "as many as it was opened with"
    return len(set(devices)), f"as several on one interface count once: {shared}"


def _path_rails(engine: Engine, explanation: Explanation) -> tuple[int, str]:
    """The rails to a peer. Of the peer's interfaces only the addresses are known."""
    ours, theirs = (sorted({pair[side] for pair in explanation.rails}) for side in (0, 1))
    devices = dict(enumerate(engine._rail_devices.get(explanation.transport, ())))
    here = [devices.get(rail, rail) for rail in ours]
    ends = zip(explanation.rails, explanation.endpoints, strict=False)  # not every transport has endpoints
    ips = {rail: endpoint.rpartition(":")[0] for (_, rail), (_, endpoint) in ends}
    there = [ips.get(rail, rail) for rail in theirs]
    text = f"over {explanation.transport}, {len(ours)} of ours to {len(theirs)} of the peer's"
    shared = [words for words in (_shared(here), _shared(there)) if words]
    if shared:
        text += f", as several on one interface count once: {', '.join(shared)}"
    return min(len(set(here)), len(set(there))), text


def _shared(devices: Sequence[object]) -> str:
    """Names the interfaces that carry several rails, for people; empty if there are none."""
    counts = Counter(devices)
    return ", ".join(f"{count} on {device}" for device, count in counts.items() if count > 1)


def _no_gpudirect(engine: Engine, transports: Iterable[str], clauses: Iterable[Clause]) -> str:
    """Why GPUDirect is not available; asked only for a clause about it, because it means opening the driver."""
    if not any(clause.name == "gpudirect" for clause in clauses):
        return ""
    if not set(transports) & set(engine._gpu_transports):
        if engine._no_gpu_memory:
            return engine._no_gpu_memory
        verb = "gives" if len(tuple(transports)) == 1 else "give"
        return f"{' and '.join(transports)} {verb} no NIC a GPU's memory"
    if why := _core._no_gpu_driver():
        return why
    return "" if any(gpu["has_gpudirect"] for gpu in _core._gpus()) else "none of the GPUs lets NICs at its memory"


def _missing(clauses: Iterable[Clause]) -> dict[str, str]:
    """The missing transports; asked only for a clause about one, because a library may have to be opened for that."""
    wanted = {name for clause in clauses for name in _TRANSPORTS.get(clause.name, frozenset()) & _RDMA}
    reasons = {name: _core._rdma_missing(name) for name in wanted}
    return {name: reason for name, reason in reasons.items() if reason}


def _engine_speed(engine: Engine) -> tuple[float | None, str]:
    """The speed of the fastest network: all bytes to one peer use the same transport."""
    from crossrail.topology.addresses import read_this_machine

    found = [speed_of(engine.address.endpoints, read_this_machine())]
    for transport in sorted(_RDMA & set(engine.address.transports)):
        speeds = engine.address.rail_speeds(transport)
        found.append(
            (sum(speeds), f"by {len(speeds)} port(s) of {transport}")
            if all(speeds)
            else (None, f"a port of {transport} does not say its speed")
        )
    return max(found, key=lambda pair: pair[0] or 0.0)


def _lost(explanation: Explanation) -> str:
    note = f" ({explanation.note})" if explanation.note else ""
    return f"peer '{explanation.peer}' is lost{note}" if explanation.state == "lost" else ""


def _path_speed(explanation: Explanation) -> tuple[float | None, str]:
    if not explanation.endpoints and explanation.transport not in _RDMA:
        return None, f"over {explanation.transport}, whose rails have no interface"
    if not explanation.gb_per_s_expected:
        return None, "the interface of at least one rail, ours or the peer's, does not say its speed"
    pairs = round(explanation.gb_per_s_expected * 8, 6)
    if explanation.transport in _RDMA:
        return pairs, f"the slower end of each of {len(explanation.rails)} pairs of rails, by their ports"
    return pairs, f"the slower end of each of {len(explanation.endpoints)} pairs of rails, by their interfaces"


def speed_of(endpoints: Sequence[str], topology: Topology) -> tuple[float | None, str]:
    """The speed of all interfaces that have these endpoints, in Gb/s, and of what it is the sum.

    endpoints: "ip:port". An interface counts once, however many rails are on it, and not at all if it does not say its
    speed; None when no interface does. Pure.
    """
    if not endpoints:
        return None, "none of its rails is on an interface"
    by_ip = {ip: device for device in topology.net_devices for ip in device.ip_addresses}
    known: dict[str, float] = {}
    silent: dict[str, None] = {}
    for endpoint in endpoints:
        ip = endpoint.rpartition(":")[0].strip("[]")
        device = by_ip.get(ip)
        if device is not None and device.speed_gbps is not None and device.kind != "loopback":
            known[device.name] = device.speed_gbps
        else:
            silent[device.name if device is not None else ip] = None
    parts = [f"by {', '.join(known)}"] if known else []
    parts += [f"speed of {', '.join(silent)} not known"] if silent else []
    return sum(known.values()) if known else None, "; ".join(parts)
