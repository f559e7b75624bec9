"""Names for the content of pages: a hash chain over tokens, so that equal names mean equal KV."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from crossrail.errors import UsageError

_DIGEST_BYTES = 32  # nobody can make up a prompt that is taken for somebody else's


def page_hashes(tokens: Sequence[int] | npt.NDArray[np.integer], page_tokens: int, *, salt: bytes = b"") -> list[bytes]:
    """One name for each full page of tokens; tokens after the last full page have none.

    A name covers all tokens up to the end of its page, since these determine the page's KV. salt: everything else that
    does, such as the model, its revision and adapter; names with different salts never match. Takes about a microsecond
    per page.
    """
    if page_tokens < 1:
        raise UsageError(f"page_tokens={page_tokens} must be 1 or more")
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError("tokens must be one-dimensional whole numbers")
    page_bytes = page_tokens * 8
    content = memoryview(array.astype("<i8").tobytes())
    name = hashlib.blake2b(salt, digest_size=_DIGEST_BYTES, person=b"crossrail-kv").digest()
    names = []
    for at in range(0, len(content) // page_bytes * page_bytes, page_bytes):
        chained = hashlib.blake2b(name, digest_size=_DIGEST_BYTES)
        chained.update(content[at : at + page_bytes])
        name = chained.digest()
        names.append(name)
    return names
