"""Files that hold anything but what they should. No check may raise, hang or believe them."""

import random
from pathlib import Path

import pytest

from crossrail.doctor.report import run_checks
from crossrail.doctor.topics import TOPICS
from tests.doctor.test_checks import equip
from tests.doctor.tree import FakeHost, Tree
from tests.support.seeds import Seed

JUNK: list[bytes] = [
    b"",
    b"\n\n\n",
    b"\xff\xfe\x00\x80" * 100,
    b"-",
    b"999999999999999999999999999999999999999",
    b"-9223372036854775809",
    b"0x",
    b"1 2 3 4 5 6 7 8 9",
    b": : :\n:::\n::\n0::/../../..",
    b"4: ACTIVE" * 1000,
    b"[[[[]]]]",
    b"0-99999999999,3--4",
    "\u0661\u0662\u0663".encode(),
    b"\x1b]0;owned\x07",
    b"A" * (1 << 20),
]


def failures(host: FakeHost) -> list[str]:
    return [f.seen for f in run_checks(host).findings if "this check itself failed" in f.title]


def server(root: Path) -> tuple[Tree, FakeHost]:
    tree, host = Tree(root).gpu_server(), FakeHost(root)
    tree.efa(0)
    equip(host, "mlx5_0", "mlx5_1", "efa_0")
    tree.write("/sys/fs/cgroup/cpu.max", "max 100000").write("/sys/fs/cgroup/memory.max", "max")
    tree.write("/sys/fs/cgroup/cpu.stat", "nr_periods 1\nnr_throttled 0")
    return tree, host


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: repr(junk[:20]))
def test_every_file_is_junk(root: Path, junk: bytes) -> None:
    _, host = server(root)
    for file in files(root):
        file.write_bytes(junk)

    assert failures(host) == []


def test_random_files_are_junk(root: Path, seed: Seed) -> None:
    server(root)
    rng = random.Random(int(seed.rng().integers(1 << 31)))
    every = {file: file.read_bytes() for file in files(root)}
    for _ in range(12):
        for file, content in every.items():
            file.write_bytes(rng.choice([*JUNK, rng.randbytes(40)]) if rng.random() < 0.3 else content)
        host = FakeHost(root)
        equip(host, "mlx5_0")

        assert failures(host) == []


def test_directories_in_place_of_files(root: Path) -> None:
    server(root)
    for file in files(root):
        file.unlink()
        file.mkdir()

    assert failures(FakeHost(root)) == []


def test_empty_machine(root: Path) -> None:
    host = FakeHost(root)
    host.shm = None

    assert failures(host) == []
    assert {finding.topic for finding in run_checks(host).findings} <= set(TOPICS)


def test_links_that_lead_in_circles(root: Path) -> None:
    tree, _ = server(root)
    link = tree.path("/sys/class/infiniband/mlx5_7")
    link.symlink_to("mlx5_7")
    tree.path("/sys/bus/pci/devices/0000:99:00.0").symlink_to(".")

    assert failures(FakeHost(root)) == []
