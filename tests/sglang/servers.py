"""True servers of SGLang on CPU."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.sglang.side import SECRET
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
START_S = 900.0  # three at once, on a small machine
ANSWER_S = 120.0
NEW_TOKENS = 12
OTHER_HALF_S = 15.0  # long enough to abort a request whose other half does not come
ARGUMENTS = [
    *("--device", "cpu", "--skip-tokenizer-init", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--disable-overlap-schedule", "--disable-radix-cache", "--sleep-on-idle"),
    *("--skip-server-warmup", "--max-total-tokens", "2048", "--mem-fraction-static", "0.5"),
    *("--chunked-prefill-size", "64", "--page-size", "4"),
]
DISAGGREGATED = [
    *("--disaggregation-transfer-backend", "crossrail"),
    *("--disaggregation-decode-retraction-backup", "cpu_tensor"),  # the default wants CUDA
]


KEY = "of the tests' clients"
TLS_FILE = Path(__file__).with_name("tls.pem")  # a key and its certificate, which nobody trusts and nobody checks


class Server:
    """mode: of disaggregation; None: whole. It starts at once, and is not waited for. kill() ends all of it.

    is_guarded: it has TLS, and wants KEY. more: flags.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        name: str,
        mode: str | None,
        bootstrap_port: int = 0,
        secret: str = SECRET,
        tp: int = 1,
        is_guarded: bool = False,
        more: tuple[str, ...] = (),
    ) -> None:
        self.name, self.port, self._is_guarded = name, free_port(), is_guarded
        self._log = folder / f"{name}.log"
        arguments = ["--model-path", str(model), "--port", str(self.port), *ARGUMENTS, "--tp-size", str(tp)]
        if mode is not None:
            arguments += ["--disaggregation-mode", mode, *DISAGGREGATED]
            arguments += ["--disaggregation-bootstrap-port", str(bootstrap_port)]
        if is_guarded:
            arguments += ["--api-key", KEY, "--ssl-certfile", str(TLS_FILE), "--ssl-keyfile", str(TLS_FILE)]
        arguments += more
        paths = [str(ROOT / "src"), str(folder), str(Path(__file__).with_name("cpu"))]
        _write_entry_point(folder)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(paths),
                    "CROSSRAIL_SECRET": secret,
                    "CROSSRAIL_SGLANG_OPTIONS": json.dumps({"other_half_s": OTHER_HALF_S}),
                    "OMP_NUM_THREADS": "1",
                    "SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * tp),  # without it, a rank for each NUMA node
                    "HF_HUB_OFFLINE": "1",
                },
            )

    def wait_ready(self) -> Server:
        deadline = time.monotonic() + START_S
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{self.name} did not start:\n{self.text()[-6000:]}")
            time.sleep(0.5)
        return self

    def _is_healthy(self) -> bool:
        try:
            with self._open("model_info", None, 5.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def ask(self, tokens: list[int], **more: Any) -> Any:
        """Its tokens; or the text of its error."""
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        status, answer = self.post("generate", {"input_ids": tokens, "sampling_params": sampling, **more})
        return json.loads(answer)["output_ids"] if status == 200 else answer

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        try:
            with self._open(path, json.dumps(body).encode(), ANSWER_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def _open(self, path: str, body: bytes | None, timeout_s: float) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        scheme = "https" if self._is_guarded else "http"
        request = urllib.request.Request(f"{scheme}://127.0.0.1:{self.port}/{path}", body, headers)
        unchecked = ssl._create_unverified_context() if self._is_guarded else None
        return urllib.request.urlopen(request, timeout=timeout_s, context=unchecked)

    def kill(self) -> None:
        """All its processes, which share its session and no other's."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
            self._process.wait(30.0)


class Asked(threading.Thread):
    """A request under way. answer: after result()."""

    def __init__(self, server: Server, tokens: list[int], **more: Any) -> None:
        super().__init__(daemon=True)
        self._server, self._tokens, self._more = server, tokens, more
        self._answer: Any = None
        self.start()

    def run(self) -> None:
        try:
            self._answer = self._server.ask(self._tokens, **self._more)
        except Exception as error:  # of a server that is killed
            self._answer = repr(error)

    def result(self) -> Any:
        self.join(ANSWER_S + 10.0)
        assert not self.is_alive(), f"{self._server.name} does not answer"
        return self._answer


def _write_entry_point(folder: Path) -> None:
    """What pip writes when crossrail is installed: by it SGLang finds the plug-in."""
    metadata = folder / "crossrail-0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: crossrail\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\ncrossrail = crossrail.integrations.sglang.plugin:register\n"
    )
