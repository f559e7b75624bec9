"""Calls of code that is not ours: users' models and tokenizers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def exceptions_only() -> Iterator[None]:
    """Around such a call: RuntimeError for what it raises and is no Exception, unless it ends a task or the process.

    A panic of an extension in Rust, as tokenizers is one, derives from BaseException alone. It would pass by everything
    that handles a failed request, and end the task that all other requests depend on. Threads: any.
    """
    try:
        yield
    except (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
