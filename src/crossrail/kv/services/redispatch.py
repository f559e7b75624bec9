"""Names another prefiller to a decoder whose own died, failed, or has no room."""

from __future__ import annotations

import asyncio
import logging

from crossrail.control.deadlines import loop_time_s
from crossrail.kv import messages as m
from crossrail.kv.services.membership import Member
from crossrail.kv.services.placement import Placement
from crossrail.kv.services.router_requests import Running

log = logging.getLogger("crossrail.kv")

_SAME_AGAIN_S = 0.5  # times the attempt: what refused or failed a moment ago may do so again
_SEEK_S = 0.02  # how often a prefiller is looked for,
# by so many requests; by more in proportion less often, so that all take a part of a core at most.
_SEEKING_AT_ONCE = 40


class Redispatch:
    """Threads: the event loop's."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._seeking = 0  # requests

    async def answer(
        self, running: Running, sender: bytes, lost: m.PrefillerLost, *, queue_s: float, attempts_max: int
    ) -> m.Reassigned:
        """Which prefiller the decoder that lost one is to ask; or why none.

        queue_s: how long it waits for one that is there, and for one that has room. attempts_max: that may fail.
        """
        if running.decoder is None or not running.waits_at(sender, lost.placement):
            return nobody_waits(lost)
        if lost.busy:
            if running.note_full(lost.address, loop_time_s()) >= queue_s:
                why = f"no prefiller had room within {queue_s:g} s; the last one said: {lost.reason}"
                return m.Reassigned(lost.request, lost.attempt, None, m.clipped(why), "overloaded")
        else:
            running.note_failed(lost.attempt, lost.address, loop_time_s())
        if len(running.failed) >= attempts_max:
            tried = len(set(running.failed.values()))
            why = f"{len(running.failed)} attempts failed (prefillers that were tried: {tried}): {lost.reason}"
            return m.Reassigned(lost.request, lost.attempt, None, m.clipped(why))
        log.info("request %s, attempt %d: prefiller %s: %s", lost.request, lost.attempt, lost.node, lost.reason)
        found = await self._other(running, running.decoder.record.model, lost, queue_s)
        if not running.waits_at(sender, lost.placement):  # its client left, or it is elsewhere by now
            return nobody_waits(lost)
        if found is None:
            why = f"no other prefiller within {queue_s:g} s after {lost.node!r}: {lost.reason}"
            return m.Reassigned(lost.request, lost.attempt, None, m.clipped(why), "unavailable")
        running.attempt = lost.attempt + 1
        running.reassigned_s = loop_time_s()
        self._placement.assign(running, found)
        return m.Reassigned(lost.request, running.attempt, found.record.ref)

    async def _other(self, running: Running, model: str, lost: m.PrefillerLost, queue_s: float) -> Member | None:
        """One that is there, or comes within queue_s. The same again, after a pause, if there is no other, or the
        others have no room either. One where an attempt has failed only if there is no other, or if it has joined, or
        its model has gone on, since then.
        """
        same_after_s = loop_time_s() + _SAME_AGAIN_S * (lost.attempt - lost.placement + 1)
        give_up_s = loop_time_s() + queue_s
        self._seeking += 1
        try:
            while True:
                there = self._placement.prefillers(running, model)
                able = [member for member in there if not _has_failed(member, running)] or there
                others = [member for member in able if member.address != lost.address]
                # One that was full is another again once it has been heard since.
                heard = [member for member in others if running.full.get(member.address, 0.0) < member.told_s]
                if heard:
                    return self._placement.best(heard, running)
                if running.ended or loop_time_s() >= min(give_up_s, same_after_s if able else give_up_s):
                    return self._placement.best(others or able, running) if able else None
                pause_s = _SEEK_S * max(1.0, self._seeking / _SEEKING_AT_ONCE)
                await asyncio.sleep(max(min(pause_s, give_up_s - loop_time_s()), 0.0))
        finally:
            self._seeking -= 1


def _has_failed(prefiller: Member, running: Running) -> bool:
    failed_s = running.failed_s.get(prefiller.address)
    return failed_s is not None and prefiller.ready_s <= failed_s


def nobody_waits(lost: m.PrefillerLost) -> m.Reassigned:
    return m.Reassigned(lost.request, lost.attempt, None, "nobody waits for this request any more")
