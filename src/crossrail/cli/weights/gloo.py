"""The ordinary weight update, for comparison: gather at trainer 0, broadcast from there, with torch over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from crossrail._parent import end_with_parent
from crossrail.errors import CrossrailError
from crossrail.weights.toy import ToyModel, extent, rows

_TIMEOUT_S = 300


class GlooFleet:
    """One process for each trainer and inference rank, which update on command.

    Threads: one at a time. Calls block.
    """

    part = 1.0  # of the model's bytes

    def __init__(self, model: ToyModel, trainers: int, targets: int) -> None:
        self._spec = {"model": asdict(model), "trainers": trainers, "targets": targets}
        self._folder = tempfile.TemporaryDirectory(prefix="crossrail-gloo-")
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Returns when all have met."""
        store = str(Path(self._folder.name) / "store")
        for rank in range(self._spec["trainers"] + self._spec["targets"]):  # type: ignore[operator]  # ints
            spec = json.dumps(self._spec | {"rank": rank, "store": store})
            command = [sys.executable, "-m", "crossrail.cli.weights.gloo", spec]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
            )
            self._processes.append(process)
        self._hear()

    def update(self) -> float:
        """Seconds until the last of them has all."""
        begun = time.perf_counter()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
        self._hear()
        return time.perf_counter() - begun

    def close(self) -> None:
        """Ends them. Idempotent."""
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._processes.clear()
        self._folder.cleanup()

    def _hear(self) -> None:
        for process in self._processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise CrossrailError(f"a process of the gloo comparison ended, with exit code {process.wait()}")


def _play(spec: dict[str, Any]) -> None:
    end_with_parent()
    import torch
    import torch.distributed as dist

    rank, trainers = spec["rank"], spec["trainers"]
    world = trainers + spec["targets"]
    meeting = f"file://{spec['store']}"
    patience = timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=patience)
    training = dist.new_group(list(range(trainers)))
    serving = dist.new_group([0, *range(trainers, world)])
    shapes = ToyModel(**spec["model"]).shapes()
    shards, wholes = {}, {}
    for name, shape in shapes.items():
        share = -(-shape[0] // trainers)  # gather wants shards of one length
        if rank < trainers:
            shards[name] = torch.zeros((share, *shape[1:]), dtype=torch.bfloat16)
            box = rows(shape, rank, trainers)
            assert extent(box)[0] <= share
        if rank == 0 or rank >= trainers:
            wholes[name] = torch.zeros((share * trainers, *shape[1:]), dtype=torch.bfloat16)
    dist.barrier()
    print(flush=True)
    while sys.stdin.buffer.readline():
        for name in shapes:
            if rank < trainers:
                pieces = list(wholes[name].chunk(trainers)) if rank == 0 else None
                dist.gather(shards[name], pieces, dst=0, group=training)
            if name in wholes:
                dist.broadcast(wholes[name], src=0, group=serving)
        print(flush=True)


if __name__ == "__main__":
    _play(json.loads(sys.argv[1]))
