"""Whether missing KV can still arrive: what a decoder learns about the prefiller that is to write it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

from crossrail.control.deadlines import first_of, loop_time_s
from crossrail.control.mailbox import Mailbox, NoAnswer
from crossrail.control.wire import Unreachable
from crossrail.errors import CrossrailError
from crossrail.kv import messages as m


@dataclass(frozen=True)
class Watch:
    """Asks one writer for its progress on an attempt of a request, every probe_s.

    A writer that is silent for timeout_s is lost, as is one that answers, but whose model has announced no layer for
    model_timeout_s. writer: its address; who: its description. is_only_writer: nobody else writes parts of it. Threads:
    the event loop's.
    """

    mailbox: Mailbox
    writer: bytes
    who: str
    request: str
    attempt: int
    probe_s: float
    timeout_s: float
    is_only_writer: bool = True
    model_timeout_s: float = math.inf

    async def until_lost(self) -> str:
        """Returns why nothing more can be expected, as soon as that is so."""
        gone = asyncio.ensure_future(self.mailbox.wire.until_lost(self.writer))
        try:
            return await self._until_lost(gone)
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    async def _until_lost(self, gone: asyncio.Future[None]) -> str:
        heard_s = asked_s = loop_time_s()
        has_written = False
        while True:
            await asyncio.wait([gone], timeout=max(asked_s + self.probe_s - loop_time_s(), 0.0))
            if gone.done():
                gone.result()
                return f"{self.who} died or closed"
            asked_s = loop_time_s()
            try:
                probe = m.Probe(self.request, self.attempt)
                progress = await self.mailbox.ask(self.writer, probe, m.Progress, self.probe_s)
            except Unreachable as error:
                return f"{self.who} cannot be reached: {error}"
            except NoAnswer:
                if loop_time_s() - heard_s > self.timeout_s:
                    return f"{self.who} has not answered for {self.timeout_s:g} s"
                continue
            heard_s = loop_time_s()
            if progress.state in ("failed", "unknown"):
                return f"{self.who} gave it up: {progress.detail or progress.state}"
            if progress.model_silent_s > self.model_timeout_s:
                return f"{self.who} answers, but its model has announced no layer for {self.model_timeout_s:g} s"
            if progress.state == "written" and self.is_only_writer:
                if has_written:
                    return f"{self.who} says that it has written all, and not all was counted"
                has_written = True  # counts come after the bytes, and may arrive after this answer


async def lost_before_arrival(arrival: Awaitable[None], watches: Sequence[Watch], stop: asyncio.Event) -> str:
    """Empty once everything has arrived; else why it will not, or "stopped".

    arrival: raises a CrossrailError if too much has arrived, or waiting is no longer possible.
    """
    arrived = asyncio.ensure_future(arrival)
    lost = [asyncio.ensure_future(watch.until_lost()) for watch in watches]
    stopped = asyncio.ensure_future(stop.wait())
    tasks: list[asyncio.Future[Any]] = [arrived, stopped, *lost]
    try:
        done = await first_of(tasks)
        if arrived in done:
            arrived.result()
            return ""
        return next((watch.result() for watch in lost if watch in done), "stopped")
    except CrossrailError as error:
        return str(error)
