"""The Pythons that wheels are built for, and tried in."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from process import Failure


def interpreter(name: str) -> Path:
    """The program itself, asked: what is found first by a name may be a shim of pyenv, which starts only what was
    chosen for this folder. Then the Pythons that pyenv has are looked at, too."""
    complaints = []
    for found in candidates(name):
        ask = subprocess.run(
            [found, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True, timeout=60
        )
        if ask.returncode == 0:
            return Path(ask.stdout.strip())
        complaints.append(f"{found} does not start: {ask.stderr.strip()}")
    raise Failure("\n  ".join(complaints) or f"no {name} on PATH: its wheel cannot be built here")


def candidates(name: str) -> list[Path]:
    """Programs of that name or path; of several that pyenv has the newest first."""
    if os.sep in name:
        found = [Path(name).expanduser()]
    else:
        found = [Path(folder, name) for folder in os.get_exec_path()] + in_pyenv(name)
    return [path for path in found if shutil.which(path)]


def in_pyenv(name: str) -> list[Path]:
    top = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    return sorted(top.glob(f"versions/*/bin/{name}"), key=lambda path: version(path.parts[-3]), reverse=True)


def version(folder: str) -> list[int]:
    """3.12.10 as [3, 12, 10]."""
    return [int(number) for number in re.findall(r"\d+", folder)]
