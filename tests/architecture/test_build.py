"""That the build can be set up where something optional is missing. What is missing there: see cmake/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.process import REPOSITORY


@pytest.mark.timeout(120)
@pytest.mark.parametrize("joins", ["ON", "OFF"])
def test_a_wheel_is_configured_without_libibverbs(tmp_path: Path, joins: str) -> None:
    """As pip does it on a machine without libibverbs' headers; joined or not, as cmake/joined.cmake has it."""
    cmake = Path(sys.executable).with_name("cmake")
    ninja = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={cmake.with_name('ninja')}"]  # not every machine has make
    options = [f"-D{option}" for option in ("CROSSRAIL_VERBS=OFF", f"CROSSRAIL_JOIN={joins}", "CROSSRAIL_BINDINGS=OFF")]
    made = subprocess.run(
        [cmake, "-S", REPOSITORY, "-B", tmp_path, *ninja, *options],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert made.returncode == 0, made.stderr
