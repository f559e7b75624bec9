"""The virtual environment in .venv."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from tools.dev.processes import PYTHON, ROOT, VENV, environment, must, run_bounded, say
from tools.dev.stamps import read_stamp, restamped

PIP_INSTALL = [PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--retries", "5"]
PIP_TIMEOUT_S = 900


def venv_python_version() -> str:
    """Version of the Python in .venv; empty if there is none or it no longer runs."""
    if not Path(PYTHON).exists():
        return ""
    command = [PYTHON, "-c", "import sys; print(sys.version)"]
    done = subprocess.run(command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def ensure_venv() -> str:
    """Makes .venv agree with pyproject.toml; returns its Python's version."""
    known = read_stamp(VENV)
    version = venv_python_version()
    project = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    wanted = {"root": str(ROOT), "python": version, "pyproject": project}
    if version and {**known, **wanted} == known:
        return version

    if not version or known.get("root") != wanted["root"] or known.get("python") != version:
        say("making the virtual environment .venv")
        if VENV.exists():
            shutil.rmtree(VENV)
        must([sys.executable, "-m", "venv", str(VENV)], timeout_s=300, quiet=True)
        version = venv_python_version()
    say("installing build tools and dependencies from PyPI into .venv")
    with restamped(VENV, {**wanted, "python": version}):
        pip_install("dev")
    return version


def has_module(name: str) -> bool:
    probe = f"import importlib.util as u, sys; sys.exit(u.find_spec({name!r}) is None)"
    return run_bounded([PYTHON, "-c", probe], timeout_s=60, quiet=True) == 0


def pip_install(extra: str) -> None:
    """Installs crossrail with an extra. Its Python files are used where they lie in src/, and the native module
    comes from build() below, not from pip: hence an editable install that looks pure."""
    env = environment(SKBUILD_WHEEL_CMAKE="false", SKBUILD_WHEEL_PY_API="py3", SKBUILD_EDITABLE_MODE="inplace")
    must([*PIP_INSTALL, "-e", f".[{extra}]"], timeout_s=PIP_TIMEOUT_S, env=env, quiet=True)
    # The path alone is enough. The import hook beside it would win over PYTHONPATH, which asan needs, and it
    # slows down every start of Python.
    for path_file in VENV.glob("lib/python*/site-packages/_editable_*crossrail.pth"):
        path_file.write_text(f"{ROOT / 'src'}\n")


def install_torch() -> None:
    if has_module("torch"):
        return
    say("installing torch into .venv")
    # Prefer wheels at hand (PIP_FIND_LINKS): PyPI's come with gigabytes of CUDA.
    with restamped(VENV, read_stamp(VENV)):
        local = [*PIP_INSTALL, "--no-index", "--no-deps", "-q", "torch"]
        subprocess.run(local, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=PIP_TIMEOUT_S)
        pip_install("torch")


def ensure_extra(extra: str) -> None:
    """Installs an extra that only some commands need, once for each .venv."""
    stamp = read_stamp(VENV)
    extras = stamp.get("extras")
    known = extras if isinstance(extras, list) else []
    if extra in known:
        return
    say(f"installing what [{extra}] of pyproject.toml names into .venv")
    with restamped(VENV, stamp | {"extras": [*known, extra]}):
        pip_install(extra)
