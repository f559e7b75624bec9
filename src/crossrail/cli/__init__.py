"""The command line. `crossrail --help` lists the commands; each lives in a module of its own and loads when it runs."""

from crossrail.cli.main import main

__all__ = ["main"]
