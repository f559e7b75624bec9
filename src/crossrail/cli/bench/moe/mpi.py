"""The same exchange by MPI's alltoallv: `mpiexec -n RANKS python -m crossrail.cli.bench.moe.mpi SHAPE ROUNDS`.

Rank 0 prints one line of JSON: for each step and round, when each rank arrived and when it had finished.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import Any

import numpy as np

from crossrail.cli.bench.moe.work import MoeShape, rows_between
from crossrail.cli.bench.peers.pair import mpiexec
from crossrail.errors import CrossrailError

_TIMEOUT_S = 300.0


def missing() -> str:
    """Why there is no MPI here; empty when there is."""
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return "" if mpiexec() else "mpiexec is not installed"


def run(shape: MoeShape, ranks: int, rounds: int) -> list[dict[str, Any]]:
    """The times of each rank (rank.Times). CrossrailError if MPI fails."""
    program = mpiexec()
    assert program is not None
    command = [program, "-n", str(ranks), sys.executable, "-m", __name__, json.dumps(shape.to_json()), str(rounds)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise CrossrailError(f"MPI's alltoallv did not end within {_TIMEOUT_S:g} s") from None
    if ended.returncode != 0:
        raise CrossrailError(f"MPI's alltoallv ended with exit code {ended.returncode}: {ended.stderr.strip()[-500:]}")
    times: list[dict[str, Any]] = json.loads(ended.stdout)
    return times


def _play(shape: MoeShape, rounds: int) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rows = rows_between(shape, world.size)
    sent, received = rows[world.rank], rows[:, world.rank]
    times: dict[str, list[tuple[int, int]]] = {}
    steps = (("dispatch", sent, received, shape.row_bytes), ("combine", received, sent, shape.back_bytes))
    buffers = {
        what: [np.ones(int(counts.sum()) * row_bytes, np.uint8) for counts in (out, back)]
        for what, out, back, row_bytes in steps
    }
    for _ in range(rounds):
        for what, out, back, row_bytes in steps:
            here, there = buffers[what]
            world.Barrier()
            came_ns = time.monotonic_ns()
            world.Alltoallv([here, out * row_bytes, MPI.BYTE], [there, back * row_bytes, MPI.BYTE])
            times.setdefault(what, []).append((came_ns, time.monotonic_ns()))
    everybodys = world.gather(times)
    if world.rank == 0:
        print(json.dumps(everybodys), flush=True)


if __name__ == "__main__":
    _play(MoeShape(**json.loads(sys.argv[1])), int(sys.argv[2]))
