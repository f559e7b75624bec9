"""The decoder: has a prompt's KV sent here, runs the last prompt token and all that follow, and tells the router.

Life of a request here:
1. started: pages for the prompt and all that may be generated are reserved, or the router is told to look elsewhere.
2. fetching: a prefiller writes the KV (fetch.py); if it is lost, the router names another. Meanwhile the pages are
   given back: at once where the prefiller had no room, else once the router has said nothing for ask_s, whatever the
   reason. Who has to have pages again comes before all that is new.
3. decoding: token by token; each goes to the router at once, and is kept until the router has taken it.
4. ended: pages and its place are given back, the router is told why. A stop (client gone, deadline, router's word)
   ends it at any point.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence

from msgspec import structs

from crossrail.control.deadlines import set_in_time
from crossrail.errors import CrossrailError, UsageError
from crossrail.kv import messages as m
from crossrail.kv.errors import DuplicateRequest, NoPages
from crossrail.kv.fetch import Fetcher
from crossrail.kv.kept_room import KeptRoom
from crossrail.kv.layout import KvLayout, compatible
from crossrail.kv.mailbox import Mailbox, NoAnswer
from crossrail.kv.memory import RankMemory
from crossrail.kv.model import Model, Tokens, generate
from crossrail.kv.node import FindRouter, Node, NodeOptions, RouterLink
from crossrail.kv.pages import PageState
from crossrail.kv.prefix import page_hashes
from crossrail.kv.receiver import KvReceiver
from crossrail.kv.reception import Reception
from crossrail.kv.serving import PrefillerGone, Serving, Stopped
from crossrail.kv.timeline import Timeline
from crossrail.kv.tracing import RequestSpan
from crossrail.kv.wire import Unreachable

log = logging.getLogger("crossrail.kv")

_ENDED_KEPT = 16384
# How long what has ended is kept for a router that is not there, and what needs it to go on waits for it.
_ROUTER_GONE_S = 60.0
_UNTOLD_KEPT = 4096  # of what has ended and its router, which is gone, has not taken: what has ended last
_TOLD_KEPT = 64  # of requests whose end was taken, the latest: their router may die before it has told its client
_TOLD_KEPT_S = 10.0
_TOKENS_AT_ONCE = 4096
# Of room that is kept, beside the time that its router may wait for another decoder's answer before it asks again.
_KEPT_S = 1.0
_NAME_SHOWN = 28  # characters of four bytes at most, so that 129 characters take no more than 256 bytes


class Decoder(Node):
    """A Node that decodes."""

    role: m.Role = "decoder"

    def __init__(
        self,
        name: str,
        mailbox: Mailbox,
        model: Model,
        ranks: Mapping[int, RankMemory],
        find_routers: Sequence[FindRouter],
        options: NodeOptions | None = None,
    ) -> None:
        super().__init__(name, mailbox, model, ranks, find_routers, options)
        self.receiver = KvReceiver(
            model.layout,
            [ranks[rank] for rank in sorted(ranks)],
            self.pool,
            tail_bytes=model.tail_bytes,
            # Quarantined requests keep theirs while others take their place.
            tail_slots=2 * self.options.requests_max,
        )
        self._fetcher = Fetcher(mailbox, self.options, self.receiver, self._report_room)
        self._servings: dict[str, Serving] = {}
        self._untold: dict[str, Serving] = {}  # of those, what has ended, in this order
        self._ended: OrderedDict[str, int] = OrderedDict()  # by request, the latest placement
        self._told: deque[Serving] = deque(maxlen=_TOLD_KEPT)
        self._replacements = 0
        self._lacking = 0  # requests that need pages again
        self._turn = asyncio.Lock()  # of those, first come, first served
        self._room = asyncio.Event()  # set when pages came back
        self._kept_room = KeptRoom(self.options.ask_s + _KEPT_S)
        self._closing = False
        mailbox.handle(m.Start, self._on_start)
        mailbox.handle(m.Cancel, self._on_cancel)

    def load(self) -> m.Load:
        active = self._active()
        return m.Load(
            requests=len(active),
            queued_tokens=sum(len(serving.context) + serving.left for serving in active),
            pages_free=self.pool.available,
            pages_total=self.pool.pages,
            pages_quarantined=self.pool.report().pages[PageState.QUARANTINED],
            draining=self.draining,
        )

    def _active(self) -> list[Serving]:
        """What has not ended. Of the others only their end is still to be told, which may take a minute if their router
        is gone, and takes no place. Nor does what waits without pages for a router that is gone.
        """
        return [
            serving
            for serving in self._servings.values()
            if serving.end is None and (serving.reception is not None or serving.link.address is not None)
        ]

    def running(self, link: RouterLink) -> list[str]:
        wanted = [serving for serving in self._servings.values() if not serving.is_unwanted]
        # Of its router, too, if that is known by two links: what it does not hear of here is begun anew.
        its = (
            serving for serving in [*wanted, *self._just_told()] if link.found == serving.router or serving.link is link
        )
        return [serving.request for serving in its]

    def needs(self, link: RouterLink) -> bool:
        return any(serving.link is link for serving in self._servings.values())

    def on_joined(self, link: RouterLink) -> None:
        for serving in self._servings.values():
            if serving.link is link:
                serving.offer_again()
        for serving in self._just_told():
            if serving.link is link:  # should it be the same router, it says that it knows
                serving.offer_again()
                self.mailbox.spawn(self._deliver(serving), f"tokens of {serving.request}, once more")

    def _just_told(self) -> list[Serving]:
        recent_s = asyncio.get_running_loop().time() - _TOLD_KEPT_S
        return [serving for serving in self._told if serving.ended_s > recent_s]

    async def close(self) -> None:
        """Stops requests, waits for prefillers to be quiet as long as the options say, and ends. Idempotent.

        Leaves the routers first, so that they have others go on with the requests. What these end with here is offered
        once.
        """
        self._closing = self.draining = True
        if self._servings:
            await self._leave()
        for serving in self._servings.values():
            serving.stop("error", f"decoder {self.name!r} is closing")
        if self._servings:
            await self.drain(2 * self.options.silent_s)
        await super().close()
        self.receiver.close()

    # --- what the router says ---

    async def _on_start(self, sender: bytes, start: m.Start) -> m.Message:
        serving = self._servings.get(start.request)
        # Not by its link: a router that had given us up may place it here again before we know that we are back.
        if serving is not None and serving.router == sender and serving.placement <= start.placement:
            if serving.placement == start.placement:
                return m.Started(start.request)
            serving.stop("cancelled", "its router has placed it anew")
            return m.StartRefused(start.request, f"node {self.name!r} is ending an earlier placement of it", busy=True)
        try:
            context = m.unpack_tokens(start.tokens)
            self._check(start, context)
            left = start.sampling.max_tokens - start.generated
            self._check_size(context, left)
            link = next((link for link in self.links if link.address == sender), None)
            busy = self._kept_for_another(sender, start) or self._too_busy()
            if link is None:  # its answer to our Join is late, or we left it
                busy = f"node {self.name!r} is no member of that router yet, or any more"
            if busy or link is None:
                return m.StartRefused(start.request, busy, busy=True)
            # Last: room is made for it by giving up pages whose content is known.
            reception = self._reserve(start.request, context, left)
        except NoPages as error:
            # Without its name: the router says so to others as well, which need no less.
            return m.StartRefused(start.request, m.clipped(f"node {self.name!r}: {error.why}"), busy=True)
        except DuplicateRequest as error:
            return m.StartRefused(start.request, m.clipped(error), busy=False, is_duplicate=True)
        except UsageError as error:
            return m.StartRefused(start.request, m.clipped(error), busy=False)
        if self._kept_room.start(sender, start.request):
            self._report_room()
        timeline = Timeline(asyncio.get_running_loop().time)
        serving = Serving(start.request, link, sender, start.placement, context, start.sampling, timeline, reception)
        serving.tokens += context[len(context) - start.generated :].tolist()
        serving.taken = start.generated
        self._servings[start.request] = serving
        self._count_active(len(self._servings))
        self.mailbox.spawn(self._serve(serving, start), f"request {start.request}")
        return m.Started(start.request)

    def _check(self, start: m.Start, context: Tokens) -> None:
        """UsageError for what no decoder could do, DuplicateRequest for a name that was used."""
        if start.request in self._servings or start.placement <= self._ended.get(start.request, 0):
            raise DuplicateRequest(f"request {start.request!r} is or was under way at node {self.name!r}")
        if not len(context) or (len(context) > 1) != (start.prefiller is not None):
            raise UsageError("a prompt has at least one token, and a prefiller from two tokens on")
        if start.generated > min(start.sampling.max_tokens, len(context) - 1):
            raise UsageError(
                f"{start.generated} of {len(context)} tokens cannot be generated ones, of at most "
                f"{start.sampling.max_tokens}"
            )
        self.model.check(context, start.sampling.max_tokens - start.generated)
        if start.prefiller is not None:
            compatible(self.model.layout, KvLayout.from_wire(start.prefiller.layout))

    def _too_busy(self) -> str:
        if self.draining:
            return f"node {self.name!r} is draining"
        if self._lacking:
            return f"node {self.name!r} has requests that wait for pages"
        if (active := len(self._active())) >= self.options.requests_max:
            return f"node {self.name!r} serves {active} requests, which is its most"
        return ""

    def _kept_for_another(self, router: bytes, start: m.Start) -> str:
        """Why this one has to wait. One that has waited long is the next, if none is."""
        now_s = asyncio.get_running_loop().time()
        if start.has_waited and self._kept_room.ask(router, start.request, now_s):
            self._report_room()
        if self._kept_room.is_for_another(router, start.request, now_s):
            return f"node {self.name!r} is kept for a request that has waited longer"
        return ""

    async def _on_cancel(self, sender: bytes, cancel: m.Cancel) -> m.Message:
        if self._kept_room.end(sender, cancel.request):
            self._report_room()
        if not cancel.placement:  # its name is not used up: it never was here
            return m.Taken(wanted=False)
        serving = self._servings.get(cancel.request)
        # Names may come from clients, and another router may have one of this name that we have refused. Who has placed
        # ours is heard, and who is in its stead.
        if serving is not None and sender not in (serving.router, serving.link.found):
            return m.Taken(wanted=False)
        self._remember_ended(cancel.request, cancel.placement)  # its Start may still be on the way
        if serving is None or serving.placement > cancel.placement:
            return m.Taken(wanted=False)
        serving.is_unwanted = serving.is_unwanted or sender == serving.router
        serving.stop("cancelled", cancel.reason)
        return m.Taken()

    # --- pages ---

    def _check_size(self, context: Tokens, left: int) -> None:
        """UsageError when there never will be enough pages."""
        wanted = self.model.layout.pages_of(len(context) + left)
        if wanted > self.pool.pages:
            raise UsageError(
                f"{len(context)} + {left} tokens take {wanted} pages, node {self.name!r} has {self.pool.pages}"
            )

    def _reserve(self, request: str, context: Tokens, left: int) -> Reception:
        """NoPages when there are too few now."""
        return self.receiver.reserve(request, len(context) - 1, room_tokens=1 + left, names=self._names(context))

    def _names(self, context: Tokens) -> list[bytes]:
        """Of the pages that a prefiller fills: the last token is run here."""
        return page_hashes(context[:-1], self.model.layout.page_tokens, salt=self.model.name.encode())

    async def _pages_of(self, serving: Serving) -> Reception:
        """Those that it has, or else others as soon as there are any."""
        reception = serving.reception
        if reception is None:
            begun = serving.timeline.now()
            self._lacking += 1
            try:
                await serving.unless_stopped(self._reserve_again(serving))
            finally:
                self._lacking -= 1
            serving.timeline.add("pages", begun)
            reception = serving.reception
        assert reception is not None
        return reception

    async def _reserve_again(self, serving: Serving) -> None:
        """For one that has no pages any more: in its turn, and as soon as there are enough, and a place: another may
        have its own.
        """
        give_up_s = serving.timeline.now() + self.options.pages_s
        async with self._turn:
            while True:
                self._room.clear()
                having = sum(other.reception is not None for other in self._servings.values())
                why = f"it serves {having} requests, which is its most"
                if having < self.options.requests_max:
                    try:
                        serving.reception = self._reserve(self._new_name(serving), serving.context, serving.left)
                        return
                    except NoPages as error:
                        why = error.why
                if (left_s := give_up_s - serving.timeline.now()) <= 0:
                    long = f"node {self.name!r} had no pages for it again within {self.options.pages_s:g} s"
                    raise Stopped("overloaded", f"{long}: {why}")
                await set_in_time(self._room, left_s)

    def _new_name(self, serving: Serving) -> str:
        """For pages of it while quarantined ones may have its own. Longer than any name that a message can have."""
        self._replacements += 1
        return f"{serving.request[:_NAME_SHOWN]} again {self._replacements}".ljust(m.NAME_CHARS_MAX + 1)

    def _give_back(self, serving: Serving) -> None:
        """Its pages, unless somebody may still write there, who is seen to elsewhere."""
        reception, serving.reception = serving.reception, None
        if reception is not None and reception.state in (PageState.RESERVED, PageState.IN_USE):
            reception.release()
            self._room.set()  # who waits for pages does not wait until the router has heard of it, too

    def _report_room(self) -> None:
        self._room.set()
        for link in self.links:
            link.report_soon()

    # --- serving ---

    async def _serve(self, serving: Serving, start: m.Start) -> None:
        loop = asyncio.get_running_loop()
        about: dict[str, str | int] = {"crossrail.request": start.request, "crossrail.node": self.name}
        span = RequestSpan("crossrail.kv.decode", start.traceparent, about)
        serving.traceparent = span.traceparent
        timer = loop.call_later(start.deadline_s, serving.stop, "deadline", "its time was up")
        delivery = self.mailbox.spawn(self._deliver(serving), f"tokens of {serving.request}")
        try:
            end = await self._run(serving, start, loop.time() + start.deadline_s)
        except Stopped as stopped:
            end = m.End(stopped.reason, m.clipped(stopped), serving.timeline.spans)
        except CrossrailError as error:
            end = m.End("error", m.clipped(error), serving.timeline.spans)
        except Exception as error:
            log.exception("request %s failed", serving.request)
            end = m.End("error", m.clipped(f"{type(error).__name__}: {error}"), serving.timeline.spans)
        finally:
            timer.cancel()
            self._give_back(serving)
        serving.finish(end)
        self._untold[serving.request] = serving
        self._report_room()
        self._let_go_of_untold()
        span.end(end.detail or end.reason if end.reason in ("error", "overloaded", "deadline") else "")
        await asyncio.wait([delivery])
        if serving.is_told:
            serving.ended_s = loop.time()
            self._told.append(serving)
        del self._servings[serving.request], self._untold[serving.request]
        self._remember_ended(serving.request, serving.placement)
        self._count_active(len(self._servings))

    def _let_go_of_untold(self) -> None:
        if (over := len(self._untold) - _UNTOLD_KEPT) > 0:
            nowhere = [serving for serving in self._untold.values() if serving.link.address is None]
            for serving in nowhere[:over]:
                serving.is_unwanted = True
                serving.changed.set()

    async def _run(self, serving: Serving, start: m.Start, deadline_s: float) -> m.End:
        if serving.tokens and (serving.left == 0 or self._ends_it(serving)):
            return self._end_of(serving)  # the decoder before had only not told the end
        reception = serving.reception
        assert reception is not None
        tail = None
        told: asyncio.Task[None] | None = None
        if start.prefiller is not None:
            reception, fetched = await self._fetch(serving, reception, start.prefiller, deadline_s)
            tail = bytes(reception.tail()) if self.model.tail_bytes else b""
            if fetched is not None:
                reception.lease.publish(self._names(serving.context))
                told = self.mailbox.spawn(self._add_timeline(serving, *fetched), "a prefiller's timeline")
        else:
            reception.lease.fill()
            reception.lease.use()
        begun = serving.timeline.now()
        pages = reception.lease.pages
        sampling = structs.replace(serving.sampling, max_tokens=serving.left)
        is_first = True
        async for token in generate(self.model, self.cache, serving.context, pages, sampling, tail):
            serving.raise_if_stopped()
            if is_first:
                serving.timeline.add("first token", begun)
                is_first = False
            serving.add(token)
        serving.timeline.add("decode", begun)
        if told is not None:
            await asyncio.wait([told], timeout=self.options.ask_s)
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
        self, serving: Serving, reception: Reception, prefiller: m.NodeRef, deadline_s: float
    ) -> tuple[Reception, tuple[m.NodeRef, int] | None]:
        """Where the prompt's KV is, and who has sent it at last, at which attempt. None: all of it was known here."""
        clock = asyncio.get_running_loop().time
        attempt = serving.placement
        while True:
            serving.raise_if_stopped()
            if reception.needs_nothing:
                await reception.arrived()
                return reception, None
            begun = serving.timeline.now()
            try:
                await self._fetcher.attempt(serving, prefiller, attempt, max(deadline_s - clock(), 0.0))
                return reception, (prefiller, attempt)
            except PrefillerGone as gone:
                if gone.busy:
                    self._let_go_of_pages(serving)
                serving.timeline.add(f"lost attempt {attempt}", begun)
                who = (prefiller.node, prefiller.address)
                lost = m.PrefillerLost(serving.request, attempt, *who, m.clipped(gone), serving.placement, gone.busy)
            begun = serving.timeline.now()
            prefiller, attempt = await self._reassigned(serving, lost, deadline_s)
            serving.timeline.add(f"another prefiller {attempt}", begun)
            reception = await self._pages_of(serving)

    async def _reassigned(self, serving: Serving, lost: m.PrefillerLost, deadline_s: float) -> tuple[m.NodeRef, int]:
        """The router's next choice. Whoever waits long for it has no pages meanwhile."""
        serving.raise_if_stopped()
        timer = asyncio.get_running_loop().call_later(self.options.ask_s, self._let_go_of_pages, serving)
        try:
            answer = await serving.unless_stopped(self._ask_for_another(serving, lost, deadline_s))
        finally:
            timer.cancel()
        if answer.prefiller is None:
            raise Stopped("overloaded" if answer.busy else "error", answer.reason)
        return answer.prefiller, answer.attempt

    async def _ask_for_another(self, serving: Serving, lost: m.PrefillerLost, deadline_s: float) -> m.Reassigned:
        """Of whichever router there is. How long it looks for a prefiller is its choice, and one that says nothing may
        only stand still: it is waited for until another is there in its stead, or none.
        """
        loop = asyncio.get_running_loop()
        address = await self._next_router(serving, None, lost)
        while True:
            ask = self.mailbox.ask(address, lost, m.Reassigned, max(deadline_s - loop.time(), 0.0))
            asking = asyncio.ensure_future(ask)
            changing = asyncio.ensure_future(self._next_router(serving, address, lost))
            try:
                await asyncio.wait([asking, changing], return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    return asking.result()
                address = changing.result()
            except (NoAnswer, Unreachable) as error:
                log.warning("request %s lost its prefiller, and its router: %s", serving.request, error)
                await asyncio.sleep(self.options.retry_s)
                address = await self._next_router(serving, None, lost)
            finally:
                asking.cancel()
                changing.cancel()
                await asyncio.gather(asking, changing, return_exceptions=True)

    async def _next_router(self, serving: Serving, before: bytes | None, lost: m.PrefillerLost) -> bytes:
        """Where it is, once it is not there any more, or when there is one. Stopped when there is none for long: no
        client waits any more.
        """
        clock = asyncio.get_running_loop().time
        there_s = clock()
        while (address := serving.link.address) in (None, before):
            if address is not None:
                there_s = clock()
            elif clock() - there_s > _ROUTER_GONE_S:
                long = f"no router for {_ROUTER_GONE_S:g} s after its prefiller was lost"
                raise Stopped("error", f"{long}: {lost.reason}")
            await asyncio.sleep(self.options.retry_s)
        assert address is not None
        return address

    def _let_go_of_pages(self, serving: Serving) -> None:
        """Between two attempts, when nothing is written to them."""
        if serving.reception is not None:
            self._give_back(serving)
            self._report_room()

    # --- telling the router ---

    async def _deliver(self, serving: Serving) -> None:
        """Sends tokens as they come, until the end was taken, or the router stays away after it.

        Where nobody waits for the end, or we close, it is offered once.
        """
        clock = asyncio.get_running_loop().time
        kept_s: float | None = None  # since when it has ended and nobody takes that
        while not serving.end_taken:
            await serving.changed.wait()
            serving.changed.clear()
            if serving.taken == len(serving.tokens) and serving.end is None:
                continue
            if await self._offer(serving):
                kept_s = None
                continue
            if serving.end is not None:
                if self._closing or serving.is_unwanted:
                    return
                kept_s = clock() if kept_s is None else kept_s
                if clock() - kept_s > _ROUTER_GONE_S:
                    log.warning("request %s ended (%s) and no router took it", serving.request, serving.end.reason)
                    return
            await asyncio.sleep(self.options.retry_s)
            serving.changed.set()

    async def _offer(self, serving: Serving) -> bool:
        """One message with what the router has not taken yet. False when it was not taken."""
        address, first = serving.link.address, serving.taken
        if address is None:
            return False
        tokens = serving.tokens[first : first + _TOKENS_AT_ONCE]
        is_last = first + len(tokens) == len(serving.tokens)
        end = serving.end if is_last else None
        message = m.Tokens(serving.request, first, m.pack_tokens(tokens), end, serving.placement)
        try:
            answer = await self.mailbox.ask(address, message, m.Taken, self.options.ask_s)
        except (NoAnswer, Unreachable) as error:
            log.info("tokens of %s were not taken: %s", serving.request, error)
            return False
        if not answer.wanted:
            serving.is_unwanted = True
            serving.stop("cancelled", "its router does not know it, or does not want it any more")
            serving.end_taken = serving.end is not None
            return True
        if serving.link.address == address and serving.taken == first:  # else it is offered to another from the start
            serving.taken = first + len(tokens)
            serving.end_taken = end is not None
        if serving.taken < len(serving.tokens) or (serving.end is not None and not serving.end_taken):
            serving.changed.set()
        return True

    def _remember_ended(self, request: str, placement: int) -> None:
        self._ended[request] = max(placement, self._ended.get(request, 0))
        while len(self._ended) > _ENDED_KEPT:
            self._ended.popitem(last=False)
