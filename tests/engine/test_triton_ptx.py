"""The kernels that we write in PTX, assembled for several generations of GPUs by the assembler that Triton brings."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import triton

from tests.support.limits import PROGRAM_S

SOURCE = Path(__file__).parents[2] / "native" / "device" / "kernels.cc"
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_our_kernels_assemble_and_need_no_stack(architecture: str, tmp_path: Path) -> None:
    image = re.search(r'kImage = R"\((.*?)\)";', SOURCE.read_text(), re.DOTALL)
    assert image is not None
    text = tmp_path / "kernels.ptx"
    text.write_text(image[1])
    done = subprocess.run(
        [PTXAS, "--verbose", "--warning-as-error", "-arch", architecture, text, "-o", tmp_path / "kernels.cubin"],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
    )
    assert done.returncode == 0, done.stderr
    entries = re.findall(r"Compiling entry function '(\w+)'", done.stderr)
    assert sorted(entries) == sorted(re.findall(r"\.visible \.entry (\w+)", image[1]))
    assert set(re.findall(r"(\d+) bytes stack frame", done.stderr)) == {"0"}
