"""Ctrl-C while a command is still importing, or already ending, ends it as it ends a C program: without a traceback.

Elsewhere, in programs that use the package, it stays Python's own affair. KeyboardInterrupt would not do for commands:
numpy, interrupted while it is imported, reports that it is not installed properly.
"""

import importlib
import signal
import sys
import threading
from types import ModuleType


def _is_command() -> bool:
    return sys.argv[0].rpartition("/")[2] == "crossrail" or sys.orig_argv[1:3] == ["-m", "crossrail"]


def begin() -> None:
    """Takes effect if this process runs a command, until over()."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours and threading.current_thread() is threading.main_thread() and _is_command():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        global _has_begun
        _has_begun = True


def over() -> None:
    """What is to be imported is."""
    global _has_begun
    if _has_begun:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _has_begun = False


def load(module: str) -> ModuleType:
    """Imports that of a command, between begin() and over()."""
    begin()
    try:
        return importlib.import_module(module)
    finally:
        over()


_has_begun = False
begin()
