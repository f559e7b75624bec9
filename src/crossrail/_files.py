"""Bounded reads of files that a user names: the wrong file may be endless (/dev/zero) or too large for memory."""

from __future__ import annotations

import os

from crossrail.errors import UsageError

SECRET_BYTES_MAX = 4096  # limit for a secret file; the secret itself is at most 1024 bytes
_PIECE_BYTES = 1 << 20


def read_at_most(path: str | os.PathLike[str], nbytes_max: int, what: str) -> bytes:
    """The contents of a file. UsageError if it has more than nbytes_max; what: the expected kind of file. OSError."""
    data = bytearray()
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - pathlib is slow to import
        while piece := file.read(min(_PIECE_BYTES, nbytes_max + 1 - len(data))):
            data += piece
            if len(data) > nbytes_max:
                raise UsageError(f"{os.fspath(path)} has more than {_size(nbytes_max)}: it is no {what}")
    return bytes(data)


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes} bytes"
