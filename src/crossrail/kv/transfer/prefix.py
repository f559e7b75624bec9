"""Names for the content of pages: a hash chain over tokens, so that equal names mean equal KV."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from crossrail._core import kv as native
from crossrail.errors import UsageError

NAME_BYTES = 32  # of SHA-256: nobody can make up a prompt that is taken for somebody else's
PageNames: TypeAlias = npt.NDArray[np.uint8]  # a row for each page
NO_NAMES: PageNames = np.empty((0, NAME_BYTES), np.uint8)

_TOKEN_MAX = 0xFFFFFFFF
_PAGE_TOKENS_MAX = 0xFFFFFFFF


def page_hashes(tokens: Sequence[int] | npt.NDArray[np.integer], page_tokens: int, *, salt: bytes = b"") -> PageNames:
    """Names for the full pages of tokens, uint8 [pages, 32]; tokens after the last full page have none.

    A name covers all tokens up to the end of its page, since these determine the page's KV. salt: everything else that
    does, such as the model, its revision and adapter; names with different salts never match, nor those of pages of
    different sizes. tokens: 0..2**32-1. Without the GIL.
    """
    page_tokens = operator.index(page_tokens)
    if not 1 <= page_tokens <= _PAGE_TOKENS_MAX:
        raise UsageError(f"page_tokens={page_tokens} must be in 1..{_PAGE_TOKENS_MAX}")
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError("tokens must be one-dimensional whole numbers")
    if array.size and (array.min() < 0 or array.max() > _TOKEN_MAX):
        raise UsageError(f"tokens must be in 0..{_TOKEN_MAX}")
    if page_tokens > array.size:
        return NO_NAMES
    first = b"crossrail-kv".ljust(28, b"\0") + page_tokens.to_bytes(4, "little") + hashlib.sha256(salt).digest()
    names = cast(PageNames, native.page_names(first, np.ascontiguousarray(array, "<u4"), page_tokens))
    names.flags.writeable = False
    return names
