"""The page's program for torch.distributed alone, as it stands there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documentation.blocks import blocks
from tests.support.limits import SLOWNESS
from tests.support.ports import free_port

START_S = 100.0 * SLOWNESS
RANKS = 2  # each imports torch

pytestmark = pytest.mark.no_sanitizer  # starts interpreters, which import torch


@pytest.mark.timeout(240)
def test_update_whose_processes_find_each_other_by_a_gloo_group(tmp_path: Path) -> None:
    program = tmp_path / "update.py"
    program.write_text(blocks()["docs/weights.md"][1])
    surroundings = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(RANKS),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error::ResourceWarning", str(program)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=surroundings | {"RANK": str(rank)},
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=START_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * RANKS, said
    assert [out for out, _ in said] == ["", "version 1 has rows of [1.0]\n"]
