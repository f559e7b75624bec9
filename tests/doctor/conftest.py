import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from crossrail.doctor.reach import measure as measuring
from crossrail.doctor.reach import wire
from tests.doctor.tree import FakeHost, Tree
from tests.support.limits import SLOWNESS, WAIT_S


@pytest.fixture
def root(nothing_leaks: None) -> Iterator[Path]:
    """Where a made-up machine lies: in memory if there is room, as it has hundreds of files."""
    folder = Path(tempfile.mkdtemp(prefix="doctor-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def tree(root: Path) -> Tree:
    """A healthy server without RDMA."""
    return Tree(root).plain()


@pytest.fixture
def host(root: Path, tree: Tree) -> FakeHost:
    """The doctor's view of `tree`."""
    return FakeHost(root)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that a test can wait for."""
    monkeypatch.setattr(wire, "FRAME_DEADLINE_S", 0.3)
    monkeypatch.setattr(wire, "GRACE_S", 0.6)
    monkeypatch.setattr(measuring, "_BEFORE_THE_PEER_S", 0.1)
    monkeypatch.setattr(measuring, "_BUSY_PAUSE_S", 0.01)


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> float:
    """What streams and round trips have, in seconds, where a peer lets it run out. Requests are answered in time."""
    grace_s = 1.5 * SLOWNESS
    monkeypatch.setattr(wire, "FRAME_DEADLINE_S", WAIT_S)
    monkeypatch.setattr(wire, "GRACE_S", grace_s)
    monkeypatch.setattr(measuring, "_BEFORE_THE_PEER_S", 0.1)
    return grace_s
