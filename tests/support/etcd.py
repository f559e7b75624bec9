"""A real single-member etcd, in a process of its own, with its data in a folder that outlives it."""

import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.support.limits import WAIT_S
from tests.support.ports import free_port

ETCD = shutil.which("etcd")


class EtcdServer:
    """start(), stop() and start() again: the same endpoint and, unless they were erased, the same data."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._client, self._peer = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._client}"

    def start(self) -> None:
        assert ETCD is not None
        client, peer = f"http://{self.endpoint}", f"http://127.0.0.1:{self._peer}"
        self._folder.mkdir(exist_ok=True)
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    ETCD, "--data-dir", str(self._folder / "data"), "--log-level", "warn",
                    "--listen-client-urls", client, "--advertise-client-urls", client,
                    "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                    "--initial-cluster", f"default={peer}",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        deadline = time.monotonic() + WAIT_S
        while not self._is_healthy():
            assert self._process.poll() is None and time.monotonic() < deadline, (self._folder / "log").read_text()
            time.sleep(0.02)

    def stop(self) -> None:
        """Stops it like a crash. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(WAIT_S)
            self._process = None

    def erase(self) -> None:
        """Everything that it knew, while it is stopped."""
        shutil.rmtree(self._folder / "data")

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.endpoint}/health", timeout=WAIT_S) as response:
                return b'"true"' in response.read()
        except (urllib.error.URLError, ConnectionError):
            return False
