"""Ctrl-C while a command is still importing, or already exiting, ends it as it would a C program: without a traceback.

Programs that merely use the package keep Python's behaviour. KeyboardInterrupt is not good enough for commands: numpy,
interrupted during its import, reports that it is not installed properly.

SIGTERM ends a service of `crossrail kv` with status 0 then, as it does later: whoever watches over it would take a
death by a signal for a failure. And the first process of a container gets no signal that it has no handler for.
"""

import importlib
import os
import signal
import sys
import threading
from types import ModuleType


def _is_command() -> bool:
    return sys.argv[0].rpartition("/")[2] == "crossrail" or sys.orig_argv[1:3] == ["-m", "crossrail"]


def _is_service() -> bool:
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    return words[:1] == ["kv"] and words[1:2] in (["router"], ["prefiller"], ["decoder"])


def _end(*_: object) -> None:
    os._exit(0)


def begin() -> None:
    """Takes effect if this process runs a command, and lasts until over(); SIGTERM's part lasts until a service has
    other use for it.
    """
    if threading.current_thread() is not threading.main_thread() or not _is_command():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and _is_service():
        signal.signal(signal.SIGTERM, _end)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
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
