"""The options of ./dev wheel. Nothing but Python is needed to read them: help and mistakes come before set-up."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

_ABOUT = """\
./dev wheel: builds the wheels that are published, looks at what is in them, and uses them in a clean environment.

    ./dev wheel                   sdist, and from it the wheel for the Python of .venv; checked and tried
    ./dev wheel --python PYTHON   for that Python instead; several times: several wheels
    ./dev wheel --all             for 3.10 and 3.11, and the one of 3.12 that serves all later ones
    ./dev wheel --twice           each compiled once more, in another folder without caches: the same bytes? Without it
                                  the sdist alone is made twice, and each wheel packed twice
    ./dev wheel --compiler CXX    not the compiler that writes for glibc 2.28 on any machine, but this one
    ./dev wheel --no-trial        built and checked only

They lie in dist/. A wheel that needs more than its tag says is not written: the command fails and says what it is."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Of sys.argv unless given. Ends the process after help, and for what it does not know."""
    parser = argparse.ArgumentParser(
        prog="./dev wheel", description=_ABOUT, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--python", action="append", metavar="PYTHON")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--twice", action="store_true")
    parser.add_argument("--compiler", metavar="CXX")
    parser.add_argument("--no-trial", action="store_true")
    return parser.parse_args(arguments)
