"""Leases on pages that an embedding engine's own allocator hands out: states and rules of pages.py without a pool."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from crossrail._options import check_counts, check_kind, check_whole
from crossrail.errors import UsageError
from crossrail.kv.transfer.pages import PageLease, PageState
from crossrail.kv.transfer.prefix import PageNames

NOT_YET = 0xFFFF_FFFF  # where a page of the request is not allocated yet; no transfer takes it for a page


class _ForeignPages:
    """Stands where the pool would: the books are kept elsewhere."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens

    def _move(self, lease: PageLease, state: PageState) -> None:
        """The lease knows its state, and nobody else asks."""

    def _publish(self, pages: npt.NDArray[np.uint32], names: PageNames) -> None:
        raise UsageError("these pages are not a pool's: whoever allocated them knows what is to be cached")

    def _return(self, lease: PageLease) -> None:
        """Whoever allocated the pages sees release() return, and may give them to others."""


def foreign_lease(owner: str, pages: npt.NDArray[np.uint32], page_tokens: int, *, prefix_tokens: int = 0) -> PageLease:
    """A reserved lease of pages that the caller allocated, in the order of the request's tokens.

    The caller keeps them from others until release() has returned, which raises PagesInUse while a peer may touch them.
    pages: shared, not copied. An allocator that gives a request its pages one by one replaces NOT_YET by them, before a
        step that needs them is begun. prefix_tokens: tokens that are already there, whole pages.
    """
    check_kind(pages, "pages", np.ndarray, "an array of numpy")
    if pages.dtype != np.uint32 or pages.ndim != 1:
        raise UsageError(f"pages are {pages.dtype} of shape {pages.shape}, must be one row of uint32")
    check_counts(1, page_tokens=page_tokens)
    check_whole(prefix_tokens=prefix_tokens)
    shared, rest = divmod(int(prefix_tokens), int(page_tokens))
    if rest or not 0 <= shared <= len(pages):
        raise UsageError(f"prefix_tokens={prefix_tokens} must be whole pages of {page_tokens}, at most {len(pages)}")
    lease = PageLease(_ForeignPages(int(page_tokens)), owner, pages, shared)
    assert lease.state is PageState.RESERVED
    return lease
