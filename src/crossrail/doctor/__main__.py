"""Runs the doctor alone, even where crossrail cannot be imported: `python .../site-packages/crossrail/doctor`.

Run as a folder it does not import the package above it; a stand-in takes the package's place, so that the doctor's own
modules (and crossrail.errors) are found.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path


def _stand_in() -> None:
    """Puts an empty package `crossrail` in place of the real one. Its modules are found, its __init__ never runs."""
    folder = Path(__file__).resolve().parents[1]
    # The first entry is the doctor's own folder, whose modules must not be importable by their short names.
    if sys.path and Path(sys.path[0]).resolve() == folder / "doctor":
        del sys.path[0]
    package = types.ModuleType("crossrail")
    package.__path__ = [str(folder)]
    sys.modules["crossrail"] = package


if __name__ == "__main__":
    if "crossrail" not in sys.modules:
        _stand_in()
    importlib.import_module("crossrail.cli.main").main(["doctor", *sys.argv[1:]], prog_name="crossrail")
