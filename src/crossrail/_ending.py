"""What happens at interpreter exit. `import crossrail` registers the handler, because its place among the exit handlers
matters: the first engine might be opened much later, or never.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable

_close_all: Callable[[], None] | None = None
has_begun = False  # our turn: engines close, whoever still uses them
is_over = False  # our turn; other exit handlers may still come


def at_exit(close_all: Callable[[], None]) -> None:
    """Once. If our turn is over, it is called now."""
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
