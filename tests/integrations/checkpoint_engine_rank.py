"""A rank of checkpoint-engine's parameter servers, or the worker of an inference engine, in a process of its own.

Servers are crossrail's or the real ones. Workers are the real update_weights_from_ipc.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import zmq
from loguru import logger
from safetensors.torch import save_file

from crossrail.cli.child import answer_calls
from crossrail.integrations.checkpoint_engine import P2PStore, ParameterServer, use_cpu
from tests.documentation.blocks import blocks

TORCH_TYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8)


def weights(seed: int, part: int) -> dict[str, torch.Tensor]:
    """What one owner has of a checkpoint: of several types and shapes, one longer than a bucket, one a scalar."""
    draw = torch.Generator().manual_seed(seed * 100 + part)
    made = {}
    for i in range(12):
        dtype = TORCH_TYPES[i % len(TORCH_TYPES)]
        shape = {0: (40_000 + part,), 1: ()}.get(i, (30 + i, 17 * (i + 1)))
        made[f"layers.{i}.part{part}"] = torch.randint(-100, 100, shape, generator=draw).to(dtype)
    return made


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Type, shape and every byte of each."""
    found = {}
    for name, tensor in tensors.items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(data).hexdigest()}"
    return found


class _Process:
    """Either a rank or a worker."""

    def open(
        self, rank: int, ranks: int, port: int, is_theirs: bool = False, opens: bool = True, **options: Any
    ) -> None:
        torch.set_num_threads(1)
        logger.remove()
        logger.add(sys.stderr, level="ERROR")
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
        os.environ["MASTER_PORT"] = str(port - 1)
        use_cpu()
        self.rank = rank
        if is_theirs:
            import checkpoint_engine.ps

            exec(documented(1))
            assert checkpoint_engine.ps.P2PStore is P2PStore
            self.server = checkpoint_engine.ps.ParameterServer(master_port=port, mem_fraction=0.01, **options)
        elif opens:
            self.server = ParameterServer(master_port=port, **options)

    def close(self) -> None:
        self.server.close()

    def as_documented(self, meeting: str, seed: int) -> None:
        namespace: dict[str, Any] = {}
        exec(documented(0), namespace)
        namespace["update_once"](
            "m", weights(seed, self.rank), lambda paths: put(Path(meeting) / f"rank{self.rank}", paths[self.rank][1])
        )

    def register(self, name: str, seed: int, parts: list[int], folder: str | None = None, **options: Any) -> None:
        """These parts of the checkpoint that the seed makes; the last of them from a file, if there is a folder."""
        tensors, files = {}, []
        for part in parts:
            if folder and part == parts[-1]:
                files.append(f"{folder}/part{part}.safetensors")
                save_file(weights(seed, part), files[-1])
            else:
                tensors |= weights(seed, part)
        self.server.register_checkpoint(name, files=files, named_tensors=tensors, **options)

    def unregister(self, name: str, force: bool = False) -> None:
        self.server.unregister_checkpoint(name, force)

    def gather(self, name: str, timeout_s: float = 60.0) -> list[int]:
        """The ranks that have something of it."""
        self.server.gather_metas(name, timeout=timedelta(seconds=timeout_s))
        return sorted(self.server.get_metas())

    def gather_theirs(self, name: str) -> None:
        """As the real one has it."""
        self.server.gather_metas(name)

    def metas(self) -> dict[int, Any]:
        return {rank: json.loads(each.model_dump_json()) for rank, each in self.server.get_metas().items()}

    def load(self, metas: dict[str, Any]) -> None:
        from checkpoint_engine import MemoryBufferMetaList

        self.server.load_metas({int(rank): MemoryBufferMetaList(**each) for rank, each in metas.items()})

    def update(
        self,
        name: str,
        meeting: str,
        ranks: list[int] | None = None,
        timeout_s: float = 60.0,
        request_fails: bool = False,
    ) -> None:
        """Workers find at which socket to come in the folder `meeting`."""
        asked = []

        def request(paths: list[tuple[str, str]]) -> None:
            asked.append(paths)
            if request_fails:
                raise ConnectionError("503 of the inference engine")
            put(Path(meeting) / f"rank{self.rank}", paths[self.rank][1])

        self.server.update(name, request, timeout=timedelta(seconds=timeout_s), ranks=ranks)
        assert len(asked) == (ranks is None or self.rank in ranks)

    def receive(self, rank: int, meeting: str, fails: str = "", timeout_s: float = 60.0) -> dict[str, str]:
        """As a worker: digests of the weights that it is given, once it has run the hook."""
        import checkpoint_engine.worker

        use_cpu()
        torch.set_num_threads(1)
        path = Path(meeting) / f"rank{rank}"
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            assert time.monotonic() < deadline, "no update has begun"
            time.sleep(0.01)
        loaded: dict[str, torch.Tensor] = {}
        hooked = []
        self._calls = 0

        def run(given: list[tuple[str, torch.Tensor]]) -> None:
            self._calls += 1
            assert not (twice := [name for name, _ in given if name in loaded]), twice
            if fails == "load" and self._calls == 2:
                raise ValueError("no room for this one")
            if fails == "die" and self._calls == 2:
                os._exit(7)
            while fails == "stand still" and self._calls == 2:
                time.sleep(60.0)
            if fails == "slow":
                path.with_name(f"loading{rank}").touch()
                time.sleep(0.3)
            loaded.update({name: tensor.clone() for name, tensor in given})

        with zmq.Context() as context:
            checkpoint_engine.worker.update_weights_from_ipc(
                context, path.read_text(), 0, run=run, post_hook=lambda: hooked.append(1)
            )
        assert hooked == [1]
        return digests(loaded)

    def calls(self) -> int:
        """How many buckets the last receive() was given."""
        return self._calls


def documented(number: int) -> str:
    return blocks()["docs/weights-checkpoint-engine.md"][number]


def put(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


if __name__ == "__main__":
    process = _Process()
    handlers: dict[str, Callable[..., Any]] = {
        name: getattr(process, name) for name in dir(process) if not name.startswith("_")
    }
    answer_calls(handlers)
