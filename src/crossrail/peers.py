"""Other engines: where they are, how bytes reach them, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass

from crossrail._core import Address, PeerGroup
from crossrail._text import plain, rate_text

__all__ = ["Address", "EngineEvent", "Explanation", "Heartbeat", "PathExplanation", "PeerGroup"]


_WITHOUT_INTERFACES = ("shm", "null")  # transports


@dataclass(frozen=True)
class EngineEvent:
    """Something that happened outside of any transfer.

    Events of a peer come once this engine has connected to it, by a transfer or by connect(). An engine that is only
    written to hears nothing of its writers' ends.

    kind: one of these.
    "imm-overflow": arrivals of more distinct immediates than imm_counters_max were dropped: the job is broken.
    "peer-connected", "peer-lost", "peer-left" (it closed).
    "peer-slow": with heartbeats: no answer within an interval. "peer-frozen": it does not answer. "peer-thawed": it was
        slow or frozen, and answers again.
    "checksum-mismatch": a peer's write with verify=True is not in our memory as it was sent; it was not counted.
    "protocol-error": malformed bytes; the peer was disconnected, or, if the detail says so, they were ignored.
    "stalled" (from watchdog_s): what waits for this peer has not moved; without a peer: nobody drives the engine. The
        detail says where the flight recorder was written, or why it was not.
    "transport-absent": the device exists, but did not open: peers are reached by a slower transport.
    peer: its name, may be empty.
    """

    kind: str
    peer: str
    detail: str


@dataclass(frozen=True)
class PathExplanation:
    """The path of bytes between one pair of kinds of memory. bytes: moved this way so far, by writes and reads.

    gb_per_s: how fast, over tcp and RDMA waits for answers included, so that many short operations are slow; 0 until
    16 MiB were moved, as fewer tell how long it took to connect.
    """

    what: str
    path: str
    reason: str
    gb_per_s: float
    bytes: int


@dataclass(frozen=True)
class Heartbeat:
    """What heartbeats to a peer have shown: how many it answered, and round trips through both engines in seconds."""

    answered: int
    rtt_s: float
    rtt_smooth_s: float
    rtt_min_s: float
    rtt_max_s: float


@dataclass(frozen=True)
class Explanation:
    """What an engine knows about a peer, and which path bytes take to it. str() is for people.

    transport: the one chosen for this peer; reason: why. note: why it is lost or frozen; may be empty.
    rails: pairs, ours and theirs; endpoints: their addresses as "ip:port", empty where there are none.
    gb_per_s_expected: of all rails together, from the speed of their interfaces, each of which counts once (of the
        peer's interfaces only IP addresses are known); 0.0 if one of either side does not say its speed (str() then
        says "speed unknown"), and with shm, which has none.
    heartbeat: None if none has been answered.
    """

    peer: str
    transport: str
    reason: str
    state: str
    note: str
    rails: tuple[tuple[int, int], ...]
    endpoints: tuple[tuple[str, str], ...]
    gb_per_s_expected: float
    paths: tuple[PathExplanation, ...]
    heartbeat: Heartbeat | None = None

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        lines = [f"peer '{self.peer}' over {self.transport}: {self.state}{note}", f"  {self.transport}: {self.reason}"]
        if self.rails:
            places = [f" ({ours} -> {theirs})" for ours, theirs in self.endpoints] or [""] * len(self.rails)
            pairs = [f"{ours} -> {theirs}{place}" for (ours, theirs), place in zip(self.rails, places, strict=True)]
            lines.append(f"  rails (ours -> theirs): {', '.join(pairs)}{self._speed_text()}")
        if self.heartbeat:
            beat = self.heartbeat
            lines.append(
                f"  {beat.answered} heartbeats answered, the last after {beat.rtt_s * 1e6:.0f} us "
                f"({beat.rtt_min_s * 1e6:.0f} to {beat.rtt_max_s * 1e6:.0f}, mostly {beat.rtt_smooth_s * 1e6:.0f})"
            )
        for path in self.paths:
            speed = f", {rate_text(path.gb_per_s)} measured" if path.gb_per_s else ""
            lines.append(f"  {path.what}: {path.path}, {path.bytes} bytes so far{speed}; {path.reason}")
        return "\n".join(plain(line) for line in lines)

    def _speed_text(self) -> str:
        if self.gb_per_s_expected:
            return f"; {rate_text(self.gb_per_s_expected)} by their interfaces"
        return "" if self.transport in _WITHOUT_INTERFACES else "; speed unknown: not every interface says its own"
