"""The decoder: receives a prompt's KV, runs the last prompt token and all later ones, and sends tokens to the router.

Life of a request here:
1. started: pages for the prompt and all that may be generated are reserved, or the router is told to look elsewhere.
2. fetching: a prefiller writes the KV (fetch.py); if it is lost, the router names another. Meanwhile the pages are
   given back: at once if the prefiller had no room, else when the router has not answered within answer_timeout_s.
   Requests that need pages again come before all new ones.
3. decoding: token by token; each goes to the router at once, and is kept until the router has acknowledged it.
4. ended: its pages and its place are released, the router is told why. A stop (client gone, deadline, the router's
   order) ends it at any point. If the model hangs, its requests end here at once and continue at other decoders, as do
   those that wait for pages; requests inside the model keep their pages until it has let go of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial

from msgspec import structs

from crossrail._latest import Latest
from crossrail.control.deadlines import loop_time_s
from crossrail.errors import CrossrailError, UsageError
from crossrail.kv import messages as m
from crossrail.kv.errors import DuplicateRequest, NoPages
from crossrail.kv.foreign import exceptions_only
from crossrail.kv.model import Tokens, generate
from crossrail.kv.nodes.decoder_pages import DecoderPages
from crossrail.kv.nodes.fetch import Fetcher
from crossrail.kv.nodes.kept_room import KeptRoom
from crossrail.kv.nodes.model_watch import CANCELLED_BY_NOBODY
from crossrail.kv.nodes.node import Node
from crossrail.kv.nodes.router_link import RequestsOf, RouterLink
from crossrail.kv.nodes.serving import PrefillerGone, Serving, Stopped
from crossrail.kv.nodes.to_router import ToRouter
from crossrail.kv.nodes.told import Told
from crossrail.kv.timeline import Timeline
from crossrail.kv.tracing import RequestSpan
from crossrail.kv.transfer.layout import KvLayout, compatible
from crossrail.kv.transfer.memory import RankMemory
from crossrail.kv.transfer.receiver import KvReceiver
from crossrail.kv.transfer.reception import Reception

log = logging.getLogger("crossrail.kv")

_ENDED_KEPT = 16384
_UNTOLD_KEPT = 4096  # ended requests whose router is gone and has not acknowledged the end: the latest are kept
# Requests whose end was acknowledged: 400 a second. A router adopts as many per decoder, plus _UNTOLD_KEPT.
_TOLD_KEPT_S, _TOLD_KEPT, _TOLD_KEPT_BYTES = 10.0, 4096, 64 << 20
# How long a request's end waits for its prefiller's timeline; a prefiller that is alive answers in milliseconds.
_TIMELINE_WAIT_S = 0.2
# For how long room is kept, on top of the time its router may wait for another decoder's answer before asking again.
_KEPT_S = 1.0
_NO_FAILURE: tuple[m.EndReason, ...] = ("stop", "length", "cancelled")


class Decoder(Node):
    """A Node that decodes."""

    role: m.Role = "decoder"
    owes = "has computed no token"

    def _set_up(self, ranks: Mapping[int, RankMemory]) -> None:
        self.receiver = KvReceiver(
            self.model.layout,
            [ranks[rank] for rank in sorted(ranks)],
            self.pool,
            tail_bytes=self.model.tail_bytes,
            # Quarantined requests keep their slots while others take their place.
            tail_slots=2 * self.options.requests_max,
        )
        self._servings: dict[str, Serving] = {}
        self.pages = DecoderPages(self, self.receiver, self._servings)
        self._fetcher = Fetcher(self.mailbox, self.options, self.receiver, self.pages.report_room)
        self._untold: dict[str, Serving] = {}  # of these, the ended ones, in the order in which they ended
        self._ended: Latest[str, int] = Latest(_ENDED_KEPT)  # the latest placement of each ended request
        self._told = Told(_TOLD_KEPT_S, _TOLD_KEPT, _TOLD_KEPT_BYTES)
        self._kept_room = KeptRoom(self.options.answer_timeout_s + _KEPT_S)
        self._to_router = ToRouter(self.mailbox, self.options, self.pages.let_go)
        self._held_by_model: set[asyncio.Task[m.End]] = set()  # requests that have ended except for a call of the model
        self.mailbox.handle(m.Start, self._on_start)
        self.mailbox.handle(m.Cancel, self._on_cancel)

    def start(self) -> None:
        super().start()
        self.mailbox.spawn(self._hand_over_when_model_hangs(), "watching the model")

    def _left_tokens(self) -> list[int]:
        return [len(serving.context) + serving.left for serving in self._active()]

    def _hangs(self) -> bool:
        return super()._hangs() or bool(self._held_by_model)

    def _active(self) -> list[Serving]:
        """Requests that have not ended. An ended one takes no place: all that is left is to report its end, which may
        take a minute if its router is gone. Nor does one that waits without pages for a router that is gone.
        """
        return [
            serving
            for serving in self._servings.values()
            if serving.end is None and (serving.reception is not None or serving.link.address is not None)
        ]

    def requests_of(self, link: RouterLink) -> RequestsOf:
        def is_its(serving: Serving) -> bool:
            # The same router may be known by two links. Requests that it does not hear of here it restarts elsewhere.
            return link.found == serving.router or serving.link is link

        its = [serving for serving in self._servings.values() if not serving.is_unwanted and is_its(serving)]
        untold = [name for name, serving in self._untold.items() if not serving.is_unwanted and is_its(serving)]
        told = [
            serving
            for serving in self._told.latest()
            if is_its(serving) and serving.request not in self._servings  # unless it was placed here again
        ]
        ended = set(untold)
        return RequestsOf([serving.request for serving in its if serving.request not in ended], untold, told)

    def needs(self, link: RouterLink) -> bool:
        return any(serving.link is link for serving in self._servings.values())

    def on_joined(self, link: RouterLink, told: list[Serving]) -> None:
        for serving in self._servings.values():
            if serving.link is link:
                serving.offer_again()
        for serving in told:
            # In case it is the same router after all, which then says that it knows the request.
            if serving.link is link:
                serving.offer_again()
                self.mailbox.spawn(self._to_router.deliver(serving), f"tokens of {serving.request}, once more")

    async def close(self) -> None:
        """Stops all requests, waits (as long as the options allow) until prefillers are quiet, and closes. Idempotent.

        Leaves the routers first, so that they have other decoders continue the requests. How the requests end here is
        reported once. Raises WaitTimeout, with everything else closed, while a prefiller is frozen in the middle of a
        copy to us.
        """
        self._to_router.closing = self.draining = True
        if self._servings:
            await self._leave()
        for serving in self._servings.values():
            serving.stop("error", f"decoder {self.name!r} is closing")
        if self._servings:
            await self.drain(2 * self.options.prefiller_timeout_s)
        await super().close()
        for working in list(self._held_by_model):
            await _cancelled(working)
        await self.receiver.shut()

    # --- what the router says ---

    async def _on_start(self, sender: bytes, start: m.Start) -> m.Message:
        serving = self._servings.get(start.request)
        # Not by its link: a router that had given us up may place it here again before we know that we are back.
        if serving is not None and serving.router == sender and serving.placement <= start.placement:
            if serving.placement == start.placement:
                return m.Started(start.request)
            serving.stop("cancelled", "its router has placed it here again")
            return m.StartRefused(start.request, f"node {self.name!r} is ending an earlier placement of it", busy=True)
        try:
            context = m.unpack_tokens(start.tokens)
            self._check(start, context)
            left = start.sampling.max_tokens - start.generated
            self.pages.check_size(context, left)
            link = next((link for link in self.links if link.address == sender), None)
            busy = self._kept_for_another(sender, start) or self._too_busy()
            if link is None:  # its answer to our Join is late, or we have left it
                busy = f"node {self.name!r} is no member of that router yet, or any more"
            if busy or link is None:
                return m.StartRefused(start.request, busy, busy=True)
            # Last, because it makes room by evicting cached pages.
            names = self.pages.names(context)
            reception = self.pages.reserve(start.request, context, left, names)
        except NoPages as error:
            # Without the request's name: the router repeats this for other requests, which need no less.
            return m.StartRefused(start.request, m.clipped(f"node {self.name!r}: {error.why}"), busy=True)
        except DuplicateRequest as error:
            return m.StartRefused(start.request, m.clipped(error), busy=False, is_duplicate=True)
        except UsageError as error:
            return m.StartRefused(start.request, m.clipped(error), busy=False)
        if self._kept_room.start(sender, start.request):
            self.pages.report_room()
        timeline = _timeline(start)
        serving = Serving(
            start.request, link, sender, start.placement, context, start.sampling, timeline, reception, names
        )
        serving.tokens += context[len(context) - start.generated :].tolist()
        serving.taken = start.generated
        self._servings[start.request] = serving
        self._count_active(len(self._servings))
        self.mailbox.spawn(self._serve(serving, start), f"request {start.request}")
        return m.Started(start.request)

    def _check(self, start: m.Start, context: Tokens) -> None:
        """UsageError for what no decoder could do, DuplicateRequest for a name that was used before."""
        if start.request in self._servings or start.placement <= self._ended.get(start.request, 0):
            raise DuplicateRequest(f"request {start.request!r} is or was under way at node {self.name!r}")
        if not len(context) or (len(context) > 1) != (start.prefiller is not None):
            raise UsageError("a prompt has at least one token, and a prefiller from two tokens on")
        if start.generated > min(start.sampling.max_tokens, len(context) - 1):
            raise UsageError(
                f"{start.generated} of {len(context)} tokens cannot be generated ones, of at most "
                f"{start.sampling.max_tokens}"
            )
        self._check_by_model(start, context)
        if start.prefiller is not None:
            compatible(self.model.layout, KvLayout.from_wire(start.prefiller.layout))

    def _check_by_model(self, start: m.Start, context: Tokens) -> None:
        try:
            with exceptions_only():
                self.model.check(context, start.sampling.max_tokens - start.generated)
        except UsageError:
            raise
        except Exception as error:  # of a user's model: the client is told, and no other decoder is asked
            log.exception("request %s: check() of model %s failed", start.request, self.model.name)
            raised = f"{type(error).__name__}: {error}"
            raise UsageError(f"check() of model {self.model.name!r} at node {self.name!r} raised {raised}") from None

    def _too_busy(self) -> str:
        if self.draining:
            return f"node {self.name!r} is draining"
        if why := self._model_watch.hangs:
            return why
        if self._held_by_model:
            return f"the model of node {self.name!r} hung, and has not let go of {len(self._held_by_model)} requests"
        if self.pages.lacking:
            return f"node {self.name!r} has requests that wait for pages"
        if (active := len(self._active())) >= self.options.requests_max:
            return f"node {self.name!r} serves {active} requests, which is its most"
        return ""

    def _kept_for_another(self, router: bytes, start: m.Start) -> str:
        """Why this request has to wait for another. If room is kept for none yet, one that has waited long becomes the
        next.
        """
        now_s = loop_time_s()
        if start.has_waited and self._kept_room.ask(router, start.request, now_s):
            self.pages.report_room()
        if self._kept_room.is_for_another(router, start.request, now_s):
            return f"node {self.name!r} is kept for a request that has waited longer"
        return ""

    async def _on_cancel(self, sender: bytes, cancel: m.Cancel) -> m.Message:
        if self._kept_room.end(sender, cancel.request):
            self.pages.report_room()
        if not cancel.placement:  # it was never placed here, so its name is still unused
            return m.Taken(wanted=False)
        serving = self._servings.get(cancel.request)
        # Names may come from clients, and another router may have a request of this name that we have refused. Accept
        # only the router that placed ours, or its successor.
        if serving is not None and sender not in (serving.router, serving.link.found):
            return m.Taken(wanted=False)
        self._remember_ended(cancel.request, cancel.placement)  # its Start may still be in flight
        if serving is None or serving.placement > cancel.placement:
            return m.Taken(wanted=False)
        serving.is_unwanted = serving.is_unwanted or sender == serving.router
        serving.stop("cancelled", cancel.reason)
        return m.Taken()

    # --- serving ---

    async def _serve(self, serving: Serving, start: m.Start) -> None:
        loop = asyncio.get_running_loop()
        about: dict[str, str | int] = {"crossrail.request": start.request, "crossrail.node": self.name}
        span = RequestSpan("crossrail.kv.decode", start.traceparent, about)
        serving.traceparent = span.traceparent
        timer = loop.call_later(start.timeout_s, serving.stop, "deadline", "its time was up")
        delivery = self.mailbox.spawn(self._to_router.deliver(serving), f"tokens of {serving.request}")
        working = asyncio.ensure_future(self._run(serving, start, loop_time_s() + start.timeout_s))
        working.add_done_callback(partial(self._on_worked, serving))  # first, before anybody who waits for it
        try:
            end = await self._end_of_work(serving, working)
        finally:
            timer.cancel()
            if not working.done():
                self._held_by_model.add(working)
                working.add_done_callback(partial(self._on_let_go, serving))
        serving.timeline.close()
        serving.finish(end)
        log.info(
            "request %s: %s at node %s, %d tokens after a context of %d, in %.3f s%s",
            start.request, end.reason, self.name, len(serving.tokens), len(serving.context), serving.timeline.now(),
            end.detail and f": {end.detail}",
        )  # fmt: skip
        self._untold[serving.request] = serving
        self.pages.report_room()
        self._let_go_of_untold()
        span.end("" if end.reason in _NO_FAILURE else end.detail or end.reason)
        await asyncio.wait([delivery])
        if serving.is_told:
            self._told.add(serving)
        del self._servings[serving.request], self._untold[serving.request]
        self._remember_ended(serving.request, serving.placement)
        self._count_active(len(self._servings))

    def _on_worked(self, serving: Serving, working: asyncio.Task[m.End]) -> None:
        self.pages.give_back(serving)
        if not working.cancelled():
            working.exception()  # mark as retrieved: nobody looks at a cancelled task's exception

    async def _end_of_work(self, serving: Serving, working: asyncio.Task[m.End]) -> m.End:
        """How the work ended, or that the model hangs. If cancelled, cancels the work and waits for its end."""
        handing_over = asyncio.ensure_future(serving.handed_over.wait())
        try:
            await asyncio.wait([working, handing_over], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                serving.raise_if_stopped()
            if working.cancelled():
                raise RuntimeError(CANCELLED_BY_NOBODY)
            with exceptions_only():
                return working.result()
        except Stopped as stopped:
            return m.End(stopped.reason, m.clipped(stopped), serving.timeline.spans)
        except CrossrailError as error:
            return m.End("error", m.clipped(error), serving.timeline.spans)
        except asyncio.CancelledError:
            await _cancelled(working)
            raise
        except Exception as error:
            log.exception("request %s failed", serving.request)
            return m.End("error", m.clipped(f"{type(error).__name__}: {error}"), serving.timeline.spans)
        finally:
            handing_over.cancel()

    async def _hand_over_when_model_hangs(self) -> None:
        while True:
            why = await self._model_watch.wait()
            there = list(self._servings.values())
            handed_over = sum(serving.hand_over(why) for serving in there if serving.is_decoding)
            # Those that the model computes keep their pages.
            handed_over += sum(serving.go_elsewhere(why) for serving in there if serving.lacks_pages)
            if handed_over:
                log.error("%s; requests that are to continue elsewhere: %d", why, handed_over)

    def _on_let_go(self, serving: Serving, working: asyncio.Task[m.End]) -> None:
        """The model no longer touches its pages. Its exception is reported nowhere else."""
        self._held_by_model.discard(working)
        error = None if working.cancelled() else working.exception()
        if error is not None and not isinstance(error, Stopped):
            trace = None if isinstance(error, CrossrailError) else error
            log.error("request %s, which was handed over, failed: %s", serving.request, error, exc_info=trace)
        if not self._held_by_model:
            log.warning("the model of node %r has let go of all requests that were handed over", self.name)
        self.pages.report_room()

    def _let_go_of_untold(self) -> None:
        if (over := len(self._untold) - _UNTOLD_KEPT) > 0:
            nowhere = [serving for serving in self._untold.values() if serving.link.address is None]
            for serving in nowhere[:over]:
                serving.is_unwanted = True
                serving.changed.set()

    async def _run(self, serving: Serving, start: m.Start, deadline_at_s: float) -> m.End:
        if serving.tokens and (serving.left == 0 or self._ends_it(serving)):
            return self._end_of(serving)  # only the report of its end was lost with the previous decoder
        reception = serving.reception
        assert reception is not None
        tail = None
        told: asyncio.Task[None] | None = None
        if start.prefiller is not None:
            reception, fetched = await self._fetch(serving, reception, start.prefiller, deadline_at_s)
            tail = bytes(reception.tail()) if self.model.tail_bytes else b""
            if fetched is not None:
                reception.lease.publish(serving.names)
                told = self.mailbox.spawn(self._add_timeline(serving, *fetched), "a prefiller's timeline")
        else:
            reception.lease.fill()
            reception.lease.use()
        begun = serving.timeline.now()
        pages = reception.lease.pages
        sampling = structs.replace(serving.sampling, max_tokens=serving.left)
        is_first = True
        with self._model_watch.computing(), serving.decoding():
            async for token in generate(self.model, self.cache, serving.context, pages, sampling, tail):
                self._model_watch.heard()
                serving.raise_if_stopped()
                if is_first:
                    serving.timeline.add("first token", begun)
                    is_first = False
                serving.add(token)
        serving.timeline.add("decode", begun)
        if told is not None:
            # A timeline that comes later is included if the end is reported again.
            await asyncio.wait([told], timeout=_TIMELINE_WAIT_S)
        return self._end_of(serving)

    def _ends_it(self, serving: Serving) -> bool:
        return serving.tokens[-1] in self.model.end_tokens and not serving.sampling.ignore_end

    def _end_of(self, serving: Serving) -> m.End:
        return m.End("stop" if self._ends_it(serving) else "length", "", serving.timeline.spans)

    async def _add_timeline(self, serving: Serving, prefiller: m.NodeRef, attempt: int) -> None:
        dispatched_s = next((span.begin_s for span in reversed(serving.timeline.spans) if span.name == "dispatch"), 0.0)
        spans = await self._fetcher.timeline_of(prefiller, serving.request, attempt)
        serving.timeline.add_all("prefiller: ", spans, dispatched_s)

    async def _fetch(
        self, serving: Serving, reception: Reception, prefiller: m.NodeRef, deadline_at_s: float
    ) -> tuple[Reception, tuple[m.NodeRef, int] | None]:
        """Where the prompt's KV is, and which prefiller sent it in which attempt. None: all of it was cached here."""
        attempt = serving.placement
        while True:
            serving.raise_if_stopped()
            if reception.needs_nothing:
                await reception.arrived()
                return reception, None
            begun = serving.timeline.now()
            try:
                await self._fetcher.attempt(serving, prefiller, attempt, max(deadline_at_s - loop_time_s(), 0.0))
                return reception, (prefiller, attempt)
            except PrefillerGone as gone:
                if gone.busy:
                    self.pages.let_go(serving)
                serving.timeline.add(f"lost attempt {attempt}", begun)
                who = (prefiller.node, prefiller.address)
                lost = m.PrefillerLost(serving.request, attempt, *who, m.clipped(gone), serving.placement, gone.busy)
            begun = serving.timeline.now()
            prefiller, attempt = await self._to_router.another_prefiller(serving, lost, deadline_at_s)
            serving.timeline.add(f"another prefiller {attempt}", begun)
            reception = await self.pages.of(serving)

    def _remember_ended(self, request: str, placement: int) -> None:
        self._ended[request] = max(placement, self._ended.get(request, 0))


def _timeline(start: m.Start) -> Timeline:
    """The timeline of a request that is taken now. It begins when the request reached its router."""
    timeline = Timeline(asyncio.get_running_loop().time, start.age_s)
    if (earlier_s := start.age_s - start.waited_s) > 0:
        timeline.add("earlier decoders", 0.0, earlier_s)
    timeline.add("queue", max(earlier_s, 0.0))
    return timeline


async def _cancelled(work: asyncio.Task[m.End]) -> None:
    """Waits for the end of cancelled work, however often we are cancelled meanwhile; raises the cancellation
    afterwards.
    """
    cancelled: asyncio.CancelledError | None = None
    work.cancel()
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
            work.cancel()  # again: its code may have swallowed the first
    if cancelled is not None:
        raise cancelled
