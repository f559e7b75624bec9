"""checkpoint-engine's update beside the same over crossrail, on a machine without a GPU: broadcasts over gloo there.

    ./dev run python benchmarks/checkpoint_engine.py [--ranks 2] [--mib 512] [--rounds 5]

Ranks and their workers (the real update_weights_from_ipc, which load nothing) are processes of this machine; each rank
owns an equal part of the weights. Both servers are open; their updates take turns. Prints each round's seconds, from
the first rank's call of update() until all have returned, and the ratio. checkpoint-engine makes its process group in
each update, as it does by default: --keep-group leaves that out.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from crossrail.cli.child import Child, Children, answer_calls

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.ports import free_port

DEADLINE_S = 300.0
_CHILD = "CROSSRAIL_BENCHMARK_CHILD"  # set for processes that this one starts
KINDS = ("checkpoint-engine", "crossrail")


class _Process:
    def open(self, kind: str, rank: int, ranks: int, port: int, mib: int, keeps_group: bool) -> None:
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
        tensors = {f"{rank}.{i}": torch.ones(4 << 20, dtype=torch.uint8) for i in range(mib // ranks // 4)}
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
            time.sleep(0.0005)
        given: list[int] = []
        with zmq.Context() as context:
            checkpoint_engine.worker.update_weights_from_ipc(
                context, path.read_text(), 0, run=lambda tensors: given.extend(tensor.nbytes for _, tensor in tensors)
            )
        return sum(given)


def measure(ranks: int, mib: int, rounds: int, keeps_group: bool) -> None:
    os.environ["CROSSRAIL_SECRET"] = secrets.token_hex()
    module = "benchmarks.checkpoint_engine"
    with tempfile.TemporaryDirectory() as folder:
        workers = Children([Child(module, f"worker {rank}") for rank in range(ranks)])
        servers = {kind: Children([Child(module, f"{kind} {rank}") for rank in range(ranks)]) for kind in KINDS}
        for kind, group in servers.items():
            common = {"kind": kind, "ranks": ranks, "port": free_port(), "mib": mib, "keeps_group": keeps_group}
            group.each("open", [common | {"rank": rank} for rank in range(ranks)], DEADLINE_S)
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(rounds + 1):
            for kind, group in servers.items():
                group.all("gather", DEADLINE_S)
                meeting = Path(folder, f"{kind}{number}")
                meeting.mkdir()
                for rank in range(ranks):
                    workers[rank].start("receive", rank=rank, meeting=str(meeting))
                begun = time.perf_counter()
                group.all("update", DEADLINE_S, meeting=str(meeting))
                took = time.perf_counter() - begun
                assert all(workers[rank].finish(DEADLINE_S) == mib << 20 for rank in range(ranks))
                if number:  # the first finds no connection, no page and no module
                    seconds[kind].append(took)
        for group in (workers, *servers.values()):
            group.close()
    for kind in KINDS:
        print(f"{kind:18} {statistics.median(seconds[kind]):6.3f} s   {' '.join(f'{s:.3f}' for s in seconds[kind])}")
    ratios = [theirs / ours for theirs, ours in zip(*seconds.values(), strict=True)]
    print(f"{'ratio':18} {statistics.median(ratios):6.2f}     {' '.join(f'{ratio:.2f}' for ratio in ratios)}")


if __name__ == "__main__":
    if _CHILD in os.environ:
        process = _Process()
        answer_calls({name: getattr(process, name) for name in ("open", "gather", "update", "receive")})
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep-group", action="store_true")
    arguments = parser.parse_args()
    os.environ[_CHILD] = "1"
    measure(arguments.ranks, arguments.mib, arguments.rounds, arguments.keep_group)
