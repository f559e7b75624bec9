"""Other engines: where they are, how bytes reach them, what became of them."""

from __future__ import annotations

from dataclasses import dataclass

from crossrail._core import Address, PeerGroup

__all__ = ["Address", "EngineEvent", "Explanation", "PathExplanation", "PeerGroup"]


@dataclass(frozen=True)
class EngineEvent:
    """Something that happened outside of any transfer.

    kind: "imm-overflow" (arrivals of more distinct immediates than imm_counters_max were dropped: the job is broken),
    "peer-connected", "peer-lost", "peer-left" (it closed), "peer-frozen", "peer-thawed", "protocol-error" (malformed
    bytes; the peer was cut off).
    peer: its name, may be empty.
    """

    kind: str
    peer: str
    detail: str


@dataclass(frozen=True)
class PathExplanation:
    """How bytes between one kind of memory pair go. gb_per_s: measured, 0 when not; bytes: moved this way so far."""

    what: str
    path: str
    reason: str
    gb_per_s: float
    bytes: int


@dataclass(frozen=True)
class Explanation:
    """What an engine knows of a peer, and which way bytes go to it. str() is for people."""

    peer: str
    transport: str
    state: str
    note: str
    rails: list[tuple[int, int]]
    paths: list[PathExplanation]

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        lines = [f"peer '{self.peer}' over {self.transport}: {self.state}{note}"]
        if self.rails:
            pairs = ", ".join(f"{ours} -> {theirs}" for ours, theirs in self.rails)
            lines.append(f"  rails (ours -> theirs): {pairs}")
        for path in self.paths:
            speed = f", {path.gb_per_s:.1f} GB/s measured" if path.gb_per_s else ""
            lines.append(f"  {path.what}: {path.path}, {path.bytes} bytes so far{speed}; {path.reason}")
        return "\n".join(lines)
