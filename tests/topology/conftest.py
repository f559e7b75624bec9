"""Machines that tests build and read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crossrail.topology import Topology
from tests.topology.trees import Machine, scratch

Build = Callable[..., Topology]
_built: dict[object, Topology] = {}


@pytest.fixture
def machine() -> Iterator[Machine]:
    """An empty tree, to be filled by the test."""
    with scratch() as top:
        yield Machine(Path(top))


@pytest.fixture
def build() -> Build:
    """One of trees.py's machines as it is read. Topologies never change, so each is built once."""

    def read(make: Callable[..., None], **options: object) -> Topology:
        key = (make, *options.items())
        if key not in _built:
            with scratch() as top:
                machine = Machine(Path(top))
                make(machine, **options)
                _built[key] = Topology.read(machine.sys)
        return _built[key]

    return read
