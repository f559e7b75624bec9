"""Processes whose wall clock differs from ours and jumps, by the library that ./dev builds (tests/native/clock)."""

from pathlib import Path

from tests.support.fake_gpu import driver_file

_JUMP_S = 2 * 3600


def environment(offset_s: int, jump_s: int = _JUMP_S) -> dict[str, str]:
    """The environment of a process whose wall clock is ahead by offset_s, and jumps by jump_s each second."""
    return {"LD_PRELOAD": str(_library()), "MOVED_CLOCK": f"{offset_s} {jump_s}"}


def _library() -> Path:
    file = driver_file().parents[1] / "clock" / "libmoved_clock.so"
    if not file.exists():
        raise FileNotFoundError(f"no library that moves clocks at {file}: ./dev setup builds it")
    return file
