"""Starts a fresh interpreter per sample, for what cannot be measured twice in one."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from crossrail.errors import CrossrailError

_SCRIPT_TIMEOUT_S = 60.0

# Prefix of a script that prints the interpreter's memory; numpy is imported beforehand.
RESIDENT_BYTES = """
import os
import numpy

def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
"""


def run_script(script: str, text: str = "") -> Any:
    """The script's output, parsed as JSON."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", script],
            input=text,
            capture_output=True,
            text=True,
            timeout=_SCRIPT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CrossrailError(f"a fresh interpreter did not end within {_SCRIPT_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        raise CrossrailError(f"a fresh interpreter failed: {done.stderr.strip()}")
    return json.loads(done.stdout)
