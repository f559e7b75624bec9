"""`crossrail moe demo` in processes of its own: the example of the documentation."""

import subprocess
import sys

import pytest


@pytest.mark.timeout(600)
def test_demo_equals_one_process() -> None:
    command = [sys.executable, "-m", "crossrail", "moe", "demo"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "float32" in ended.stdout
    assert "bfloat16" in ended.stdout
    assert "ok: equal to one process within the dtype, and the same bits twice" in ended.stdout
