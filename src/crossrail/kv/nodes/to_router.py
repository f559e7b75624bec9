"""A decoder's reports and questions to a request's router; they survive restarts of the router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from crossrail.control.deadlines import first_of, loop_time_s
from crossrail.control.mailbox import Mailbox, NoAnswer
from crossrail.control.wire import Unreachable
from crossrail.kv import messages as m
from crossrail.kv.nodes.outbox import Outbox
from crossrail.kv.nodes.serving import Serving, Stopped
from crossrail.kv.options import NodeOptions

log = logging.getLogger("crossrail.kv")

# How long ended requests are kept for a router that is away, and how long requests that need it to continue wait for
# it.
_ROUTER_GONE_S = 60.0
_TOKENS_AT_ONCE = 4096


class ToRouter:
    """Threads: the event loop's.

    let_go_of_pages: called for a request that waits long for a prefiller. closing: the decoder closes: offer each end
    once.
    """

    def __init__(self, mailbox: Mailbox, options: NodeOptions, let_go_of_pages: Callable[[Serving], None]) -> None:
        self._mailbox = mailbox
        self._options = options
        self._let_go_of_pages = let_go_of_pages
        self._outbox = Outbox(mailbox, options.answer_timeout_s)
        self.closing = False

    async def deliver(self, serving: Serving) -> None:
        """Sends tokens as they come, until the end was acknowledged, or the router stays away after the end.

        If nobody waits for the end, or the decoder is closing, the end is offered once. Several tasks may deliver the
        same request, for example if its router is lost and found repeatedly: the end wakes them all.
        """
        try:
            await self._deliver(serving)
        finally:
            serving.changed.set()

    async def _deliver(self, serving: Serving) -> None:
        kept_s: float | None = None  # since when the end is unacknowledged
        while not serving.end_taken:
            await serving.changed.wait()
            serving.changed.clear()
            if not serving.has_news:
                continue
            if await self._offer(serving):
                kept_s = None
                continue
            if serving.end is not None:
                if self.closing or serving.is_unwanted:
                    return
                kept_s = loop_time_s() if kept_s is None else kept_s
                if loop_time_s() - kept_s > _ROUTER_GONE_S:
                    log.warning("request %s ended (%s) and no router took it", serving.request, serving.end.reason)
                    return
            await asyncio.sleep(self._options.retry_s)
            serving.changed.set()

    async def _offer(self, serving: Serving) -> bool:
        """Sends one message with everything not yet acknowledged. False if it was not acknowledged."""
        address, first = serving.link.address, serving.taken
        if address is None:
            return False
        tokens = serving.tokens[first : first + _TOKENS_AT_ONCE]
        is_last = first + len(tokens) == len(serving.tokens)
        end = serving.end if is_last else None
        elsewhere = end is not None and serving.goes_elsewhere
        message = m.Tokens(serving.request, first, m.pack_few(tokens), end, serving.placement, elsewhere)
        wanted = await self._outbox.offer(address, message)
        if wanted is None:
            return False
        if not wanted:
            serving.is_unwanted = True
            serving.stop("cancelled", "its router does not know it, or does not want it any more")
            serving.end_taken = serving.end is not None
            return True
        # Otherwise everything is offered again, to another router.
        if serving.link.address == address and serving.taken == first:
            serving.taken = first + len(tokens)
            serving.end_taken = end is not None
        if serving.taken < len(serving.tokens) or (serving.end is not None and not serving.end_taken):
            serving.changed.set()
        return True

    async def another_prefiller(
        self, serving: Serving, lost: m.PrefillerLost, deadline_at_s: float
    ) -> tuple[m.NodeRef, int]:
        """The router's next choice of prefiller, and that attempt's number. Raises Stopped.

        A request that waits long for it releases its pages meanwhile.
        """
        serving.raise_if_stopped()
        timer = asyncio.get_running_loop().call_later(self._options.answer_timeout_s, self._let_go_of_pages, serving)
        try:
            answer = await serving.unless_stopped(self._ask_for_another(serving, lost, deadline_at_s))
        finally:
            timer.cancel()
        if answer.prefiller is None:
            raise Stopped(answer.ends, answer.reason)
        return answer.prefiller, answer.attempt

    async def _ask_for_another(self, serving: Serving, lost: m.PrefillerLost, deadline_at_s: float) -> m.Reassigned:
        """Asks whichever router there is. How long it looks for a prefiller is up to the router, and one that is silent
        may merely be frozen: wait for it until it has a successor, or is gone for good.
        """
        address = await self._next_router(serving, None, lost)
        while True:
            ask = self._mailbox.ask(address, lost, m.Reassigned, max(deadline_at_s - loop_time_s(), 0.0))
            asking = asyncio.ensure_future(ask)
            changing = asyncio.ensure_future(self._next_router(serving, address, lost))
            try:
                if asking in await first_of([asking, changing]):
                    return asking.result()
                address = changing.result()
            except (NoAnswer, Unreachable) as error:
                log.warning("request %s lost its prefiller, and its router: %s", serving.request, error)
                await asyncio.sleep(self._options.retry_s)
                address = await self._next_router(serving, None, lost)

    async def _next_router(self, serving: Serving, before: bytes | None, lost: m.PrefillerLost) -> bytes:
        """The router's address, once the previous one is gone and a router is back. Stopped if there is none for long:
        by then no client waits any more.
        """
        there_s = loop_time_s()
        while (address := serving.link.address) in (None, before):
            if address is not None:
                there_s = loop_time_s()
            elif loop_time_s() - there_s > _ROUTER_GONE_S:
                long = f"no router for {_ROUTER_GONE_S:g} s after its prefiller was lost"
                raise Stopped("error", f"{long}: {lost.reason}")
            await asyncio.sleep(self._options.retry_s)
        assert address is not None
        return address
