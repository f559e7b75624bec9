"""checkpoint-engine's own weight update, for comparison: its parameter servers, on the CPU, over gloo.

Each of its ranks is a server, which owns an equal part of the weights, and a worker beside it, which is given all of
them: the real update_weights_from_ipc, which loads nothing.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from crossrail.cli.child import Child, Children, answer_calls

_TIMEOUT_S = 300.0
_TENSOR_BYTES = 4 << 20
_LOOK_S = 0.0005


class CheckpointEngineFleet:
    """Processes of their own. kind: "checkpoint-engine", or "crossrail" for its ParameterServer with our weights' way.
    keeps_group: the process group is made once, and not in each update as checkpoint-engine does by default.

    Threads: one at a time. Calls block.
    """

    def __init__(self, nbytes: int, ranks: int, kind: str = "checkpoint-engine", keeps_group: bool = False) -> None:
        count = max(nbytes // ranks // _TENSOR_BYTES, 1)  # tensors of each server
        self.nbytes = count * _TENSOR_BYTES * ranks  # that each worker is given
        self.part = self.nbytes / nbytes
        self._ranks = ranks
        self._open = {"kind": kind, "ranks": ranks, "count": count, "keeps_group": keeps_group}
        self._folder = tempfile.TemporaryDirectory(prefix="crossrail-checkpoint-engine-")
        self._updates = 0
        self._groups: list[Children] = []

    def start(self) -> None:
        """Returns when all have their weights."""
        for what in ("worker", str(self._open["kind"])):
            self._groups.append(Children([Child(__name__, f"{what} {rank}") for rank in range(self._ranks)]))
        common = self._open | {"port": _free_port()}
        self._groups[1].each("open", [common | {"rank": rank} for rank in range(self._ranks)], _TIMEOUT_S)

    def update(self) -> float:
        """Seconds from the first server's call of update() until all have returned."""
        workers, servers = self._groups
        servers.all("gather", _TIMEOUT_S)
        self._updates += 1
        meeting = Path(self._folder.name, str(self._updates))
        meeting.mkdir()
        for rank in range(self._ranks):
            workers[rank].start("receive", rank=rank, meeting=str(meeting))
        begun = time.perf_counter()
        servers.all("update", _TIMEOUT_S, meeting=str(meeting))
        took_s = time.perf_counter() - begun
        for rank in range(self._ranks):
            given = workers[rank].finish(_TIMEOUT_S)
            assert given == self.nbytes, f"worker {rank} was given {given} of {self.nbytes} bytes"
        return took_s

    def close(self) -> None:
        """Ends them. Idempotent."""
        for group in self._groups:
            group.close()
        self._folder.cleanup()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class _Process:
    def open(self, kind: str, rank: int, ranks: int, port: int, count: int, keeps_group: bool) -> None:
        import checkpoint_engine.ps
        import torch
        from loguru import logger

        from crossrail.integrations.checkpoint_engine import ParameterServer, use_cpu

        logger.remove()
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "PS_MAX_BUCKET_SIZE_GB": "0.0625"}
        use_cpu()
        self.rank = rank
        classes: dict[str, Any] = {
            "crossrail": ParameterServer,
            "checkpoint-engine": checkpoint_engine.ps.ParameterServer,
        }
        self.server = classes[kind](master_port=port, auto_pg=not keeps_group)
        if keeps_group and kind == "checkpoint-engine":
            self.server.init_process_group()
        tensors = {f"{rank}.{i}": torch.ones(_TENSOR_BYTES, dtype=torch.uint8) for i in range(count)}
        self.server.register_checkpoint("m", named_tensors=tensors)

    def gather(self) -> None:
        self.server.gather_metas("m")

    def update(self, meeting: str) -> None:
        def request(paths: list[tuple[str, str]]) -> None:
            part = Path(meeting, f"rank{self.rank}.part")
            part.write_text(paths[self.rank][1])
            part.rename(part.with_suffix(""))

        self.server.update("m", request)

    def receive(self, rank: int, meeting: str) -> int:
        """Bytes that this worker was given."""
        import checkpoint_engine.worker
        import zmq

        from crossrail.integrations.checkpoint_engine import use_cpu

        use_cpu()
        path = Path(meeting, f"rank{rank}")
        while not path.exists():
            time.sleep(_LOOK_S)
        given: list[int] = []
        with zmq.Context() as context:
            checkpoint_engine.worker.update_weights_from_ipc(
                context, path.read_text(), 0, run=lambda tensors: given.extend(tensor.nbytes for _, tensor in tensors)
            )
        return sum(given)


if __name__ == "__main__":
    process = _Process()
    answer_calls({name: getattr(process, name) for name in ("open", "gather", "update", "receive")})
