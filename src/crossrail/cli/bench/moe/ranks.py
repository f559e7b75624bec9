"""The command's view of all ranks of a measurement: processes that begin each step together."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from crossrail.cli.bench.moe.gate import GATE_BYTES
from crossrail.cli.bench.moe.work import MoeShape
from crossrail.cli.child import Child, Children

_MODULE = "crossrail.cli.bench.moe.rank"
_TIMEOUT_S = 300.0

Durations = dict[str, list[float]]  # by step, of each round, in us


class Ranks:
    """A context manager; leaving it ends all processes. Threads: one.

    A rank's process stays on one core; with more ranks than cores they take turns, while copying as while dispatching.
    """

    def __init__(self, shape: MoeShape, count: int, transport: str) -> None:
        self.shape = shape
        self._folder = tempfile.TemporaryDirectory(prefix="crossrail-moe-")
        self._gate_fd = os.memfd_create("crossrail-gate")
        os.ftruncate(self._gate_fd, GATE_BYTES)
        cpus = sorted(os.sched_getaffinity(0))
        self._share_cores = count > len(cpus)
        self._children = Children(
            [
                Child(_MODULE, f"rank {rank}", cpu=cpus[rank % len(cpus)], pass_fds=(self._gate_fd,))
                for rank in range(count)
            ]
        )
        self._transport = transport

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._children.close()
        os.close(self._gate_fd)
        self._folder.cleanup()

    def start(self) -> None:
        """Connects the ranks, and checks in an untimed round that every byte arrives."""
        names = [{"name": f"moe-{rank}", "transport": self._transport} for rank in range(len(self._children))]
        addresses = self._children.each("open", names, _TIMEOUT_S)
        common = {
            "addresses": addresses,
            "shape": self.shape.to_json(),
            "gate_fd": self._gate_fd,
            "shares_core": self._share_cores,
        }
        self._children.each("join", [common | {"rank": rank} for rank in range(len(self._children))], _TIMEOUT_S)
        self._children.all("verify", _TIMEOUT_S)

    def run(self, rounds: int) -> Durations:
        """Times of dispatch, combine, copy-dispatch and copy-combine."""
        return durations_us(self._children.all("run", _TIMEOUT_S, rounds=rounds))

    def start_ordinary(self) -> None:
        """torch.distributed in the same processes."""
        self._children.all("open_ordinary", _TIMEOUT_S, meeting=str(Path(self._folder.name) / "meeting"))

    def run_ordinary(self, rounds: int) -> Durations:
        """Times of dispatch, combine, exchange-dispatch and exchange-combine."""
        return durations_us(self._children.all("run_ordinary", _TIMEOUT_S, rounds=rounds))


def durations_us(of_ranks: Sequence[Mapping[str, Sequence[tuple[int, int]]]]) -> Durations:
    """Times from when the last rank came until the last was done."""
    return {step: _durations_us([times[step] for times in of_ranks]) for step in of_ranks[0]}


def _durations_us(of_ranks: Sequence[Sequence[tuple[int, int]]]) -> list[float]:
    rounds = zip(*of_ranks, strict=True)
    return [(max(done for _, done in each) - max(came for came, _ in each)) / 1e3 for each in rounds]
