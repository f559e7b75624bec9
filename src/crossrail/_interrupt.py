"""Ctrl-C while a command is still importing, or already exiting, ends it as it would a C program: without a traceback.

Programs that merely use the package keep Python's behaviour. KeyboardInterrupt is not good enough for commands: numpy,
interrupted during its import, reports that it is not installed properly.
"""

import importlib
import signal
import sys
import threading
from types import ModuleType


def _is_command() -> bool:
    return sys.argv[0].rpartition("/")[2] == "crossrail" or sys.orig_argv[1:3] == ["-m", "crossrail"]


def begin() -> None:
    """Takes effect if this process runs a command, and lasts until over()."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours and threading.current_thread() is threading.main_thread() and _is_command():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        global _has_begun
        _has_begun = True


def over() -> None:
    """Ends the state that begin() started: all imports are done."""
    global _has_begun
    if _has_begun:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _has_begun = False


def load(module: str) -> ModuleType:
    """Imports a command's module, between begin() and over()."""
    begin()
    try:
        return importlib.import_module(module)
    finally:
        over()


_has_begun = False
begin()
