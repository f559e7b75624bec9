"""The command line. `crossrail --help` lists the commands; each lives in a module of its own and loads when it runs."""

from crossrail import _interrupt

_interrupt.begin()
from crossrail.cli.main import main  # noqa: E402

_interrupt.over()

__all__ = ["main"]
