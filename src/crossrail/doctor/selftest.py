"""Loads crossrail, opens an engine on each transport named, has a second process write into it. A child of the doctor.

    python -m crossrail.doctor.selftest shm tcp ...

One JSON line per step, out as soon as it is known: the next step may crash or hang. The second process is this module
again, with `--write`.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt

import crossrail as xr
from crossrail import _core, _libfabric
from crossrail.default_rails import default_rails

_NBYTES = 1 << 20
_WINDOW = 8
_MEASURE_S = 0.25
_STEP_DEADLINE_S = 15.0


def say(step: str, **content: Any) -> None:
    """Writes one line."""
    sys.stdout.write(json.dumps({"step": step, **content}) + "\n")
    sys.stdout.flush()


def pattern() -> npt.NDArray[np.uint8]:
    """The bytes that must arrive: no two pages are alike."""
    return (np.arange(_NBYTES, dtype=np.uint32) * 2654435761 >> 24).astype(np.uint8)


def receive(transport: str) -> dict[str, Any]:
    """Open, let the other process write, compare. Which ways the bytes went, and how fast."""
    with xr.Engine("doctor", transport=transport) as engine:
        region = engine.alloc(_NBYTES)
        counter = engine.alloc_imm()
        arguments = [transport, bytes(region.descriptor).hex(), str(counter.imm)]
        writer = subprocess.run(
            [sys.executable, "-m", "crossrail.doctor.selftest", "--write", *arguments],
            capture_output=True,
            text=True,
            timeout=_STEP_DEADLINE_S,
        )
        if writer.returncode != 0:
            raise RuntimeError(f"the writing process: {_last_line(writer.stderr)}")
        result = json.loads(writer.stdout)
        counter.wait(result["writes"], timeout_s=_STEP_DEADLINE_S)
        if not (region.array() == pattern()).all():
            raise RuntimeError("the bytes that arrived are not those that were sent")
        return {"gb_per_s": result["writes"] * _NBYTES / result["seconds"] / 1e9, "ways": result["ways"]}


def write(transport: str, descriptor: str, imm: int) -> None:
    """The other process."""
    target = xr.RegionDescriptor.from_bytes(bytes.fromhex(descriptor))
    with xr.Engine("doctor-writer", transport=transport) as engine:
        source = engine.register(pattern())
        engine.submit_write(source, target, imm=imm).wait(timeout_s=_STEP_DEADLINE_S)  # connects
        writes, begun = 0, time.monotonic()
        while time.monotonic() - begun < _MEASURE_S:
            batch = [engine.submit_write(source, target, imm=imm) for _ in range(_WINDOW)]
            for transfer in batch:
                transfer.wait(timeout_s=_STEP_DEADLINE_S)
            writes += _WINDOW
        seconds = time.monotonic() - begun
        ways = [f"{path.what}: {path.path}, {path.reason}" for path in engine.explain(target.owner).paths if path.bytes]
    sys.stdout.write(json.dumps({"writes": writes + 1, "seconds": seconds, "ways": ways}))


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


def _test(transport: str) -> dict[str, Any]:
    if transport not in _core._built_transports():
        return {"state": "absent", "detail": f"{transport}: this build has {', '.join(_core._built_transports())}"}
    try:
        return {"state": "ok", **receive(transport)}
    except TypeError as error:
        # The binding says this if Python files and native module are from different builds; otherwise it is our own
        # fault.
        state = "misfit" if "incompatible" in str(error) else "failed"
        return {"state": state, "detail": str(error)}
    except Exception as error:
        return {"state": "failed", "detail": str(error) or type(error).__name__}


def main(arguments: list[str]) -> None:
    """Either side."""
    if arguments[:1] == ["--write"]:
        write(arguments[1], arguments[2], int(arguments[3]))
        return
    try:
        installed = importlib.metadata.version("crossrail")
    except importlib.metadata.PackageNotFoundError:
        installed = ""
    say("loaded", version=xr.__version__, installed_version=installed, file=xr.__file__, native_file=_core.__file__)
    for transport in arguments:
        say("transport", transport=transport, **_test(transport))
    _libfabric.announce()
    for transport in ("verbs", "ofi"):
        if transport in arguments:
            say(
                "ports", transport=transport, ports=_core._rdma_ports(transport), missing=_core._rdma_missing(transport)
            )
    chosen = default_rails("auto", 1)
    say("chosen", rails=[] if isinstance(chosen, int) else list(chosen))


if __name__ == "__main__":
    main(sys.argv[1:])
