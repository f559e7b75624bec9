"""The router: accepts requests, chooses a prefiller and a decoder for each, and follows them to their end.

Life of a request here:
1. admitted, unless `requests_max` are in progress (Overloaded).
2. waits for its turn at a decoder (waiting.py), and is offered to it together with the prefiller to ask (offers.py).
   Decoders that are busy or silent are passed over. For a request that has waited half of `queue_s` a decoder is kept:
   it accepts nothing younger, from any router, until this request has left the queue.
3. tokens come from the decoder, in order, resent until acknowledged.
4. a decoder whose prefiller dies asks for another; the client notices only the delay.
5. if its decoder dies or leaves, another one continues after the tokens received so far; for dead ones at most
   `restarts_max` times. Tokens that the previous decoder generated but did not deliver are generated again; no client
   sees a token twice.
6. ended: the decoder says so; or the client is gone, time is up, or nobody can continue.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncGenerator
from functools import partial

from crossrail._closing import AsyncClosing
from crossrail._options import check_seconds, check_timeout
from crossrail.control.deadlines import loop_time_s
from crossrail.control.mailbox import Mailbox
from crossrail.errors import CrossrailError, UsageError
from crossrail.kv import messages as m
from crossrail.kv.errors import DuplicateRequest, Overloaded, Unavailable, UnknownModel
from crossrail.kv.model import Tokens
from crossrail.kv.options import RouterOptions as RouterOptions
from crossrail.kv.refusal import refuse
from crossrail.kv.router.absence import Absence
from crossrail.kv.router.adoptions import Adopted, Adoptions
from crossrail.kv.router.membership import Member, Membership, Roster
from crossrail.kv.router.models_seen import ModelsSeen
from crossrail.kv.router.offers import Offers
from crossrail.kv.router.placement import Placement, prefix_names
from crossrail.kv.router.redispatch import Redispatch, nobody_waits
from crossrail.kv.router.requests import Chunk, Ends, Running
from crossrail.kv.router.underway import Underway
from crossrail.kv.router.waiting import Waiting
from crossrail.kv.tracing import checked

log = logging.getLogger("crossrail.kv")

_REFUSED: dict[type[CrossrailError], str] = {
    DuplicateRequest: "duplicate",
    UsageError: "invalid",
    UnknownModel: "unknown-model",
    Overloaded: "overloaded",
    Unavailable: "unavailable",
}


class Router(AsyncClosing):
    """Threads: the event loop's. start(), then complete() any number of times concurrently, then close().

    membership: who the nodes are; None: nodes join by message and stay by heartbeats, and then heartbeat_s may be at
    most half of lease_s. refused: from start() on; raises why the router may have no nodes, for example if another
    router has its name.
    """

    refused: asyncio.Future[None]

    def __init__(
        self,
        name: str,
        mailbox: Mailbox,
        options: RouterOptions | None = None,
        membership: Membership | None = None,
    ) -> None:
        m.check_name(name)
        self.name = name
        self.options = options or RouterOptions()
        self.roster = membership or _roster(self.options)
        # Counts requests once each by how they ended: an EndReason, or how it was refused. Also how often a request got
        # another prefiller ("redispatched") or another decoder ("restarted").
        self.counts: Counter[str] = Counter()
        self._mailbox = mailbox
        self._running = Underway()
        self._ended = Ends()
        self._adopted = Adoptions()
        self._looked_s = 0.0  # last sweep of members, on the event loop's clock
        self._is_closing = False
        self._numbers = itertools.count(1)
        self._arrivals = itertools.count(1)
        self._placement = Placement(self.roster)
        self._waiting = Waiting(self.roster, self._placement)
        self._redispatch = Redispatch(self._placement)
        self._models = ModelsSeen(self.roster)
        self._absence = Absence(name, self.roster)
        self._offers = Offers(
            mailbox, self.roster, self._absence, self._placement, self._waiting, self._running, self.counts,
            lambda: self.options,
        )  # fmt: skip
        self.roster.on_gone(self._on_gone)
        mailbox.handle(m.Join, self._on_join)
        mailbox.handle(m.Heartbeat, self._on_heartbeat)
        mailbox.handle(m.Leave, self._on_leave)
        mailbox.handle_at_once(m.Tokens, self._on_tokens)
        mailbox.handle_at_once(m.TokensOfSeveral, self._on_tokens_of_several)
        mailbox.handle(m.PrefillerLost, self._on_prefiller_lost)

    def __repr__(self) -> str:
        return f"<Router {self.name!r}, {self.requests} requests>"

    @property
    def requests(self) -> int:
        """Number of requests in progress."""
        return len(self._running)

    @property
    def mailbox(self) -> Mailbox:
        """The mailbox that the router was made with."""
        return self._mailbox

    def start(self) -> None:
        """Begins to receive messages."""
        self._mailbox.start()
        self.refused = asyncio.get_running_loop().create_future()
        self.roster.start(self.name, self._mailbox, partial(refuse, self.refused))
        self._looked_s = loop_time_s()
        self._models.start(self._looked_s)
        self._mailbox.spawn(self._sweep(), "looking after members")
        self._mailbox.spawn(self._waiting.run(), "giving turns to requests that wait")
        self._mailbox.spawn(self._waiting.look(), "looking after requests that wait")

    @property
    def is_closing(self) -> bool:
        """True after drain() or close(): no more requests are accepted."""
        return self._is_closing

    async def drain(self, timeout_s: float) -> bool:
        """Accepts no more requests, and waits until those in progress have ended. False if that took too long."""
        check_seconds(timeout_s=timeout_s)
        self._is_closing = True
        return await self._running.all_ended(timeout_s)

    async def close(self) -> None:
        """Accepts no more requests and ends those in progress here; their clients are told why. Idempotent.

        Decoders keep theirs running until there is another router. Call it while clients can still be told of their
        end.
        """
        self._is_closing = True
        for running in self._running.values():
            running.finish("error", "the router is closing")
        self._waiting.end()
        await self._mailbox.close()
        await self.roster.close()

    def adopted(self, request: str) -> Adopted | None:
        """A request that was begun by an earlier router, as far as it is known."""
        return self._adopted.get(request)

    def ended(self, request: str) -> m.End | None:
        """How a request ended; None if it has not, or ended too long ago. The latest few hundred include their
        timelines.
        """
        return self._ended.get(request)

    def new_name(self) -> str:
        """A request name that no router, this one included, gives to another request."""
        return f"{self._mailbox.wire.identity(self._mailbox.address).hex()[:16]}-{next(self._numbers)}"

    # --- requests ---

    async def complete(
        self,
        prompt: Tokens,
        sampling: m.Sampling,
        *,
        model: str | None = None,
        request: str | None = None,
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> AsyncGenerator[Chunk, None]:
        """Chunks of tokens that follow the prompt; the last has an end. Leaving the iteration cancels the request.

        model: which, None: that of any node; one that no node has had for queue_s is unknown. request: its name, None:
        a new one. timeout_s: how long it may take in total, at most the router's request_timeout_s.
        traceparent: of the trace that spans of it belong to (crossrail.kv.tracing).
        Raises UsageError, DuplicateRequest, UnknownModel, Overloaded, Unavailable; all before the first chunk.
        """
        check_timeout(timeout_s)
        try:
            running = self._admit(prompt, sampling, model, request, timeout_s)
        except CrossrailError as error:
            self.counts[_outcome(error)] += 1
            log.info("request %s is refused: %s", request or "without a name", error)
            raise
        running.traceparent = checked(traceparent)
        loop = asyncio.get_running_loop()
        timer = loop.call_at(running.deadline_at_s, running.chunks.time_is_up)  # one timer for all chunks
        try:
            try:
                await self._offers.place(running)
            except CrossrailError as error:
                self.counts[_outcome(error)] += 1
                log.info("request %s found no place: %s", running.request, error)
                self._running.remove(running)  # no decoder has it: there is nothing to cancel
                raise
            while True:
                chunk = await self._next_chunk(running)
                running.end = chunk.end
                yield chunk
                if chunk.end is not None:
                    return
        finally:
            timer.cancel()
            self._drop(running)

    def stop_request(self, request: str, why: str) -> None:
        """Whoever iterates complete() has all it wants, and leaves: the request ends as "stop", not as cancelled."""
        running = self._running.get(request)
        if running is None:
            return
        running.end = m.End("stop", why)  # also if everything is here already, and it has not looked at the rest
        if not running.ended:
            running.ended = True
            self._offers.cancel(running, why)

    def _admit(
        self, prompt: Tokens, sampling: m.Sampling, model: str | None, request: str | None, timeout_s: float | None
    ) -> Running:
        if len(prompt) == 0:
            raise UsageError("the prompt is empty: at least one token is needed")
        if len(prompt) + sampling.max_tokens > m.TOKENS_MAX:
            raise UsageError(f"{len(prompt)} + {sampling.max_tokens} tokens, at most {m.TOKENS_MAX} are served")
        if self._is_closing:
            raise Unavailable(f"router {self.name!r} is closing")
        request = request or self.new_name()
        if self._knows(request):
            raise DuplicateRequest(f"request {request!r} is or was under way: names are used once")
        if model is not None and self._models.is_unknown(model, loop_time_s(), self.options.queue_s):
            names = ", ".join(self._models.names()) or "none"
            raise UnknownModel(f"no node of router {self.name!r} has model {model!r}; there are {names}")
        self._placement.check_length(len(prompt), model)
        self._running.check_room(len(prompt) + sampling.max_tokens, self.options)
        longest_s = self.options.request_timeout_s
        patience_s = longest_s if timeout_s is None else min(timeout_s, longest_s)
        now_s, number = loop_time_s(), next(self._arrivals)
        running = Running(
            request, prompt, sampling, prefix_names(prompt), now_s + patience_s, model, number, now_s, now_s
        )
        self._running.add(running)
        return running

    def _knows(self, request: str) -> bool:
        return request in self._running or any(known.get(request) is not None for known in (self._ended, self._adopted))

    async def _next_chunk(self, running: Running) -> Chunk:
        if (chunk := await running.chunks.take()) is not None:
            return chunk
        running.ended = True
        self._offers.cancel(running, "its time is up")
        return Chunk([], m.End("deadline", "the router's time for it was up"))

    def _drop(self, running: Running) -> None:
        """Forgets a request; one that has not ended is cancelled at its decoder."""
        if not self._running.remove(running):
            return
        if not running.ended:
            running.ended = True
            self._offers.cancel(running, "the client is gone")
        end = running.end or m.End("cancelled", "the client is gone")
        self.counts[end.reason] += 1
        log.info(
            "request %s: %s, %d tokens after a prompt of %d, in %.3f s, decoder %s%s",
            running.request, end.reason, len(running.tokens), len(running.prompt), loop_time_s() - running.came_s,
            "none" if running.decoder is None else running.decoder.name, end.detail and f": {end.detail}",
        )  # fmt: skip
        self._ended.keep(running.request, end)
        self._placement.take_back(running)
        if running.decoder is not None:
            self._waiting.news(running.decoder.address)

    # --- what nodes say ---

    async def _on_join(self, sender: bytes, join: m.Join) -> m.Message:
        if join.record.address != sender:
            return m.JoinRefused(f"node {join.record.node!r} gives an address that is not its own")
        self._look_after_members()  # it may replace a dead one
        try:
            self.roster.join(join.record, join.load, loop_time_s())
        except UsageError as refusal:
            log.warning("refused: %s", refusal)
            return m.JoinRefused(m.clipped(refusal))
        in_progress = len(join.running) - join.ended
        for index, request in enumerate(join.running):
            if request not in self._running and self._ended.get(request) is None:
                self._adopted.add(request, sender, has_ended=index >= in_progress)
        member = self.roster.at(sender)
        if member is not None and join.number > member.join_number:
            if not member.join_number:
                self._absence.note_joined(member)
            member.join_number = join.number
            self._restart_what_is_not_running(member, join)
        self._waiting.prefillers_changed()
        self._waiting.news(sender)
        return m.Joined(self.name, self.options.heartbeat_s, self.options.lease_s)

    def _restart_what_is_not_running(self, member: Member, join: m.Join) -> None:
        """Restarts what a decoder no longer has: we were frozen or cut off for longer than it keeps an end.

        join: its latest. It begins nothing for us between a Join and our answer. So nothing that it has now is missing
        in that one, but it may be missing in an earlier Join that arrives late.
        """
        there = set(join.running)
        for running in self._running.values():
            if running.decoder is member and running.is_charged and running.request not in there:
                self._offers.restart(running, member, f"node {member.name!r} no longer has it")

    async def _on_heartbeat(self, sender: bytes, heartbeat: m.Heartbeat) -> m.Message:
        member = self.roster.at(sender)
        before = heartbeat.load if member is None else member.load
        is_member = self.roster.heartbeat(heartbeat.node, sender, heartbeat.load, loop_time_s())
        if member is not None:
            self._waiting.heard(member, before)
        return m.HeartbeatTaken(is_member)

    async def _on_leave(self, sender: bytes, leave: m.Leave) -> m.Message:
        self.roster.leave(leave.node, sender)
        return m.Taken()

    def _on_tokens(self, sender: bytes, tokens: m.Tokens) -> m.Message:
        return m.Taken(self._take(sender, tokens, loop_time_s()))

    def _on_tokens_of_several(self, sender: bytes, tokens: m.TokensOfSeveral) -> m.Message:
        now_s = loop_time_s()
        return m.TakenOfSeveral([self._take(sender, piece, now_s) for piece in tokens.pieces])

    def _take(self, sender: bytes, tokens: m.Tokens, now_s: float) -> bool:
        """Whether somebody wants that request."""
        numbers = m.unpack_few(tokens.tokens)
        running = self._running.get(tokens.request)
        if running is not None and running.is_placed(sender, tokens.placement):
            assert running.decoder is not None
            running.decoder.heard_s = now_s
            gone = tokens.end if tokens.elsewhere else None
            running.take(tokens.first, numbers, tokens.end if gone is None else None)
            if gone is not None and not running.is_charged:
                running.given_up = gone.detail  # the acceptance itself has not arrived yet
            elif gone is not None:
                self._offers.restart(running, running.decoder, gone.detail)
            elif running.tokens and running.prefiller is not None:
                self._placement.assign(running, None)  # with the first token the prefiller has done its part
            return not running.ended or tokens.end is not None
        return self._adopted.take(tokens.request, sender, tokens.first, numbers, tokens.end)

    async def _on_prefiller_lost(self, sender: bytes, lost: m.PrefillerLost) -> m.Message:
        running = self._running.get(lost.request) or self._adopted_as_running(lost, sender)
        if running is None:
            return nobody_waits(lost)
        self._look_after_members()
        queue_s, attempts_max = self.options.queue_s, self.options.attempts_max
        answer = await self._redispatch.answer(running, sender, lost, queue_s=queue_s, attempts_max=attempts_max)
        self.counts["redispatched"] += answer.prefiller is not None
        return answer

    def _adopted_as_running(self, lost: m.PrefillerLost, sender: bytes) -> Running | None:
        decoder = self.roster.at(sender)
        return None if decoder is None else self._adopted.as_running(lost, decoder)

    def _on_gone(self, member: Member, why: str) -> None:
        self._absence.note(member, why)
        self._placement.forget(member)
        self._adopted.on_gone(member.address)
        self._waiting.prefillers_changed()
        for running in self._running.values():
            # Otherwise, should the prefiller come back, this would count as its work again.
            if running.prefiller is member:
                self._placement.assign(running, None)
            # A request that was merely offered to it goes to another decoder when the offer remains unanswered.
            if running.decoder is member and running.is_charged:
                self._offers.restart(running, member, why)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.options.sweep_s)
            self._look_after_members()

    def _look_after_members(self) -> None:
        now_s = loop_time_s()
        if (frozen_s := now_s - self._looked_s - self.options.sweep_s) > 0:
            self.roster.excuse(frozen_s, now_s)
        self._looked_s = now_s
        self.roster.sweep(now_s, self._mailbox.wire.is_lost)
        self._models.look(now_s, self.options.queue_s)


def _outcome(error: CrossrailError) -> str:
    """The name under which a refused request is counted."""
    return next((outcome for kind, outcome in _REFUSED.items() if isinstance(error, kind)), "error")


def _roster(options: RouterOptions) -> Roster:
    """UsageError if members would be missed between two of their heartbeats."""
    beat_s, lease_s = options.heartbeat_s, options.lease_s
    if 2 * beat_s > lease_s:
        raise UsageError(f"heartbeat_s={beat_s:g} must be at most half of lease_s={lease_s:g}: one beat may be late")
    return Roster(lease_s)
