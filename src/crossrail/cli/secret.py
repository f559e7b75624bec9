"""The secret that the processes of a service share."""

from __future__ import annotations

import os
from pathlib import Path

from crossrail.engine import SECRET_VARIABLE
from crossrail.errors import UsageError


def read_secret(file: Path | None) -> bytes:
    """Of the file, else of the environment. UsageError when there is none: whoever can reach a node without one could
    give it work.
    """
    secret = file.read_bytes().strip() if file is not None else os.environb.get(SECRET_VARIABLE.encode(), b"")
    if not secret:
        raise UsageError(f"a secret that all nodes share is needed: --secret-file, or {SECRET_VARIABLE}")
    return secret
