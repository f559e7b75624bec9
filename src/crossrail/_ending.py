"""State of the interpreter's exit. `import crossrail` registers the handler, because its position among the exit
handlers matters: the first engine may be opened much later, or never.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable

_close_all: Callable[[], None] | None = None
has_begun = False  # our handler is running: engines close, even if still in use
is_over = False  # our handler has returned; other exit handlers may still run


def at_exit(close_all: Callable[[], None]) -> None:
    """Sets what our exit handler calls, once. If the handler has run already, calls it now."""
    global _close_all
    _close_all = close_all
    if is_over:
        close_all()


@atexit.register
def _end() -> None:
    global has_begun, is_over
    has_begun = True
    if _close_all is not None:
        _close_all()
    is_over = True
