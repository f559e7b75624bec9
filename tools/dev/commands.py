"""The commands of ./dev by name."""

from __future__ import annotations

from tools.dev import checks, coverage, fuzzing, libfabrics, publishing, running, testing
from tools.dev.processes import Failure, say

COMMANDS = {
    "aarch64": testing.aarch64,
    "asan": testing.asan,
    "bench": running.bench,
    "campaign": running.campaign,
    "check": checks.check,
    "clean": running.clean,
    "coverage": coverage.coverage,
    "demo": running.demo,
    "docs": publishing.docs,
    "format": checks.format_,
    "fuzz": fuzzing.fuzz,
    "libfabric": libfabrics.libfabric,
    "model": running.model,
    "run": running.run,
    "setup": running.setup,
    "sglang": running.sglang,
    "verl": running.verl,
    "sim": running.sim,
    "soak": running.soak,
    "test": testing.test,
    "tsan": testing.tsan,
    "vllm": running.vllm,
    "vm": running.vm,
    "wheel": publishing.wheel,
}


def run(name: str, arguments: list[str]) -> int:
    """Runs the command. Returns its exit status."""
    try:
        command = COMMANDS.get(name)
        if command is None:
            raise Failure(f"no command '{name}'; there are: {', '.join(sorted(COMMANDS))}. See ./dev --help")
        return command(arguments)
    except Failure as failure:
        say(str(failure))
        return 1
    except KeyboardInterrupt:
        return 130
