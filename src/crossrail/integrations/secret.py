"""Where integrations find the secret that all instances of a deployment share."""

from __future__ import annotations

import os

from crossrail._files import SECRET_BYTES_MAX, read_at_most
from crossrail._options import SECRET_VARIABLE
from crossrail.errors import UsageError


def shared_secret(secret_file: str | None, who: str, options: str) -> bytes:
    """The content of the file, without whitespace around it; None: the value of CROSSRAIL_SECRET.

    who needs it, and where its options are, for the message. Raises UsageError when there is none: who can reach an
    instance's port could read prompts without it.
    """
    if secret_file is None:
        secret = os.environb.get(SECRET_VARIABLE.encode(), b"")
        where = f"the environment variable {SECRET_VARIABLE}"
    else:
        try:
            secret = read_at_most(secret_file, SECRET_BYTES_MAX, "secret").strip()
        except OSError as error:
            raise UsageError(f"secret_file: {error}") from None
        where = f"secret_file={secret_file!r}"
    if not 1 <= len(secret) <= 1024:
        raise UsageError(
            f"{who} needs a secret of 1..1024 bytes that all instances share, and {where} has {len(secret)}: set "
            f"{SECRET_VARIABLE}, or secret_file in {options}"
        )
    return secret
