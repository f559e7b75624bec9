"""Which pages the requests of a decoder have: some from their start on, some again after they had to give them back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from crossrail.control.deadlines import set_in_time
from crossrail.errors import UsageError
from crossrail.kv import messages as m
from crossrail.kv.errors import NoPages
from crossrail.kv.model import Tokens
from crossrail.kv.nodes.node import Node
from crossrail.kv.nodes.serving import Serving, Stopped
from crossrail.kv.transfer.pages import PageState
from crossrail.kv.transfer.prefix import PageNames, page_hashes
from crossrail.kv.transfer.receiver import KvReceiver
from crossrail.kv.transfer.reception import Reception

_NAME_SHOWN = 28  # characters of at most four bytes, so that a name of 129 characters takes at most 256 bytes


class DecoderPages:
    """Threads: the event loop's.

    servings: the node's requests. lacking: how many of them need pages again; they come before all new ones, first
    come, first served.
    """

    def __init__(self, node: Node, receiver: KvReceiver, servings: Mapping[str, Serving]) -> None:
        self._node = node
        self._receiver = receiver
        self._servings = servings
        self.lacking = 0
        self._turn = asyncio.Lock()  # of the requests that need pages again
        self._room = asyncio.Event()  # set when pages were released
        self._replacements = 0

    def check_size(self, context: Tokens, left: int) -> None:
        """UsageError if there can never be enough pages for a context and so many further tokens."""
        wanted, there_are = self._node.model.layout.pages_of(len(context) + left), self._node.pool.pages
        if wanted > there_are:
            raise UsageError(
                f"{len(context)} + {left} tokens take {wanted} pages, node {self._node.name!r} has {there_are}"
            )

    def names(self, context: Tokens) -> PageNames:
        """The names of the pages that a prefiller fills: the last token is run here."""
        model = self._node.model
        return page_hashes(context[:-1], model.layout.page_tokens, salt=model.name.encode())

    def reserve(self, request: str, context: Tokens, left: int, names: PageNames) -> Reception:
        """NoPages if there are too few now. Makes room by evicting cached pages."""
        return self._receiver.reserve(request, len(context) - 1, room_tokens=1 + left, names=names)

    async def of(self, serving: Serving) -> Reception:
        """The request's pages if it has any, otherwise new ones as soon as there are enough. Raises Stopped."""
        if serving.reception is None:
            begun = serving.timeline.now()
            self.lacking += 1
            serving.lacks_pages = True
            try:
                await serving.unless_stopped(self._reserve_again(serving))
            finally:
                self.lacking -= 1
                serving.lacks_pages = False
            serving.timeline.add("pages", begun)
        assert serving.reception is not None
        return serving.reception

    def give_back(self, serving: Serving) -> None:
        """Releases its pages, unless somebody may still write there; then quarantine handles them."""
        reception, serving.reception = serving.reception, None
        if reception is not None and reception.state in (PageState.RESERVED, PageState.IN_USE):
            reception.release()
            self._room.set()  # so that those who wait for pages need not wait until the router has heard of this one

    def let_go(self, serving: Serving) -> None:
        """Releases its pages between two attempts, while nothing is written to them."""
        if serving.reception is not None:
            self.give_back(serving)
            self.report_room()

    def report_room(self) -> None:
        """There may be more room than before, for requests here and elsewhere."""
        self._room.set()
        self._node.report_soon()

    async def _reserve_again(self, serving: Serving) -> None:
        """For a request that lost its pages: waits for its turn, for enough pages, and for a free place, since another
        request may have taken its own.
        """
        options = self._node.options
        give_up_s = serving.timeline.now() + options.page_wait_s
        async with self._turn:
            while True:
                self._room.clear()
                having = sum(other.reception is not None for other in self._servings.values())
                why = f"it serves {having} requests, which is its most"
                if having < options.requests_max:
                    try:
                        name = self._new_name(serving)
                        serving.reception = self.reserve(name, serving.context, serving.left, serving.names)
                        return
                    except NoPages as error:
                        why = error.why
                if (left_s := give_up_s - serving.timeline.now()) <= 0:
                    long = f"node {self._node.name!r} had no pages for it again within {options.page_wait_s:g} s"
                    raise Stopped("overloaded", f"{long}: {why}")
                await set_in_time(self._room, left_s)

    def _new_name(self, serving: Serving) -> str:
        """A name for its pages while quarantined ones may hold its own. Longer than any name a message can carry."""
        self._replacements += 1
        return f"{serving.request[:_NAME_SHOWN]} again {self._replacements}".ljust(m.NAME_CHARS_MAX + 1)
