"""A node's membership with one router: it finds the router, joins it, reports to it, and joins its successors."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

from crossrail.control.deadlines import loop_time_s, set_in_time
from crossrail.control.mailbox import NoAnswer
from crossrail.control.wire import Unreachable
from crossrail.errors import CrossrailError
from crossrail.kv import messages as m
from crossrail.kv.errors import NodeRefused

if TYPE_CHECKING:
    from crossrail.kv.nodes.node import Node
    from crossrail.kv.nodes.serving import Serving

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
                self._node.mailbox.wire.revive(address)  # a node that was cut off for long has given the address up
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
