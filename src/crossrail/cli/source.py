"""The file to send: finding it, and reading it safely piece by piece."""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
from pathlib import Path

from crossrail.errors import CrossrailError, UsageError


def default_file() -> Path:
    """The shared library of the running interpreter, or its executable where it is linked statically."""
    for candidate in (_configured_library(), _mapped_library()):
        if candidate is not None and candidate.is_file():
            return candidate
    return Path(sys.executable).resolve()


def _configured_library() -> Path | None:
    directory: str | None = sysconfig.get_config_var("LIBDIR")
    library: str | None = sysconfig.get_config_var("INSTSONAME") or sysconfig.get_config_var("LDLIBRARY")
    if not directory or not library or ".so" not in library:
        return None
    return Path(directory) / library


def _mapped_library() -> Path | None:
    try:
        lines = os.fsdecode(Path("/proc/self/maps").read_bytes()).split("\n")
    except OSError:
        return None
    paths = (line.split(maxsplit=5)[5] for line in lines if "/libpython" in line)
    return next((Path(path) for path in paths), None)


class SourceFile:
    """A regular file open for reading, of the length it had when it was opened. A context manager."""

    def __init__(self, path: Path) -> None:
        """UsageError when it is no regular file, or cannot be read."""
        self.path = path
        try:
            # O_NONBLOCK: opening a FIFO that nobody writes to would hang; it changes nothing for regular files.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from None
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise UsageError(f"{path} is {kind}; give a regular file")
        self.nbytes = status.st_size
        self._written_ns = status.st_mtime_ns
        self.mode = stat.S_IMODE(status.st_mode)
        if self.nbytes == 0 and self.has_more():
            os.close(self._fd)
            raise UsageError(
                f"{path} has bytes and says that it has none, as files of /proc do; copy it, and push that"
            )

    def __enter__(self) -> SourceFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._fd)

    def has_more(self) -> bool:
        """Whether there are bytes behind `nbytes`: it has grown."""
        try:
            return bool(os.pread(self._fd, 1, self.nbytes))
        except OSError:
            return False  # unreadable bytes cannot be its own

    def has_changed(self) -> bool:
        """Whether the file was written to since it was opened: what was read may then be half old and half new.

        Judged by its modification time, whose resolution is seconds on some file systems.
        """
        return os.fstat(self._fd).st_mtime_ns != self._written_ns

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` with the bytes from `offset` on. CrossrailError when the file has become shorter."""
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._fd, [target[done:]], offset + done)
            except OSError as error:
                raise CrossrailError(f"cannot read {self.path} at {offset + done}: {error.strerror}") from None
            if count == 0:
                raise CrossrailError(f"{self.path} became shorter than {self.nbytes} bytes while it was read")
            done += count
