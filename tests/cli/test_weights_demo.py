"""`crossrail weights demo` in processes of its own: the example of the documentation, small."""

import subprocess
import sys

import pytest


@pytest.mark.timeout(150)
def test_demo_survives_the_death_of_a_trainer() -> None:
    arguments = ["--versions", "2", "--trainers", "2", "--mib", "6", "--transport", "shm", "--kill"]
    command = [sys.executable, "-m", "crossrail", "weights", "demo", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "ok: 2 versions, all bits equal at all inference ranks" in ended.stdout
