"""A process that owns memory on a (fake) GPU, and executes commands line by line."""

from __future__ import annotations

import signal
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from tests.support.limits import WAIT_S
from tests.support.process import start_script


class Owner:
    """remotes: descriptors of its regions, which it says first."""

    def __init__(self, script: subprocess.Popen[str], regions: int) -> None:
        self.script = script
        self.remotes = [self.descriptor(self.line()) for _ in range(regions)]

    @property
    def remote(self) -> xr.RegionDescriptor:
        return self.remotes[0]

    @staticmethod
    def descriptor(text: str) -> xr.RegionDescriptor:
        return xr.RegionDescriptor.from_bytes(bytes.fromhex(text))

    def line(self) -> str:
        assert self.script.stdout is not None and self.script.stderr is not None
        return self.script.stdout.readline().strip() or pytest.fail(self.script.stderr.read())

    def tell(self, word: str, number: int = 0) -> None:
        assert self.script.stdin is not None
        self.script.stdin.write(f"{word} {number}\n")
        self.script.stdin.flush()

    def ask(self, word: str, number: int = 0) -> str:
        self.tell(word, number)
        return self.line()


@contextmanager
def owner_of(program: str, *arguments: str, regions: int = 1) -> Iterator[Owner]:
    with start_script(program, *arguments) as script:
        try:
            yield Owner(script, regions)
            assert script.stdin is not None
            script.stdin.close()
            assert script.wait(WAIT_S) in (0, -signal.SIGKILL), script.stderr and script.stderr.read()
        finally:
            script.kill()


def crc(array: np.ndarray[Any, Any]) -> str:
    return str(zlib.crc32(array))


def path_of(engine: xr.Engine, remote: xr.RegionDescriptor) -> tuple[set[str], str]:
    """Paths to the peer's regions, and their reasons."""
    paths = engine.explain(remote.owner).paths
    return {path.path for path in paths}, " ".join(path.reason for path in paths)
