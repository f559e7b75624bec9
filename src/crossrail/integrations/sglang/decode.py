"""The decoder's half: gets the KV of requests from the prefiller's ranks into the pages that SGLang allocated.

A pull is one request of one rank. It ends in one of these ways; only then may its pages be used or freed:
- success: the count is complete, and the rows of aux are in SGLang's buffers.
- failed: all ranks of the prefiller have confirmed that nothing can land any more, or were fenced off.
A prefiller on this host that is frozen in the middle of a copy cannot be fenced off: until it can, the pull goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from crossrail.control.deadlines import in_time, loop_time_s, set_in_time
from crossrail.control.mailbox import NoAnswer
from crossrail.control.wire import Unreachable
from crossrail.errors import CrossrailError, WaitTimeout
from crossrail.integrations.asking import Asker, Part
from crossrail.integrations.instance import Instance, Worker, engine_name, mismatch, rank_name
from crossrail.integrations.sglang.memory import AuxRows, wait_for_kernels
from crossrail.integrations.sglang.messages import Aux, Destination, GivenUp, Wanted
from crossrail.integrations.sglang.node import RankNode
from crossrail.integrations.sglang.prompts import Prompt
from crossrail.integrations.sglang.state import Poll, Progress, wanted_twice
from crossrail.kv import KvLayout, KvReceiver, PageState, Reception, foreign_lease
from crossrail.kv import messages as m

log = logging.getLogger("crossrail.sglang")

_ATTEMPTS = 1 << 20
_RELEASABLE = (PageState.RESERVED, PageState.IN_USE)


class PullFailed(CrossrailError):
    """This request will get nothing more."""


@dataclass(eq=False)
class Pull:
    """progress: for SGLang's thread; all else is the loop's. attempt: tells it from others of the same room."""

    room: int
    instance: Instance
    attempt: int
    prompt: Prompt | None = None
    progress: Progress = field(default_factory=Progress)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    rows: list[bytes] | None = None
    rows_came: asyncio.Event = field(default_factory=asyncio.Event)
    is_begun: bool = False
    is_asked: bool = False  # the prefiller may have heard of it, and hears of its end where its pages are taken back


class DecodeSide:
    """Threads: the event loop's."""

    def __init__(self, node: RankNode, aux: AuxRows) -> None:
        self._node = node
        self._aux = aux
        self._mailbox = node.mailbox
        self._asker = Asker(node.mailbox, node.options.prefiller_timeout_s, node.options.probe_s)
        self._receivers: dict[KvLayout, KvReceiver] = {}
        self._pulls: dict[tuple[str, int], Pull] = {}
        self._attempts = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()

    async def start(self) -> None:
        self._mailbox.handle(Aux, self._on_aux)
        self._mailbox.handle(GivenUp, self._on_given_up)
        self._mailbox.start()

    async def close(self) -> None:
        """Gives up pulls in progress, as far as prefillers answer in time, and revokes access to our memory from all of
        them.

        Raises WaitTimeout while one is frozen in the middle of a copy to us.
        """
        self._closing.set()
        for pull in self._pulls.values():
            self.abort(pull, "the decoder is closing")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2 * self._node.options.prefiller_timeout_s)
        ends = await asyncio.gather(*(receiver.shut() for receiver in self._receivers.values()), return_exceptions=True)
        for end in ends:
            if end is not None:
                raise end

    def shut_out(self) -> None:
        """The last of close() again, if it raised: the engine may be closed by then, and the loop ended. Blocks."""
        with contextlib.ExitStack() as ends:  # each, whatever the others raise
            for receiver in self._receivers.values():
                ends.callback(receiver.close)

    # ---- what SGLang says

    async def open(self, room: int, instance: Instance, prompt: Prompt | None = None) -> Pull:
        """A second of a room fails at once, and so does the first: here, where the reason is known. The prefiller would
        say so too, unless its client hangs up before.
        """
        pull = Pull(room, instance, (next(self._attempts) - 1) % (_ATTEMPTS - 1) + 1, prompt)
        others = [
            one
            for one in self._pulls.values()
            if one.room == room and one.instance == instance and not one.progress.error
        ]
        self._pulls[self._name(pull), pull.attempt] = pull
        pull.progress.advance(Poll.WAITING_FOR_INPUT)
        if others:
            for one in (*others, pull):
                self.abort(one, wanted_twice(room))
        else:
            self._keep(self._announce(pull))
        return pull

    async def _announce(self, pull: Pull) -> None:
        """Tells the prefiller who waits for this room, which may be long before there are pages: if we die meanwhile,
        it does not wait for us.
        """
        self._asker.revive(pull.instance)
        with contextlib.suppress(NoAnswer, Unreachable):  # whoever asks for the KV is told so
            refusal = await self._asked(pull, Wanted(self._name(pull), pull.attempt))
            if refusal and not pull.is_begun:
                self.abort(pull, refusal)

    def begin(self, pull: Pull, pages: npt.NDArray[np.uint32], aux_index: int | None, prefix_tokens: int) -> None:
        """Its pages, in the order of its tokens behind prefix_tokens, and its row of aux: the prefiller may write."""
        if pull.is_begun or pull.progress.error:
            return
        pull.is_begun = True
        pull.progress.advance(Poll.TRANSFERRING)
        self._keep(self._run(pull, pages, aux_index, prefix_tokens))

    def abort(self, pull: Pull, why: str) -> None:
        if pull.progress.is_over or pull.stop.is_set():
            return
        pull.progress.fail(why)
        pull.stop.set()
        if not pull.is_begun:
            pull.progress.end()
            self._keep(self._let_go(pull))

    # ---- one pull

    async def _run(self, pull: Pull, pages: npt.NDArray[np.uint32], aux_index: int | None, prefix_tokens: int) -> None:
        begun_s = loop_time_s()
        try:
            await self._fetch(pull, pages, prefix_tokens)
            assert pull.rows is not None
            if aux_index is not None:
                self._aux.write(aux_index, pull.rows)
        except CrossrailError as error:
            pull.progress.fail(str(error))
            if not pull.is_asked:
                self._keep(self._let_go(pull))
        except Exception as error:
            log.exception("room %d: it failed by a mistake of ours", pull.room)
            pull.progress.fail(f"{type(error).__name__}: {error}")
        what = f"room {pull.room} from {pull.instance.name}, {len(pages)} pages, {loop_time_s() - begun_s:.3f} s"
        if pull.progress.error:
            level = logging.INFO if pull.stop.is_set() else logging.ERROR  # what was aborted is no error
            log.log(level, "%s: its KV did not come: %s", what, pull.progress.error)
        else:
            log.debug("%s: it is here", what)
        self._pulls.pop((self._name(pull), pull.attempt), None)
        pull.progress.end()

    async def _quiet_gpu(self) -> None:
        """Returns when kernels that were launched before no longer touch the pages.

        SGLang gives a request pages as soon as it knows that their previous request has ended. With overlap that one
        still has a forward pass to run, into the same pages. SGLang's own kernels wait for it on their stream, NICs do
        not.
        """
        if self._node.device == "cpu":
            return
        try:
            await in_time(asyncio.to_thread(wait_for_kernels, self._node.device), self._node.options.load_s)
        except asyncio.TimeoutError:
            raise PullFailed(f"kernels of {self._node.device} did not end in {self._node.options.load_s:g} s") from None
        except RuntimeError as error:
            raise PullFailed(f"the GPU failed: {error}") from None

    async def _fetch(self, pull: Pull, pages: npt.NDArray[np.uint32], prefix_tokens: int) -> None:
        """Returns when everything has arrived; raises the reason if not, once nothing can land any more."""
        await self._quiet_gpu()
        theirs = pull.instance.layout
        receiver = self._receiver_for(pull.instance)
        name, tokens = self._name(pull), len(pages) * self._node.pool.page_tokens
        part = Part(name, pull.attempt, pull.instance)
        reception = receiver.adopt(name, tokens, foreign_lease(name, pages, self._node.pool.page_tokens))
        target = reception.dispatch(theirs, pull.instance.writer)
        try:
            load_s = self._node.options.load_s
            question = Destination(name, pull.attempt, target.to_wire(), load_s, prefix_tokens, pull.prompt)
            self._asker.revive(pull.instance)
            pull.is_asked = True
            await self._dispatch(pull, question)
            await self._arrive(reception, pull, part)
        except BaseException as error:
            log.info("room %d: %s; taking its pages back", pull.room, error)
            pull.progress.fail(str(error))
            if not await self._asker.take_back(receiver, reception, part, pull.progress.error):
                self._keep(self._let_go(pull))
            raise
        finally:
            if reception.state in _RELEASABLE:
                reception.release()

    async def _dispatch(self, pull: Pull, question: Destination) -> None:
        """Raises PullFailed unless all ranks of the prefiller take it."""
        try:
            refusal = await self._asked(pull, question)
        except (NoAnswer, Unreachable) as error:
            raise PullFailed(f"the prefiller {engine_name(pull.instance.workers[0].address)}: {error}") from None
        if refusal:
            raise PullFailed(refusal)

    async def _asked(self, pull: Pull, question: Wanted | Destination) -> str:
        """Why a rank of the prefiller refuses; empty: all of them agree. Raises NoAnswer and Unreachable."""
        answers = await self._asker.ask_all(
            pull.instance, question, (m.Dispatched, m.DispatchRefused), self._node.options.prefiller_timeout_s
        )
        refusals = [answer.reason for answer in answers if isinstance(answer, m.DispatchRefused)]
        return f"the prefiller refuses: {refusals[0]}" if refusals else ""

    async def answers(self, instance: Instance, timeout_s: float) -> bool:
        """Whether a prefiller that our engine has given up lives: it may only have been frozen, or cut off."""
        self._asker.revive(instance)
        probe = m.Probe(rank_name("0", self._node.rank, self._node.pool.tp), 1)
        try:
            await self._asker.ask_all(instance, probe, (m.Progress,), timeout_s)
        except (NoAnswer, Unreachable):
            return False
        return True

    def _receiver_for(self, instance: Instance) -> KvReceiver:
        """Raises LayoutMismatch, or PullFailed for a prefiller whose KV cannot be used here."""
        ours = self._node.pool.layout_beside(instance.layout)
        described = Worker(self._mailbox.address, ours.to_wire(), self._node.pool.form)
        if differs := mismatch(instance.workers[0], described):
            raise PullFailed(differs)
        if ours not in self._receivers:
            self._receivers[ours] = KvReceiver(ours, {self._node.rank: self._node.memory(ours)}, None)
        return self._receivers[ours]

    async def _arrive(self, reception: Reception, pull: Pull, part: Part) -> None:
        """Returns when everything is counted and aux is here. Raises if that will not happen."""
        all_there = self._all_there(reception, pull, part)
        if lost := await self._asker.lost_before_arrival(all_there, part, pull.stop):
            raise PullFailed(pull.progress.error or lost)

    async def _all_there(self, reception: Reception, pull: Pull, part: Part) -> None:
        """Aux first: while it is missing the pages are still the prefiller's, and can be taken back."""
        load_s = self._node.options.load_s
        deadline_at_s = loop_time_s() + load_s
        if await set_in_time(pull.rows_came, load_s):
            with contextlib.suppress(WaitTimeout):
                await reception.arrived(max(deadline_at_s - loop_time_s(), 0.0))
                return
        raise PullFailed(f"not all of it came within load_s={load_s:g}: {await self._asker.how_far(part)}")

    async def _on_aux(self, sender: bytes, aux: Aux) -> m.Message:
        """Only from rank 0 of the prefiller that was asked."""
        pull = self._pulls.get((aux.request, aux.attempt))
        identity = self._mailbox.wire.identity
        if pull is None or identity(sender) != identity(pull.instance.workers[0].address) or pull.progress.error:
            return m.Taken(wanted=False)
        if not pull.rows_came.is_set():
            pull.rows = aux.rows
            pull.rows_came.set()
        return m.Taken()

    async def _on_given_up(self, sender: bytes, told: GivenUp) -> m.Message:
        """From a rank of the prefiller. What has pages by now is refused when it asks."""
        pull, identity = self._pulls.get((told.request, told.attempt)), self._mailbox.wire.identity
        if pull is None or identity(sender) not in {identity(worker.address) for worker in pull.instance.workers}:
            return m.Taken(wanted=False)
        if not pull.is_begun:
            self.abort(pull, f"the prefiller refuses: {told.why}")
        return m.Taken()

    async def _let_go(self, pull: Pull) -> None:
        """Tells the prefiller that nobody will fetch it; otherwise it waits for bootstrap_s, or our load_s.

        A frozen one is told again; a lost one needs to be told nothing.
        """
        part = Part(self._name(pull), pull.attempt, pull.instance)
        self._pulls.pop((part.name, part.attempt), None)
        until_s = loop_time_s() + self._node.options.bootstrap_s
        told = ""
        while True:
            try:
                await self._asker.stop(part, pull.progress.error)
                return
            except CrossrailError as error:
                if str(error) != told:
                    log.info("room %d, given up: %s", pull.room, error)
                told = str(error)
                if isinstance(error, NoAnswer) and not error.is_silence:  # it has heard it, and something is in its way
                    return
            is_lost = any(self._mailbox.wire.is_lost(worker.address) for worker in pull.instance.workers)
            if is_lost or loop_time_s() > until_s or await set_in_time(self._closing, self._node.options.probe_s):
                return

    def _name(self, pull: Pull) -> str:
        return rank_name(str(pull.room), self._node.rank, self._node.pool.tp)

    def _keep(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
