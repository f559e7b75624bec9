"""How much memory is free, on machines made of files."""

from pathlib import Path

import pytest

from crossrail.cli.memory import free_bytes
from crossrail.doctor.host import Host

GIB = 1 << 30
MEMINFO = f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {48 * GIB // 1024} kB\n"
GROUP = "/sys/fs/cgroup/pod/memory"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"/proc/meminfo": MEMINFO}, 48 * GIB),
        ({"/proc/meminfo": MEMINFO, f"{GROUP}.max": f"{8 * GIB}", f"{GROUP}.current": f"{3 * GIB}"}, 5 * GIB),
        ({"/proc/meminfo": MEMINFO, f"{GROUP}.max": f"{8 * GIB}", f"{GROUP}.current": f"{9 * GIB}"}, 0),
        ({"/proc/meminfo": MEMINFO, f"{GROUP}.max": f"{64 * GIB}", f"{GROUP}.current": "0"}, 48 * GIB),
        ({"/proc/meminfo": MEMINFO, f"{GROUP}.max": "max"}, 48 * GIB),
        ({f"{GROUP}.max": f"{8 * GIB}", f"{GROUP}.current": "0"}, 8 * GIB),
        ({}, None),
    ],
)
def test_least_of_what_the_machine_has_and_its_groups_leave(
    tmp_path: Path, files: dict[str, str], free: int | None
) -> None:
    for path, text in {"/proc/self/cgroup": "0::/pod\n", **files}.items():
        file = tmp_path / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert free_bytes(Host(tmp_path, {})) == free
