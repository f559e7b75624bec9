"""Names another prefiller to a decoder whose prefiller died, failed, or has no room."""

from __future__ import annotations

import asyncio
import logging

from crossrail.control.deadlines import loop_time_s
from crossrail.kv import messages as m
from crossrail.kv.router.membership import Member
from crossrail.kv.router.placement import Placement
from crossrail.kv.router.requests import Running

log = logging.getLogger("crossrail.kv")

_SAME_AGAIN_S = 0.5  # times the attempt's number: a prefiller that has just refused or failed may do so again
_SEEK_S = 0.02  # interval at which a prefiller is looked for,
# by up to this many requests; with more of them the interval grows, so that all together use only part of a core
_SEEKING_AT_ONCE = 40


class Redispatch:
    """Threads: the event loop's."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._seeking = 0  # number of requests

    async def answer(
        self, running: Running, sender: bytes, lost: m.PrefillerLost, *, queue_s: float, attempts_max: int
    ) -> m.Reassigned:
        """Chooses the prefiller that a decoder which lost one is to ask; or says why there is none.

        queue_s: how long to wait for one to appear, and for one to have room. attempts_max: attempts that may fail.
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
        if not running.waits_at(sender, lost.placement):  # its client has left, or it is placed elsewhere by now
            return nobody_waits(lost)
        if found is None:
            why = f"no other prefiller within {queue_s:g} s after {lost.node!r}: {lost.reason}"
            return m.Reassigned(lost.request, lost.attempt, None, m.clipped(why), "unavailable")
        running.attempt = lost.attempt + 1
        running.reassigned_s = loop_time_s()
        self._placement.assign(running, found)
        return m.Reassigned(lost.request, running.attempt, found.record.ref)

    async def _other(self, running: Running, model: str, lost: m.PrefillerLost, queue_s: float) -> Member | None:
        """A prefiller that is there, or comes within queue_s. The same one again, after a pause, only if there is no
        other, or the others have no room either. One where an attempt has failed only if there is no other, or if it
        has joined again or its model has recovered since.
        """
        same_after_s = loop_time_s() + _SAME_AGAIN_S * (lost.attempt - lost.placement + 1)
        give_up_s = loop_time_s() + queue_s
        self._seeking += 1
        try:
            while True:
                there = self._placement.prefillers(running, model)
                able = [member for member in there if not _has_failed(member, running)] or there
                others = [member for member in able if member.address != lost.address]
                # One that was full counts as new once it has reported since.
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
