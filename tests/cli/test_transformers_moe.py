"""`crossrail moe demo` in processes of its own: the example of the documentation."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.timeout(500)
def test_demo_equals_one_process(dtype: str) -> None:
    command = [sys.executable, "-m", "crossrail", "moe", "demo", "--dtype", dtype]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=480, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "ok: equal to one process within the dtype, and bit for bit the same a second time" in ended.stdout
