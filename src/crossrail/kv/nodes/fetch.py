"""How a decoder gets a prompt's KV: from one prefiller after another, until one has sent all of it.

An attempt ends in one of these ways; only after one of them are its pages used again:
- arrived: the count is complete.
- refused: the prefiller said that it wrote nothing and will not.
- withdrawn: it confirmed that nothing can land any more.
- fenced: it is gone, or does not answer. Its access to our memory is closed, so whatever it still sends lands nowhere.
- quarantined: it cannot be fenced, because it is frozen in the middle of a copy. The pages stay out of use, the request
  loses them and needs others, and a task keeps trying to fence the prefiller.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from crossrail.control.mailbox import Mailbox, NoAnswer
from crossrail.control.wire import Unreachable
from crossrail.errors import CrossrailError, PeerLost, UsageError, WaitTimeout
from crossrail.kv import messages as m
from crossrail.kv.nodes.serving import PrefillerGone, Serving
from crossrail.kv.nodes.watching import Watch, lost_before_arrival
from crossrail.kv.options import NodeOptions
from crossrail.kv.transfer.layout import KvLayout
from crossrail.kv.transfer.receiver import KvReceiver
from crossrail.kv.transfer.reception import Reception

log = logging.getLogger("crossrail.kv")


class Fetcher:
    """Makes attempts. Threads: the event loop's.

    on_released(): called when quarantined pages have been released.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        options: NodeOptions,
        receiver: KvReceiver,
        on_released: Callable[[], None],
    ) -> None:
        self._mailbox = mailbox
        self._options = options
        self._receiver = receiver
        self._on_released = on_released

    async def attempt(self, serving: Serving, prefiller: m.NodeRef, attempt: int, left_s: float) -> None:
        """Returns when everything has arrived. Raises PrefillerGone, Stopped, or the error for what this node cannot
        ask of any prefiller, with the pages quiet or quarantined. The request must have pages.
        """
        key = (serving.request, attempt)
        reception = serving.reception
        assert reception is not None
        begun = serving.timeline.now()
        try:
            target = reception.dispatch(KvLayout.from_wire(prefiller.layout), self._writer(prefiller))
        except UsageError as mismatch:
            raise PrefillerGone(str(mismatch)) from None
        self._mailbox.wire.revive(prefiller.address)  # the router considers it alive again
        tokens = m.pack_tokens(serving.context[:-1])
        question = m.Dispatch(*key, tokens, target.to_wire(), left_s, serving.traceparent)
        kinds = (m.Dispatched, m.DispatchRefused)
        try:
            answer = await self._mailbox.ask(prefiller.address, question, kinds, self._options.answer_timeout_s)
        except CrossrailError as error:
            await self._withdraw(serving, reception, prefiller, attempt)
            if isinstance(error, NoAnswer | Unreachable):
                raise PrefillerGone(str(error)) from None
            raise
        if isinstance(answer, m.DispatchRefused):
            await reception.withdraw(_confirmed, 1.0)
            raise PrefillerGone(answer.reason, answer.busy)
        serving.timeline.add("dispatch", begun)
        if why := await self._lost_before_arrival(serving, reception, prefiller, key):
            await self._withdraw(serving, reception, prefiller, attempt)
            serving.raise_if_stopped()
            raise PrefillerGone(why)
        serving.timeline.add("transfer", begun)

    async def timeline_of(self, prefiller: m.NodeRef, request: str, attempt: int) -> list[m.Span]:
        """What the prefiller spent its time on; empty if it does not answer soon."""
        pause_s = 0.02
        for _ in range(5):
            try:
                question = m.Probe(request, attempt)
                progress = await self._mailbox.ask(
                    prefiller.address, question, m.Progress, self._options.answer_timeout_s
                )
            except (NoAnswer, Unreachable) as error:
                log.info("no timeline of %s from %s: %s", request, prefiller.node, error)
                return []
            if progress.timeline:
                return progress.timeline
            await asyncio.sleep(pause_s)
            pause_s *= 2
        return []

    async def _lost_before_arrival(
        self, serving: Serving, reception: Reception, prefiller: m.NodeRef, key: tuple[str, int]
    ) -> str:
        """Empty once everything has arrived; else why it will not, or that the request was stopped."""
        options, who = self._options, f"prefiller {prefiller.node!r}"
        watch = Watch(
            self._mailbox,
            prefiller.address,
            who,
            *key,
            options.probe_s,
            options.prefiller_timeout_s,
            model_timeout_s=options.model_timeout_s,
        )
        return await lost_before_arrival(reception.arrived(), [watch], serving.stop_wanted)

    async def _withdraw(self, serving: Serving, reception: Reception, prefiller: m.NodeRef, attempt: int) -> None:
        """Afterwards serving.reception is quiet, or None if its pages had to be quarantined."""
        try:
            await reception.withdraw(
                lambda: self._ask_to_stop(prefiller, serving.request, attempt), self._options.prefiller_timeout_s
            )
            return
        except (WaitTimeout, NoAnswer, Unreachable) as error:
            log.warning("request %s, attempt %d: %s; it is fenced off", serving.request, attempt, error)
        try:
            await self._shut_out(reception, prefiller)
        except WaitTimeout as error:
            log.warning("request %s, attempt %d: %s; its pages are quarantined", serving.request, attempt, error)
            self._mailbox.spawn(self._reclaim(reception, prefiller), "reclaiming pages")
            serving.reception = None

    async def _shut_out(self, reception: Reception, prefiller: m.NodeRef) -> None:
        """Ends everything that this incarnation of a prefiller has in flight to us. WaitTimeout: it is frozen in a
        copy.
        """
        await self._receiver.fence(self._writer(prefiller), self._options.prefiller_timeout_s)
        await reception.withdraw(_confirmed, self._options.prefiller_timeout_s)

    def _writer(self, prefiller: m.NodeRef) -> str:
        return self._mailbox.wire.identity(prefiller.address).hex()

    async def _ask_to_stop(self, prefiller: m.NodeRef, request: str, attempt: int) -> None:
        wait_s = self._options.prefiller_timeout_s
        try:
            await self._mailbox.ask(prefiller.address, m.Withdraw(request, attempt), m.Quiesced, wait_s)
        except Unreachable as error:
            if self._mailbox.wire.is_lost(prefiller.address):
                raise PeerLost(str(error)) from None
            raise

    async def _reclaim(self, reception: Reception, prefiller: m.NodeRef) -> None:
        while True:
            try:
                await self._shut_out(reception, prefiller)
                break
            except WaitTimeout as error:
                log.info("pages of %s stay quarantined: %s", reception.request, error)
        reception.release()
        self._on_released()


async def _confirmed() -> None:
    """Confirms a withdrawal of something that is known to be quiet."""
