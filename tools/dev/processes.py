"""Commands that ./dev starts, and what they find around them."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TextIO

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
BUILD = ROOT / "build"
PYTHON = str(VENV / "bin" / "python")
# Settings of the caller's Python and build that would reach into ours.
FOREIGN_VARIABLES = [
    "CMAKE_ARGS",
    "CMAKE_GENERATOR",
    "PIP_PREFIX",
    "PIP_TARGET",
    "PIP_USER",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONHOME",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "VIRTUAL_ENV",
]


class Failure(Exception):
    """Ends the run with a message instead of a traceback."""


def tool(name: str) -> str:
    return str(VENV / "bin" / name)


def say(text: str) -> None:
    print(f"dev: {text}", file=sys.stderr, flush=True)


def environment(**more: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in FOREIGN_VARIABLES and not k.startswith("SKBUILD_")}
    env["PATH"] = f"{VENV / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"
    env["VIRTUAL_ENV"] = str(VENV)
    env.update(more)
    return env


def run_bounded(
    command: Sequence[str],
    *,
    timeout_s: float,
    env: dict[str, str] | None = None,
    quiet: bool = False,
    stdout: TextIO = sys.stderr,
) -> int:
    """Runs a command without stdin; after timeout_s or Ctrl-C it is killed with all its children. Its output goes
    to stdout, by default our stderr since nobody asked for it; quiet: only if it fails."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment() if env is None else env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if quiet else stdout,
        stderr=subprocess.STDOUT if quiet else None,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise Failure(f"no end after {timeout_s:.0f} s: {shown(command)}") from None
        raise
    if quiet and process.returncode != 0:
        sys.stderr.write(output.decode(errors="replace"))
    return process.returncode


def run_together(commands: Sequence[Sequence[str]], *, timeout_s: float, env: dict[str, str]) -> int:
    """Like run_bounded(), all of them at the same time; what each says comes at its end. Returns the first exit status
    that is not 0."""
    ends_s = time.monotonic() + timeout_s
    codes = []
    with contextlib.ExitStack() as stack:
        running = [(command, *stack.enter_context(_recorded(command, env))) for command in commands]
        for command, process, output in running:
            try:
                codes.append(process.wait(max(ends_s - time.monotonic(), 0.0)))
            except subprocess.TimeoutExpired:
                raise Failure(f"no end after {timeout_s:.0f} s: {shown(command)}") from None
            finally:
                output.seek(0)
                shutil.copyfileobj(output, sys.stdout.buffer)
                sys.stdout.flush()
    return next((code for code in codes if code != 0), 0)


@contextlib.contextmanager
def _recorded(command: Sequence[str], env: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """A process and what it says; at the end it is killed with all its children."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process, output
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def must(command: Sequence[str], *, timeout_s: float, env: dict[str, str] | None = None, quiet: bool = False) -> None:
    code = run_bounded(command, timeout_s=timeout_s, env=env, quiet=quiet)
    if code != 0:
        raise Failure(f"exit status {code}: {shown(command)}")


def shown(command: Sequence[str]) -> str:
    text = shlex.join(command)
    return text if len(text) <= 300 else text[:300] + " ..."


def replace_process(command: Sequence[str], **variables: str) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    env = environment(**variables)
    program = shutil.which(command[0], path=env["PATH"])
    if program is None:
        raise Failure(f"no such command: {command[0]}")
    os.execve(program, list(command), env)


def run_here(command: Sequence[str], **variables: str) -> int:
    """Runs a command the user looks at: same terminal, same Ctrl-C, no limit."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment(**variables))
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            pass  # it went to the command too, which decides
