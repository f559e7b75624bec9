"""A decoder's rank and the ranks of the prefiller that it asks: questions to all of them, and pages taken back.

What integrations have in common beside crossrail.kv: who is asked is named by an Instance, each rank for its own part.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from crossrail.control.mailbox import Mailbox, NoAnswer
from crossrail.errors import PeerLost, WaitTimeout
from crossrail.integrations.instance import Instance, Worker
from crossrail.kv import KvReceiver, Reception
from crossrail.kv import messages as m
from crossrail.kv.wire import Unreachable

log = logging.getLogger("crossrail.integrations")

_LOOK_S = 0.1  # between looks at whether an engine of the prefiller's is gone


class Part(NamedTuple):
    """A rank's part of a request, as the prefiller's ranks know it. attempt: tells it from others of that name."""

    name: str
    attempt: int
    instance: Instance


class Asker:
    """Threads: the event loop's. silent_s: who answers nothing for so long has failed. probe_s: time between looks."""

    def __init__(self, mailbox: Mailbox, silent_s: float, probe_s: float) -> None:
        self._mailbox = mailbox
        self._silent_s = silent_s
        self._probe_s = probe_s

    async def ask(self, worker: Worker, question: object, answer: Any, timeout_s: float) -> Any:
        return await self._mailbox.ask(worker.address, question, answer, timeout_s)

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

    async def watch(self, worker: Worker, part: Part) -> str:
        """Returns why nothing more is to be expected from this rank of the prefiller, as soon as that is so."""
        clock = asyncio.get_running_loop().time
        heard_s = asked_s = clock()
        written = False
        while True:
            await asyncio.sleep(min(_LOOK_S, self._probe_s))
            if self._mailbox.wire.is_lost(worker.address):
                return "the producer died or closed"
            if clock() - asked_s < self._probe_s:
                continue
            asked_s = clock()
            try:
                progress = await self.ask(worker, m.Probe(part.name, part.attempt), m.Progress, self._probe_s)
            except Unreachable as error:
                return f"the producer died, or cannot be reached: {error}"
            except NoAnswer:
                if clock() - heard_s > self._silent_s:
                    return f"the producer has not answered for {self._silent_s:g} s"
                continue
            heard_s = clock()
            if progress.state in ("failed", "unknown"):
                return f"the producer gave it up: {progress.detail or progress.state}"
            # All counts of a rank that has written everything are on their way; other ranks may have more to write.
            if progress.state == "written" and written and len(part.instance.workers) == 1:
                return "the producer says that it has written all, and not all was counted"
            written = progress.state == "written"

    async def take_back(self, receiver: KvReceiver, reception: Reception, part: Part) -> None:
        """Returns when nothing can land in the request's pages any more, however long that takes."""
        while True:
            try:
                await reception.withdraw(lambda: self.stop(part), self._silent_s)
                return
            except (WaitTimeout, NoAnswer, Unreachable) as error:
                log.warning("transfer %s: %s; its producer is shut out", reception.request, error)
            try:
                await receiver.fence(part.instance.writer, self._silent_s)
            except WaitTimeout as error:
                log.warning("transfer %s: %s; its blocks stay out of use", reception.request, error)

    async def stop(self, part: Part) -> None:
        """Returns when all ranks say that nothing of it is under way. Raises PeerLost, NoAnswer, Unreachable."""
        try:
            await self.ask_all(part.instance, m.Withdraw(part.name, part.attempt), (m.Quiesced,), self._silent_s)
        except Unreachable as error:
            if any(self._mailbox.wire.is_lost(worker.address) for worker in part.instance.workers):
                raise PeerLost(str(error)) from None
            raise
