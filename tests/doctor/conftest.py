import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doctor.tree import FakeHost, Tree


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
