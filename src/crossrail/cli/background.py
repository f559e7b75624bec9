"""Standard output of a service that must keep running whatever happens to it: a paused pager, a full disk, `| head`."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections.abc import Iterator
from typing import IO, cast

import click
from rich.console import Console

from crossrail.cli.console import open_console

_HELD_MAX = 256 << 10  # characters
_LAST_WORDS_S = 1.0


@contextlib.contextmanager
def background_console() -> Iterator[Console]:
    """A console of standard output on which printing never blocks and never fails."""
    output = BackgroundOutput(sys.stdout)
    try:
        yield open_console(file=cast("IO[str]", output))
    finally:
        output.close()


class BackgroundOutput:
    """A text stream whose write() never blocks and never fails, as far as a console needs one.

    Threads: any. A thread of its own writes, and is not waited for if nobody reads what it writes.

    Invariant: _held is the length of _texts, at most _HELD_MAX. Text that does not fit is dropped, and counted in
    _dropped.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        """stream: None where there is no standard output, which swallows everything."""
        self._stream = stream
        self._fd = _descriptor(self._stream)
        self._changed = threading.Condition()
        self._texts: list[str] = []
        self._held = 0
        self._dropped = 0
        self._writing = False
        self._closing = False
        self._has_failed = False
        threading.Thread(target=self._write_all, name="output", daemon=True).start()

    @property
    def encoding(self) -> str:
        """The stream's encoding."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def write(self, text: str) -> int:
        """Writes as any stream does."""
        with self._changed:
            if self._held + len(text) > _HELD_MAX:
                self._dropped += max(text.count("\n"), 1)
            else:
                self._texts.append(text)
                self._held += len(text)
            self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Nothing: that would be to wait."""

    def close(self) -> None:
        """Returns once everything is written out, or nobody has read it within a second. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._texts and not self._writing, _LAST_WORDS_S)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._texts or self._dropped or self._closing)
                text, dropped = "".join(self._texts), self._dropped
                self._texts, self._held, self._dropped = [], 0, 0
                if not text and not dropped:
                    return
                self._writing = True
            if dropped:
                text += f"({dropped} lines are missing here: nobody read them)\n"
            try:
                self._write(text)
            except OSError as error:
                self._tell_once(error)

    def _write(self, text: str) -> None:
        """Bypasses Python's buffer, whose lock would be held as long as nobody reads, even at the end of
        the process.
        """
        if self._fd is None:
            if self._stream is not None:
                self._stream.write(text)
                self._stream.flush()
            return
        left = memoryview(text.encode(self.encoding, "replace"))
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:
                select.select([], [self._fd], [])

    def _tell_once(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            with contextlib.suppress(OSError):
                click.echo(f"warning: standard output: {error.strerror}; the work goes on without it", err=True)


def _descriptor(stream: IO[str] | None) -> int | None:
    """The descriptor of what is printed from now on; None for a stream in memory, or for none."""
    if stream is None:
        return None
    try:
        stream.flush()
        return stream.fileno()
    except (OSError, ValueError):
        return None
