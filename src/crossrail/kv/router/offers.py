"""How a request gets a decoder: it is offered to one after another, in its turn, until one accepts it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping

from crossrail.control.deadlines import loop_time_s
from crossrail.control.mailbox import Mailbox, NoAnswer
from crossrail.control.wire import Unreachable
from crossrail.errors import CrossrailError, UsageError
from crossrail.kv import messages as m
from crossrail.kv.errors import DuplicateRequest, Overloaded, Unavailable
from crossrail.kv.options import RouterOptions
from crossrail.kv.router.absence import Absence
from crossrail.kv.router.known_room import Refusal
from crossrail.kv.router.membership import Member, Membership
from crossrail.kv.router.placement import Placement
from crossrail.kv.router.requests import Running
from crossrail.kv.router.waiting import Waiter, Waiting

log = logging.getLogger("crossrail.kv")

# How a request ends whose decoder is gone, if no other can be had.
_ENDS: dict[type[CrossrailError], m.EndReason] = {Overloaded: "overloaded", Unavailable: "unavailable"}


class Offers:
    """Threads: the event loop's. underway: the router's requests. counts: its, for "restarted". options: gives its."""

    def __init__(
        self,
        mailbox: Mailbox,
        membership: Membership,
        absence: Absence,
        placement: Placement,
        waiting: Waiting,
        underway: Mapping[str, Running],
        counts: Counter[str],
        options: Callable[[], RouterOptions],
    ) -> None:
        self._mailbox = mailbox
        self._membership = membership
        self._absence = absence
        self._placement = placement
        self._waiting = waiting
        self._underway = underway
        self._counts = counts
        self._options = options

    async def place(self, running: Running) -> None:
        """Finds a decoder that accepts the request; returns early if the request has ended meanwhile."""
        try:
            await self._try_to_place(running)
        finally:
            if (kept := self._placement.release(running)) is not None:
                self._waiting.news(kept)
                decoder = self._membership.at(kept)
                if decoder is not None and decoder is not running.decoder:
                    # Let others have it at once. A decoder with an offer in flight learns of this from the offer, or
                    # from its cancel.
                    cancel = m.Cancel(running.request, "it no longer waits here", 0)
                    self._mailbox.spawn(self._tell_cancelled(decoder, cancel), "giving up kept room")

    def restart(self, running: Running, decoder: Member, why: str) -> None:
        """Lets another decoder continue, unless too many have died, maybe because of this request."""
        self._placement.take_back(running)
        running.decoder = None
        if running.ended:
            return
        if not decoder.has_left:
            if running.restarts >= self._options().restarts_max:
                running.finish("error", f"its decoder is gone: {why}; so were {running.restarts} before")
                return
            running.restarts += 1
        running.attempt += 1
        running.waits_s = loop_time_s()
        self._counts["restarted"] += 1
        log.info("request %s continues elsewhere after %d tokens: %s", running.request, len(running.tokens), why)
        self._mailbox.spawn(self._place_again(running, why), "restarting a request")

    def cancel(self, running: Running, why: str) -> None:
        """Tells its decoder, if it has one, that the request is not wanted there any more."""
        if running.decoder is not None:
            cancel = m.Cancel(running.request, why, running.placement)
            self._mailbox.spawn(self._tell_cancelled(running.decoder, cancel), "cancelling")

    async def _try_to_place(self, running: Running) -> None:
        options, begun_s = self._options(), loop_time_s()
        give_up_s = min(begun_s + options.queue_s, running.deadline_at_s)
        grace_s = min(options.answer_timeout_s, running.deadline_at_s - give_up_s)
        with self._waiting.queued(running, begun_s + options.queue_s / 2) as waiter:
            while (decoder := await self._waiting.turn(waiter, give_up_s, grace_s)) is not None:
                refusal = await self._offer(running, decoder)
                if refusal is not None and running.ended:
                    return  # its time was up first, which is not held against the decoder
                self._waiting.answered(waiter, refusal)
                if refusal is None:
                    return
            if not running.ended:
                self._give_up(waiter)

    def _give_up(self, waiter: Waiter) -> None:
        """Raises why no decoder has accepted it, or ends it if its own time is up."""
        running = waiter.running
        decoders = [member for member in self._membership.members("decoder") if member.load.takes_requests]
        if not any(running.model in (None, member.record.model) for member in decoders):
            said = f"; the last one said: {waiter.why}" if waiter.why else ""
            raise Unavailable(self._absence.of_decoders(running.model) + said)
        lacking = self._waiting.lacks_prefiller(waiter)
        why = waiter.why or self._waiting.why_not(waiter)
        if lacking:
            why = self._absence.of_prefillers(lacking, running.prefill_tokens)
        if loop_time_s() >= running.deadline_at_s:
            running.finish("deadline", f"no node took it before its time was up; the last one said: {why}")
            return
        if lacking:
            raise Unavailable(why)
        raise Overloaded(f"no node took the request within {self._options().queue_s:g} s; the last one said: {why}")

    async def _offer(self, running: Running, decoder: Member) -> Refusal | None:
        """None if the decoder has accepted it."""
        prefiller = None
        context = running.context
        if len(context) > 1:
            able = self._placement.prefillers(running, decoder.record.model)
            if not able:
                self._waiting.prefillers_changed()
                return Refusal(self._absence.of_prefillers(decoder.record.model, running.prefill_tokens))
            prefiller = self._placement.best(able, running)
        generated, now_s = len(running.tokens), loop_time_s()
        running.offer_to(decoder)
        start = m.Start(
            running.request,
            m.pack_tokens(context),
            running.sampling,
            max(running.deadline_at_s - now_s, 0.0),
            None if prefiller is None else prefiller.record.ref,
            running.placement,
            generated,
            running.traceparent,
            has_waited=self._placement.is_kept_for(decoder, running),
            age_s=now_s - running.came_s,
            waited_s=now_s - running.waits_s,
        )
        # Not in a task of its own: restart() below relies on it that its caller leaves the queue first.
        timeout_s = min(self._options().answer_timeout_s, start.timeout_s)
        try:
            with self._placement.offered(prefiller, len(running.prompt)):
                answer = await self._mailbox.ask(decoder.address, start, (m.Started, m.StartRefused), timeout_s)
        except (Unreachable, NoAnswer) as error:
            if len(running.tokens) == generated and not running.ended:
                # It may have begun all the same: whatever it sends is refused from now on, which ends the request
                # there.
                self.cancel(running, "it was given to another decoder")
                self._not_taken(running)
                running.attempt += 1
                if loop_time_s() >= running.deadline_at_s:
                    running.finish("deadline", f"node {decoder.name!r} did not answer before its time was up")
                # Believed for longer: otherwise the first in line would be offered to a silent decoder again and again.
                long_s = self._options().answer_timeout_s if isinstance(error, NoAnswer) else None
                return Refusal(f"node {decoder.name!r}: {error}", long_s)
            answer = m.Started(running.request)  # only late
        if isinstance(answer, m.StartRefused):
            self._not_taken(running)
            if answer.is_duplicate:
                raise DuplicateRequest(answer.reason)
            if not answer.busy:
                raise UsageError(answer.reason)
            return Refusal(answer.reason)
        if self._underway.get(running.request) is running:  # otherwise its client has left, and the decoder was told
            self._placement.give(running, decoder, prefiller)
            if running.given_up is not None:
                self.restart(running, decoder, running.given_up)
            elif not any(member is decoder for member in self._membership.members("decoder")):
                self.restart(running, decoder, f"node {decoder.name!r} left as it took the request")
        return None

    def _not_taken(self, running: Running) -> None:
        """The decoder has not accepted it, but may have asked for another prefiller all the same."""
        self._placement.take_back(running)
        running.decoder = None

    async def _place_again(self, running: Running, why: str) -> None:
        try:
            await self.place(running)
        except CrossrailError as error:
            ends = _ENDS.get(type(error), "error")
            running.finish(ends, f"its decoder is gone: {why}; no other decoder continues it: {error}")

    async def _tell_cancelled(self, decoder: Member, cancel: m.Cancel) -> None:
        try:
            await self._mailbox.ask(decoder.address, cancel, m.Taken, self._options().lease_s)
        except (Unreachable, NoAnswer) as error:
            # When the node comes back it offers tokens, and learns then that nobody wants them.
            log.info("cancel of %s did not reach %s: %s", cancel.request, decoder.name, error)
