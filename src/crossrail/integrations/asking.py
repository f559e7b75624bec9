"""Questions from a decoder's rank to all ranks of its prefiller, and how the decoder gets its pages back.

What integrations have in common besides crossrail.kv: an Instance names whom to ask, each rank for its own part.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple

from crossrail.control.mailbox import Mailbox, NoAnswer
from crossrail.control.wire import Unreachable
from crossrail.errors import PeerLost, WaitTimeout
from crossrail.integrations.instance import Instance, Worker
from crossrail.kv import KvReceiver, Reception
from crossrail.kv import messages as m
from crossrail.kv.nodes.watching import Watch, lost_before_arrival

log = logging.getLogger("crossrail.integrations")


class Part(NamedTuple):
    """A rank's part of a request, as the prefiller's ranks know it. attempt: tells it from others of that name."""

    name: str
    attempt: int
    instance: Instance


class Asker:
    """Threads: the event loop's. timeout_s: who answers nothing for so long has failed. probe_s: time between looks."""

    def __init__(self, mailbox: Mailbox, timeout_s: float, probe_s: float) -> None:
        self._mailbox = mailbox
        self._timeout_s = timeout_s
        self._probe_s = probe_s

    async def ask(self, worker: Worker, question: object, answer: Any, timeout_s: float) -> Any:
        return await self._mailbox.ask(worker.address, question, answer, timeout_s)

    def revive(self, instance: Instance) -> None:
        """Before an attempt: its ranks that our engine has given up may only have been frozen, or cut off."""
        for worker in instance.workers:
            self._mailbox.wire.revive(worker.address)

    async def ask_all(
        self, instance: Instance, question: object, answers: tuple[type, ...], timeout_s: float
    ) -> Sequence[Any]:
        """The answers of all ranks. Raises the first failure, after all have answered or failed."""
        got = await asyncio.gather(
            *(self.ask(worker, question, answers, timeout_s) for worker in instance.workers), return_exceptions=True
        )
        for one in got:
            if isinstance(one, BaseException):
                raise one
        return got

    async def lost_before_arrival(self, arrival: Awaitable[None], part: Part, stop: asyncio.Event) -> str:
        """Empty once everything has arrived; else why it will not, or "stopped"."""
        workers = part.instance.workers
        is_only = len(workers) == 1  # otherwise others may have more to write when one has written everything
        watches = [
            Watch(
                self._mailbox,
                worker.address,
                "the producer",
                part.name,
                part.attempt,
                self._probe_s,
                self._timeout_s,
                is_only,
            )
            for worker in workers
        ]
        return await lost_before_arrival(arrival, watches, stop)

    async def how_far(self, part: Part) -> str:
        """What the producer says of a transfer that is late, for people."""
        probe = m.Probe(part.name, part.attempt)
        try:
            told = await self.ask_all(part.instance, probe, (m.Progress,), self._probe_s)
        except (NoAnswer, Unreachable) as error:
            return f"its producer does not answer: {error}"
        return ", ".join(sorted({progress.detail or progress.state for progress in told}))

    async def take_back(self, receiver: KvReceiver, reception: Reception, part: Part, why: str = "") -> bool:
        """Returns when nothing can land in the request's pages any more, however long that takes. why: told to the
        producer. False: it was shut out, and does not know that the request was given up.
        """
        is_told = False

        async def stop() -> None:
            nonlocal is_told
            try:
                await self.stop(part, why)
            except NoAnswer as error:
                is_told = not error.is_silence  # it may say that something sent earlier may still arrive
                raise
            is_told = True

        while True:
            try:
                await reception.withdraw(stop, self._timeout_s)
                return is_told
            except (WaitTimeout, NoAnswer, Unreachable) as error:
                log.warning("transfer %s: %s; its producer is shut out", reception.request, error)
            try:
                await receiver.fence(part.instance.writer, self._timeout_s)
            except WaitTimeout as error:
                log.warning("transfer %s: %s; its blocks stay out of use", reception.request, error)

    async def stop(self, part: Part, why: str = "") -> None:
        """Returns when all ranks say that nothing of it is in progress. Raises PeerLost, NoAnswer, Unreachable.

        why: the decoder's reason, for people at the producer.
        """
        withdraw = m.Withdraw(part.name, part.attempt, m.clipped(why))
        try:
            await self.ask_all(part.instance, withdraw, (m.Quiesced,), self._timeout_s)
        except Unreachable as error:
            if any(self._mailbox.wire.is_lost(worker.address) for worker in part.instance.workers):
                raise PeerLost(str(error)) from None
            raise
