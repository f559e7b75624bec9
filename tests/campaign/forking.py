"""Programs that fork, in a process without other threads, as ./dev campaign and ./dev soak start them."""

import os
import subprocess
import sys
from pathlib import Path


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=540)
