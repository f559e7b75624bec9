"""What .ci/run makes of a virtual machine that cannot be had."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.limits import PROGRAM_S

RUN = Path(__file__).resolve().parents[2] / ".ci" / "run"


def decided(status: str, folder: Path) -> tuple[str, str]:
    """What the script says and does after `./dev vm --check` ended so, and which logs of failures it notes."""
    found = re.search(r'^case \$\(<"\$logs/vm-status"\) in\n.*?^esac$', RUN.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    (folder / "vm-status").write_text(status)
    failed = folder / "failed"
    failed.write_text("")
    script = f'logs={folder} failed={failed}\nstep() {{ echo "ran $*"; }}\n{found[0]}'
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=PROGRAM_S, check=True).stdout
    return said, failed.read_text()


def test_tests_in_the_machine_are_always_the_same_ones(tmp_path: Path) -> None:
    assert decided("0\n", tmp_path) == ("ran 15 vm test --seed 1\n", "")


@pytest.mark.parametrize("status", ["124", "125", "137"])
def test_a_machine_that_cannot_is_a_skip(tmp_path: Path, status: str) -> None:
    said, failed = decided(f"{status}\n", tmp_path)

    assert "SKIPPED" in said and failed == ""


@pytest.mark.parametrize("status", ["", "1", "2", "126", "127", "139"])
def test_any_other_status_is_a_failure(tmp_path: Path, status: str) -> None:
    said, failed = decided(f"{status}\n", tmp_path)

    assert "FAILED" in said and failed == f"{tmp_path}/vm-check\n"
