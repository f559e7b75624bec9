"""What prefillers and decoders have in common: membership with routers, reporting load, draining and leaving."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from crossrail._closing import AsyncClosing
from crossrail._options import check_seconds
from crossrail.control.deadlines import loop_time_s, set_in_time
from crossrail.control.mailbox import Mailbox, NoAnswer
from crossrail.control.wire import Unreachable
from crossrail.errors import CrossrailError, UsageError
from crossrail.kv import messages as m
from crossrail.kv.errors import NodeRefused
from crossrail.kv.model import Cache, Model, check_model
from crossrail.kv.services.membership import refuse
from crossrail.kv.services.model_watch import ModelWatch
from crossrail.kv.services.options import NodeOptions as NodeOptions
from crossrail.kv.transfer.memory import RankMemory
from crossrail.kv.transfer.pages import PagePool, PageState

if TYPE_CHECKING:
    from crossrail.kv.services.serving import Serving

log = logging.getLogger("crossrail.kv")

_NUMBER = re.compile(r"\d+")
_GOODBYE_S = 1.0

# Finds a router: returns its present address, or raises, whatever it likes, if it cannot be found: it is called again.
FindRouter = Callable[[], Awaitable[bytes]]


class RequestsOf(NamedTuple):
    """A router's requests. running: in progress. untold: ended, not yet acknowledged. told: acknowledged not long ago.

    untold and told: in the order in which they ended.
    """

    running: list[str]
    untold: list[str]
    told: list[Serving]

    def names(self) -> list[str]:
        return [*self.running, *(serving.request for serving in self.told), *self.untold]


class RouterLink:
    """This node's membership with one router, for the life of the node, across restarts of the router.

    address: of the router; None while it is not known, or does not know us. found: its last or next address: a joining
    node is known to the router some time before it gets the answer. router: its name if known; a node may have several
    routers, and its log says which one it means.
    """

    def __init__(self, node: Node, find: FindRouter, router: str = "") -> None:
        self._node = node
        self._find = find
        self._router = f"router {router!r}" if router else "its router"
        self._had_joined = False
        self.address: bytes | None = None
        self.found: bytes | None = None
        self.joined = asyncio.Event()
        self._report_now = asyncio.Event()
        self._is_joining = False
        self._left = False
        self._trouble = ""  # why there is no router, as last logged

    def report_soon(self) -> None:
        """Something changed that the router should know before the next heartbeat."""
        self._report_now.set()

    async def run(self) -> None:
        """Joins, sends heartbeats, and joins again when needed; ends when refused, or after leave()."""
        while not self._left:
            try:
                address = self.found = await self._find()
                self._node.mailbox.wire.try_anew(address)  # a node that was cut off for long has given the address up
                await self._stay(address, await self._joined_at(address))
            except NodeRefused as refusal:
                self._node.refuse(refusal)
                return
            except (CrossrailError, OSError, asyncio.TimeoutError) as error:
                self._tell_trouble(str(error) or type(error).__name__)
            except Exception as error:  # the finder may be the user's: the node would be without a router for ever
                self._tell_trouble(f"{type(error).__name__}: {error}", error)
            self.address = None
            self.joined.clear()
            await asyncio.sleep(self._node.options.retry_s)

    def _tell_trouble(self, trouble: str, mistake: Exception | None = None) -> None:
        """Logs once per reason, ignoring numbers in it: retries come twice a second, maybe for days. A node that is
        leaving needs no router. mistake: somebody's, shown with its traceback.
        """
        reason = _NUMBER.sub("0", trouble)
        if not self._node.draining and reason != self._trouble:
            what = "has lost" if self._had_joined else "has not joined"
            words = "node %s %s %s, and keeps trying: %s"
            log.warning(words, self._node.name, what, self._router, trouble, exc_info=mistake)
            self._trouble = reason

    def _tell_joined(self, router: str) -> None:
        self._router, self._had_joined = f"router {router!r}", True
        level = logging.WARNING if self._trouble else logging.INFO
        log.log(level, "node %s has joined %s", self._node.name, self._router)
        self._trouble = ""

    async def leave(self) -> None:
        """Says goodbye if the router can be reached, and does not come back. Idempotent."""
        if self._left:
            return
        self._left = True
        self.report_soon()
        if self._is_joining:  # it may be a member already, which would be missed
            await set_in_time(self.joined, _GOODBYE_S)
        if self.address is not None:
            try:
                await self._node.mailbox.ask(self.address, m.Leave(self._node.name), m.Taken, _GOODBYE_S)
            except (Unreachable, NoAnswer) as error:
                log.info("node %s left without a word: %s", self._node.name, error)

    async def _joined_at(self, address: bytes) -> m.Joined:
        self._is_joining = True
        try:
            return await self._join(address)
        finally:
            self._is_joining = False

    async def _join(self, address: bytes) -> m.Joined:
        node, kinds = self._node, (m.Joined, m.JoinRefused)
        told = node.requests_of(self).told  # fixed here: all of these are reported again, even if they expire meanwhile
        while True:
            its = node.requests_of(self)._replace(told=told)
            ended = len(its.told) + len(its.untold)
            question = m.Join(node.record, node.load(), its.names(), next(node.joins), ended)
            answer: m.Joined | m.JoinRefused = await node.mailbox.ask(address, question, kinds, node.options.join_s)
            if isinstance(answer, m.JoinRefused):
                raise NodeRefused(f"node {node.name!r} was refused: {answer.reason}")
            if {*its.running, *its.untold} <= set(node.requests_of(self).names()):
                # Otherwise the router would believe in requests that are gone here, such as an end that was kept for
                # long. The set of running ones can only shrink until we have joined.
                break
        self.address = address
        self.joined.set()
        self._tell_joined(answer.router)
        self._node.on_joined(self, told)
        return answer

    async def _stay(self, address: bytes, terms: m.Joined) -> None:
        """Sends heartbeats until the router does not know us, or does not answer for a lease."""
        heard_s = loop_time_s()
        while True:
            await set_in_time(self._report_now, terms.heartbeat_s)
            self._report_now.clear()
            try:
                question = m.Heartbeat(self._node.name, self._node.load())
                answer = await self._node.mailbox.ask(address, question, m.HeartbeatTaken, terms.lease_s)
            except NoAnswer:
                if loop_time_s() - heard_s > terms.lease_s:
                    raise
                continue
            if not answer.member:
                raise NoAnswer("the router does not know this node any more")
            heard_s = loop_time_s()


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
