"""Instances of vLLM as child processes, and a tiny model for them."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_S = 900.0
ANSWER_S = 120.0
ENGINE = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "attention_backend": "CPU_MLA",  # of models with MLA: a CPU with AMX has another one, which cannot do float32
    "block_size": 32,
    "max_model_len": 512,
    "max_num_batched_tokens": 64,  # so that prompts are computed in chunks
    "num_gpu_blocks_override": 64,
    "enable_prefix_caching": True,
}
SECRET = "of the tests"


class Instance:
    """One of vLLM. role: kv_role, None: without a connector. Requests are named by the caller."""

    def __init__(
        self,
        folder: Path,
        name: str,
        model: Path,
        role: str | None,
        *,
        policy: str = "fail",
        secret: str = SECRET,
        options: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        **engine: Any,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.instance_file = folder / f"{name}.instance"
        arguments: dict[str, Any] = {"model": str(model), **ENGINE, **engine}
        if role is not None:
            arguments["kv_transfer_config"] = {
                "kv_connector": "CrossrailConnector",
                "kv_connector_module_path": "crossrail.integrations.vllm",
                "kv_role": role,
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": {"instance_file": str(self.instance_file), **(options or {})},
            }
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.instance", json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env={**os.environ, "CROSSRAIL_SECRET": secret, **(environment or {})},
            )
        self._ready = threading.Event()
        self._answers: dict[str, queue.Queue[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self) -> Instance:
        deadline = time.monotonic() + START_S
        while not self._ready.wait(0.2):
            alive = self._process.poll() is None
            if not alive or time.monotonic() > deadline:
                raise AssertionError(f"{self.name} did not start:\n{self.text()[-6000:]}")
        return self

    @property
    def line(self) -> str:
        """What others must know of it."""
        return self.instance_file.read_text().strip()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def add(self, request: str, tokens: list[int], count: int = 12, params: dict[str, Any] | None = None) -> None:
        self._send({"add": request, "prompt": tokens, "max_tokens": count, "params": params})

    def abort(self, request: str) -> None:
        self._send({"abort": request})

    def answer(self, request: str, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        try:
            return self._queue(request).get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"{self.name} has not answered {request}:\n{self.text()[-6000:]}") from None

    def ask(self, request: str, tokens: list[int], count: int = 12, params: dict[str, Any] | None = None) -> Any:
        self.add(request, tokens, count, params)
        return self.answer(request)

    def call(self, request: str, method: str, **arguments: Any) -> None:
        """A method of all its workers; returns when they have. RuntimeError with what one of them raised."""
        self._send({"call": request, "method": method, "arguments": arguments})
        self._check(request)

    def reset_prefix_cache(self, request: str, *, running: bool = False) -> None:
        """running: what runs is computed again."""
        self._send({"reset": request, "running": running})
        self._check(request)

    def _check(self, request: str) -> None:
        error = self.answer(request)["error"]
        if error:
            raise RuntimeError(error)

    def has_answered(self, request: str) -> bool:
        return not self._queue(request).empty()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)

    def close(self) -> None:
        if self._process.poll() is None:
            self._send({"quit": 1})
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                raise AssertionError(f"{self.name} did not end:\n{self.text()[-6000:]}") from None
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._reader.join(30)

    def _send(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()

    def _queue(self, request: str) -> queue.Queue[dict[str, Any]]:
        with self._lock:
            return self._answers.setdefault(request, queue.Queue())

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for text in self._process.stdout:
                line = json.loads(text)
                if "ready" in line:
                    self._ready.set()
                else:
                    self._queue(line["id"]).put(line)
        except ValueError:
            return  # closed


def install(site: Path, name: str, version: str, points: dict[str, dict[str, str]]) -> Path:
    entries = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in named.items()) for group, named in points.items()]
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("\n".join(entries))
    return site
