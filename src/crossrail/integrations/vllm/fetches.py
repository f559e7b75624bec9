"""A transfer's KV comes to an instance once, however many requests name it there.

vLLM splits a request with n > 1 into one per choice, with the same kv_transfer_params; and a router that retries sends
the same once more. Their producer keeps the KV until it was fetched once. So the first of them fetches it, the others
wait until it has, find the blocks in vLLM's prefix cache, and compute what is missing there. Choices may go to other
data-parallel replicas than the first of them, which must not fetch what the first one fetches.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from crossrail._latest import Latest
from crossrail.integrations.vllm.orders import Wanted

_REMEMBERED = 4096


class Fetch(NamedTuple):
    """What such requests have in common. producer: one incarnation of it. prompt: its SHA-256; that of b"" for prompts
    that are not tokens: requests after the first read only blocks that vLLM's prefix cache knows to be theirs.
    """

    transfer_id: str
    producer: str
    prompt: bytes


class Fetches:
    """Threads: the scheduler's. A prompt is as in orders.Offer."""

    def __init__(self) -> None:
        self._fetchers: dict[Fetch, str] = {}
        self._of_request: dict[str, Fetch] = {}
        self._fetched: Latest[Fetch, None] = Latest(_REMEMBERED)
        self._others: dict[str, tuple[Fetch, Wanted]] = {}
        self._elsewhere: set[str] = set()  # requests after the first whose KV another replica fetches

    def begin(self, wanted: Wanted, prompt: bytes, may_fetch: bool = True) -> bool:
        """Whether this request is to fetch its KV. False: another one does or did; waits() says how long.

        may_fetch False: if none does here, one of another replica does.
        """
        fetch = Fetch(wanted.transfer_id, wanted.instance.writer, hashlib.sha256(prompt).digest())
        if fetch in self._fetchers or fetch in self._fetched:
            self._others[wanted.request] = fetch, wanted
            return False
        if not may_fetch:
            self._others[wanted.request] = fetch, wanted
            self._elsewhere.add(wanted.request)
            return False
        self._fetchers[fetch], self._of_request[wanted.request] = wanted.request, fetch
        return True

    def waits(self, request: str) -> bool:
        """Whether it is one after the first, and must keep waiting: its fetch is not over."""
        return request in self._others and self._others[request][0] in self._fetchers

    def go_on(self, request: str) -> Wanted | None:
        """For one of the others, once it waits no more: what it is to fetch itself after all, as who was to do so has
        ended without. None: nothing, the KV was here, or is another replica's.
        """
        fetch, wanted = self._others.pop(request)
        if request in self._elsewhere or fetch in self._fetched:
            self._elsewhere.discard(request)
            return None
        self._fetchers[fetch], self._of_request[request] = request, fetch
        return wanted

    def end(self, request: str, fetched: bool = False) -> None:
        """It fetches nothing any more, or has ended. fetched: its KV is all here. Nothing for requests unknown here."""
        self._others.pop(request, None)
        self._elsewhere.discard(request)
        if (fetch := self._of_request.pop(request, None)) is None:
            return
        del self._fetchers[fetch]
        if fetched:
            self._fetched[fetch] = None

    def is_other(self, request: str) -> bool:
        """Whether another request fetches, or has fetched, what it wants."""
        return request in self._others
