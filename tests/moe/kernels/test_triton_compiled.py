"""Kernels are compiled for GPUs, which the interpreter of the other tests does not do. Whether they run: tests/hw."""

import os
import subprocess
import sys

import pytest

from tests.support.process import REPOSITORY


@pytest.mark.timeout(300)
def test_all_kernels_compile(tmp_path: os.PathLike[str]) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    made = subprocess.run(
        [sys.executable, "-m", "tests.moe.kernels.compiled", "80", "90"],
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert made.returncode == 0, made.stderr[-3000:]
    assert made.stdout.split() == [
        "count_routes", "dequantize_rows", "fetch_tables", "give_rows", "pack_rows", "pull_rows", "quantize_rows",
        "reduce_rows", "send_rows", "share_routes", "take_rows", "102",
    ]  # fmt: skip
