"""What prefillers and decoders have in common: membership with routers, reporting load, draining and leaving."""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence

from crossrail._closing import AsyncClosing
from crossrail._options import check_seconds
from crossrail.control.deadlines import set_in_time
from crossrail.control.mailbox import Mailbox
from crossrail.errors import CrossrailError, UsageError
from crossrail.kv import messages as m
from crossrail.kv.model import Cache, Model, check_model
from crossrail.kv.nodes.model_watch import ModelWatch
from crossrail.kv.nodes.router_link import FindRouter, RequestsOf, RouterLink
from crossrail.kv.nodes.serving import Serving
from crossrail.kv.options import NodeOptions as NodeOptions
from crossrail.kv.refusal import refuse
from crossrail.kv.transfer.memory import RankMemory
from crossrail.kv.transfer.pages import PagePool, PageState

log = logging.getLogger("crossrail.kv")


class Node(AsyncClosing):
    """Base class of prefillers and decoders. Threads: the event loop's.

    Lifecycle: 1. made. 2. start(). 3. drain(): what is here is finished, nothing new accepted. 4. close(). ranks:
    memory of each rank of the model's layout, by rank. find_routers: one for each router to serve. refused: raises what
    a router, or whoever keeps the members, has against the node. Owner of the mailbox, the memory and the engine:
    whoever made them; they must stay open until after close().
    """

    role: m.Role
    owes: str  # what its model has failed to do if it hangs, in words

    def __init__(
        self,
        name: str,
        mailbox: Mailbox,
        model: Model,
        ranks: Mapping[int, RankMemory],
        find_routers: Sequence[FindRouter],
        options: NodeOptions | None = None,
    ) -> None:
        m.check_name(name)
        check_model(model)
        if sorted(ranks) != list(range(model.layout.tp)):
            raise UsageError(f"ranks {sorted(ranks)} are given, a node has all of its layout's {model.layout.tp}")
        self.name = name
        self.mailbox = mailbox
        self.model = model
        self.options = options or NodeOptions()
        self.pool = PagePool(model.layout.pages, model.layout.page_tokens)
        self.cache: Cache = [
            [ranks[rank].layer(layer) for layer in range(model.layout.layers)] for rank in range(model.layout.tp)
        ]
        self.record = m.NodeRecord(name, mailbox.address, model.layout.to_wire(), role=self.role, model=model.name)
        self.draining = False
        self.joins = itertools.count(1)
        self.refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.links = [RouterLink(self, find) for find in find_routers]
        self._link_tasks: dict[RouterLink, asyncio.Task[None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._model_watch = ModelWatch(name, self.options.model_timeout_s, self.owes)
        self._set_up(ranks)

    def __repr__(self) -> str:
        state = "draining" if self.draining else f"of {sum(link.joined.is_set() for link in self.links)} routers"
        return f"<{type(self).__name__} {self.name!r} with {self.model.name}, {state}>"

    @abstractmethod
    def _set_up(self, ranks: Mapping[int, RankMemory]) -> None:
        """What the constructor does for this kind of node, at its end."""

    @abstractmethod
    def _left_tokens(self) -> list[int]:
        """Of each request in progress, in tokens: how much work it is."""

    def _hangs(self) -> bool:
        """Whether its model, for the time being, can take nothing more."""
        return bool(self._model_watch.hangs)

    def load(self) -> m.Load:
        """The load to report to routers."""
        left = self._left_tokens()
        return m.Load(
            requests=len(left),
            queued_tokens=sum(left),
            pages_free=self.pool.available,
            pages_total=self.pool.pages,
            pages_quarantined=self.pool.report().pages[PageState.QUARANTINED],
            draining=self.draining,
            hangs=self._hangs(),
        )

    def requests_of(self, link: RouterLink) -> RequestsOf:
        """The requests that came from this router."""
        return RequestsOf([], [], [])

    def needs(self, link: RouterLink) -> bool:
        """Whether there is something to report to this router, should it come back."""
        return False

    def on_joined(self, link: RouterLink, told: list[Serving]) -> None:  # not every node has something to do then
        """The router knows us, for the first time or again. told: those of requests_of() that it has heard of."""

    def start(self) -> None:
        """Begins to receive messages, and joins the routers."""
        self.mailbox.start()
        for link in self.links:
            self._run_link(link)

    def add_link(self, find: FindRouter, router: str = "") -> RouterLink:
        """Joins one more router, with this name if it is known. After start()."""
        self.links.append(RouterLink(self, find, router))
        self._run_link(self.links[-1])
        return self.links[-1]

    def drop_link(self, link: RouterLink) -> bool:
        """Stops looking for a router of add_link(). False: we are its member, or a request here waits for it."""
        if link.joined.is_set() or self.needs(link):
            return False
        self.links.remove(link)
        self._link_tasks.pop(link).cancel()
        return True

    def refuse(self, why: CrossrailError) -> None:
        """The node is rejected for good: whoever awaits `refused` gets the first such reason."""
        refuse(self.refused, why)

    async def drain(self, timeout_s: float) -> bool:
        """Accepts nothing new, waits until everything here has ended, and leaves. False if that took too long."""
        check_seconds(timeout_s=timeout_s)
        self.draining = True
        self.report_soon()
        ended = await set_in_time(self._idle, timeout_s)
        await self._leave()
        return ended

    async def close(self) -> None:
        """Ends what is in progress. Idempotent."""
        await self.mailbox.close()

    async def _leave(self) -> None:
        await asyncio.gather(*(link.leave() for link in self.links))

    def report_soon(self) -> None:
        """Reports to all routers soon."""
        for link in self.links:
            link.report_soon()

    def _run_link(self, link: RouterLink) -> None:
        self._link_tasks[link] = self.mailbox.spawn(link.run(), f"membership of {self.name}")

    def _count_active(self, active: int) -> None:
        """Call this whenever the number of requests in progress changes."""
        if active:
            self._idle.clear()
        else:
            self._idle.set()
