"""The requests that a router has admitted and that have not ended yet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

from crossrail.control.deadlines import set_in_time
from crossrail.kv.errors import Overloaded
from crossrail.kv.options import RouterOptions
from crossrail.kv.router.placement import weight
from crossrail.kv.router.requests import Running


class Underway(Mapping[str, Running]):
    """Requests by name, and the sum of the tokens that they may take. Threads: the event loop's.

    Invariant: _tokens is the sum of the requests' weights; _idle is set exactly while there are none.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Running] = {}
        self._tokens = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __getitem__(self, request: str) -> Running:
        return self._by_name[request]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def check_room(self, tokens: int, options: RouterOptions) -> None:
        """Raises Overloaded unless the options allow one more request, of this many tokens.

        A request that would be the only one may exceed tokens_max.
        """
        if len(self) >= options.requests_max:
            raise Overloaded(f"{len(self)} requests are under way, at most {options.requests_max} may be")
        if self._tokens and self._tokens + tokens > options.tokens_max:
            raise Overloaded(f"requests of {self._tokens} tokens are under way, at most {options.tokens_max} may be")

    def add(self, running: Running) -> None:
        """Its name must not be in use."""
        assert running.request not in self._by_name
        self._by_name[running.request] = running
        self._tokens += weight(running)
        self._idle.clear()

    def remove(self, running: Running) -> bool:
        """False: it is unknown."""
        if self._by_name.pop(running.request, None) is None:
            return False
        self._tokens -= weight(running)
        if not self._by_name:
            self._idle.set()
        return True

    async def all_ended(self, timeout_s: float) -> bool:
        """Waits until there are none. False if that took too long."""
        return await set_in_time(self._idle, timeout_s)
