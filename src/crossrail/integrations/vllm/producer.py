"""The producer's half of a worker: offers the prompts that were computed here to whoever asks for them.

An offer is a request's KV in our blocks. Decoders' ranks ask for it, each for its own part, when they like:
- during the forward pass: what is computed by then goes with the next step, the rest layer by layer (`live`);
- after it: all at once (`late`), out of blocks that vLLM keeps for us meanwhile.
It ends, and is reported once, when every rank of the decoder that asked has it or has withdrawn; when nobody was heard
of for a lease; or when vLLM dropped it. In each case only after the last write out of its blocks has ended. An ask that
is refused, for another prompt for example, ends nothing: the decoder that it is for may still come.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from crossrail._latest import Latest
from crossrail.control.deadlines import loop_time_s
from crossrail.control.mailbox import Mailbox
from crossrail.errors import CrossrailError, UsageError, WaitTimeout
from crossrail.integrations.instance import engine_name, parse_rank_name
from crossrail.integrations.vllm import orders as o
from crossrail.integrations.vllm.options import VllmOptions
from crossrail.integrations.vllm.prompts import differ
from crossrail.kv import NOT_YET, KvLayout, KvSender, KvTarget, RankMemory, SendJob, foreign_lease
from crossrail.kv import messages as m
from crossrail.kv.nodes.attempts import AttemptBook, Key
from crossrail.kv.transfer.plan import plan_transfer
from crossrail.kv.transfer.sender import Step

log = logging.getLogger("crossrail.vllm")

_TICK_S = 0.5
_STALE = "vLLM's cache was reset at the producer when a part of the prompt had been sent"
_UNSEEN_MAX = 4096  # transfers that decoders ask for and that were not shown to us yet
_REMEMBERED = 4096  # asks and transfers that have ended, for those who ask again


@dataclass
class _Ask:
    """A decoder's rank that wants an offer. prompt: what it takes the request for, as in orders.Offer.

    job: from when its transfer began; sent: its tokens that were planned.
    """

    key: Key
    decoder: bytes
    target: KvTarget
    prompt: bytes
    deadline_at_s: float
    job: SendJob | None = None
    sent: int = 0


@dataclass
class _Offer:
    """Invariant: pages[i] is NOT_YET, or the block of the request's i-th page as vLLM said last.

    computed: tokens whose KV is in the blocks. request "": asked for before vLLM has shown it to us.
    held: vLLM keeps the blocks until we report it. dropped: why nobody is to get it, "": somebody may.
    tp: of the decoder, once one of its ranks was heard; ended_ranks: those that have it, or do not want it any more.
    """

    transfer_id: str
    request: str = ""
    tokens: int = 0
    prompt: bytes = b""
    pages: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    computed: int = 0
    held: bool = False
    dropped: str = ""
    heard_s: float = 0.0
    tp: int = 0
    ended_ranks: set[int] = field(default_factory=set)
    asks: dict[Key, _Ask] = field(default_factory=dict)

    def told(self) -> str:
        """How far it is, for a decoder that waits."""
        if not self.request:
            return f"no request with transfer_id {self.transfer_id} has come to the producer"
        return f"the producer has computed {self.computed} of {self.tokens} tokens"


@dataclass
class LiveStep:
    """A forward pass whose layers are sent as they are computed. Any thread, one at a time, and one step after another:
    all steps add to the same word.
    """

    sender: KvSender
    step: Step
    is_abandoned: bool = False

    def layers_done(self, layers: int) -> None:
        """So many more are in the blocks. Nothing once it was abandoned: the word counts for the next step then."""
        if not self.is_abandoned:
            self.sender.layer_done(layers)

    def abandon(self, reason: str) -> None:
        """The rest will not be: its transfers end."""
        self.is_abandoned = True
        self.step.abandon(reason)


class Senders:
    """Two on one memory, since a word serves one model: what goes late does so while the model is at other layers."""

    def __init__(self, layout: KvLayout, rank: int, memory: RankMemory) -> None:
        self.live = KvSender(layout, {rank: memory})
        self.late = KvSender(layout, {rank: memory})

    async def close(self) -> None:
        await self.live.close()
        await self.late.close()


class Producer:
    """Threads: the event loop's. on_sent(request): its blocks may be freed; called once for each finished or dropped.
    give_up(decoder): ends all that is under way to it, as EngineWire's.

    counts: asks by how they ended, and leases that ran out; never reset.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        layout: KvLayout,
        rank: int,
        memory: RankMemory,
        options: VllmOptions,
        on_sent: Callable[[str], None],
        give_up: Callable[[bytes], None],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._mailbox = mailbox
        self._layout = layout
        self._options = options
        self._on_sent = on_sent
        self._give_up = give_up
        self._rank = rank
        self._memory = memory
        self._made: Senders | None = None
        self._offers: dict[str, _Offer] = {}  # by request
        self._by_transfer: dict[str, _Offer] = {}
        self._book = AttemptBook(mailbox, _REMEMBERED)
        self._over: Latest[str, str] = Latest(_REMEMBERED)  # transfers, and why nobody can have them any more
        mailbox.handle(m.Dispatch, self._on_dispatch)
        mailbox.handle(m.Probe, self._on_probe)
        mailbox.handle(m.Withdraw, self._on_withdraw)
        mailbox.spawn(self._watch(), "watching leases")

    async def close(self) -> None:
        """Returns when none of our writes is in flight any more."""
        if self._made is not None:
            await self._made.close()

    @property
    def _senders(self) -> Senders:
        """Made when they are needed: somebody looks at their words all the time, which costs a consumer nothing."""
        if self._made is None:
            self._made = Senders(self._layout, self._rank, self._memory)
        return self._made

    # ---- what vLLM says, in the order of its steps

    def begin_step(self, orders: o.Orders) -> LiveStep | None:
        """Before the forward pass. None: no layer of it is to be sent."""
        for new in orders.offers:
            self._add(new)
        ends: dict[str, int] = {}
        for chunk in orders.chunks:
            offer = self._offers[chunk.request]
            room = offer.pages[chunk.first : chunk.first + len(chunk.blocks)]
            room[:] = chunk.blocks[: len(room)]  # blocks behind the prompt's are for what is generated
            ends[chunk.request] = chunk.end
        loads: list[tuple[SendJob, int]] = []
        if self._options.layerwise:
            for request, end in ends.items():
                loads += self._live_loads(self._offers[request], end)
        step = LiveStep(self._senders.live, self._senders.live.begin_step(loads)) if loads else None
        for name in orders.finished:
            self._hold(self._offers[name], "")
        for name in orders.dropped:
            self._hold(self._offers[name], "its request was aborted at the producer")
        return step

    def end_step(self, orders: o.Orders) -> None:
        """Call this after the forward pass: its KV is in the blocks now."""
        for chunk in orders.chunks:
            offer = self._offers.get(chunk.request)
            if offer is not None:
                offer.computed = max(offer.computed, chunk.end)
                self._send_late(offer)

    async def preempt(self, requests: list[str], stale: list[str]) -> None:
        """Returns when no write reads the blocks of these offers, and forgets the blocks. What was sent stays sent;
        decoders that have got a part of what is stale get no more.

        A frozen decoder that holds a write up for quiesce_s is given up, with all that it fetches from here.
        Raises WaitTimeout when even that ends no write for as long again: the blocks must not be used.
        """
        offers = [self._offers[request] for request in requests]
        asks = [ask for offer in offers for ask in offer.asks.values() if ask.job is not None]
        for ask in await self._stirring(asks):
            log.error(
                "transfer %s: its decoder has held up writes out of preempted blocks for %g s, and is given up",
                ask.target.request,
                self._options.quiesce_s,
            )
            self._give_up(ask.decoder)
        for ask in await self._stirring(asks):
            raise WaitTimeout(f"transfer {ask.target.request}: its decoder holds up writes out of preempted blocks")
        for offer in offers:
            log.info("transfer %s: its request was preempted at %d tokens", offer.transfer_id, offer.computed)
            offer.computed = 0
            offer.pages[:] = NOT_YET
        begun = [self._offers[request] for request in stale if request in self._offers]
        jobs = [ask.job for offer in begun for ask in offer.asks.values() if ask.job is not None and ask.sent]
        await asyncio.gather(*(job.cancel(_STALE) for job in jobs))

    async def _stirring(self, asks: list[_Ask]) -> list[_Ask]:
        """Those of them whose writes are still in flight after quiesce_s."""
        jobs = [ask.job for ask in asks if ask.job is not None]
        rested = await asyncio.gather(*(job.at_rest(self._options.quiesce_s) for job in jobs), return_exceptions=True)
        for result in rested:
            if isinstance(result, BaseException) and not isinstance(result, WaitTimeout):
                raise result
        return [ask for ask, result in zip(asks, rested, strict=True) if isinstance(result, WaitTimeout)]

    def _add(self, new: o.Offer) -> None:
        offer = self._by_transfer.get(new.transfer_id)
        if offer is not None and offer.request:
            log.error("request %s: transfer %s is under way already; it goes nowhere", new.request, new.transfer_id)
            offer = _Offer(new.transfer_id, dropped="another request has this transfer_id")
        elif offer is None:
            offer = self._by_transfer[new.transfer_id] = _Offer(new.transfer_id)
        offer.request, offer.tokens, offer.prompt = new.request, new.tokens, new.prompt
        offer.pages = np.full(self._layout.pages_of(new.tokens), NOT_YET, np.uint32)
        offer.heard_s = loop_time_s()
        self._offers[new.request] = offer

    def _hold(self, offer: _Offer, dropped: str) -> None:
        offer.held = True
        offer.dropped = offer.dropped or dropped
        offer.heard_s = loop_time_s()
        if dropped:
            for ask in list(offer.asks.values()):
                self._stop(offer, ask, dropped)
        self._end_if_over(offer)

    # ---- transfers

    def _live_loads(self, offer: _Offer, end: int) -> list[tuple[SendJob, int]]:
        loads = []
        for ask in list(offer.asks.values()):
            job = ask.job or self._open(offer, ask, self._senders.live)
            # Tokens computed a second time, after a preemption, have been sent already.
            if job is not None and not job.stopped and ask.sent < end:
                loads.append((job, end))
                ask.sent = end
        return loads

    def _send_late(self, offer: _Offer) -> None:
        """Whoever asked and has nothing yet gets all, if it is all there."""
        if not offer.request or offer.computed < offer.tokens:
            return
        for ask in list(offer.asks.values()):
            if ask.job is None and (job := self._open(offer, ask, self._senders.late)) is not None:
                ask.sent = offer.tokens
                self._senders.late.begin_step([(job, offer.tokens)])
                self._senders.late.layer_done(self._layout.layers)

    def _open(self, offer: _Offer, ask: _Ask, sender: KvSender) -> SendJob | None:
        """None: it cannot be sent, and the ask has ended."""
        if why := self._unfit(offer, ask):
            self._end(offer, ask, "failed", why, is_refused=True)
            return None
        try:
            lease = foreign_lease(ask.target.request, offer.pages, self._layout.page_tokens)
            job = ask.job = sender.open(ask.target, lease)
        except UsageError as error:
            self._end(offer, ask, "failed", str(error))
            return None
        self._mailbox.spawn(self._finish(offer, ask, job), f"sending {ask.target.request}")
        return job

    def _unfit(self, offer: _Offer, ask: _Ask) -> str:
        if ask.target.tokens != offer.tokens:
            return f"the decoder's prompt has {ask.target.tokens} tokens, the one prefilled here {offer.tokens}"
        if why := differ(ask.prompt, offer.prompt):
            return why
        others = (other for other in offer.asks.values() if other is not ask and other.job is not None)
        if any(other.target.request == ask.target.request for other in others):
            return "it is on its way to another decoder, or to this one's attempt before"
        return ""

    async def _finish(self, offer: _Offer, ask: _Ask, job: SendJob) -> None:
        state: m.Ended = "written"
        detail = ""
        try:
            await job.finish()
        except CrossrailError as error:
            state, detail = "failed", str(error)
        job.lease.release()
        self._end(offer, ask, state, detail)

    def _stop(self, offer: _Offer, ask: _Ask, why: str) -> None:
        if ask.job is None:
            self._end(offer, ask, "failed", why)
        elif not ask.job.stopped:
            self._mailbox.spawn(ask.job.cancel(why), f"stopping {ask.target.request}")

    def _end(self, offer: _Offer, ask: _Ask, state: m.Ended, detail: str, *, is_refused: bool = False) -> None:
        """No write for this ask is under way any more, nor will be."""
        name = ask.key[1]
        del offer.asks[ask.key]
        if not is_refused:
            offer.ended_ranks.add(parse_rank_name(name)[1])
        self._book.end(ask.key, ask.job, state, detail)
        self.counts[state] += 1
        if state == "failed":
            log.warning("transfer %s: %s", name, detail)
        self._end_if_over(offer)

    def _end_if_over(self, offer: _Offer, expired: bool = False) -> None:
        if not offer.held or offer.asks or self._offers.get(offer.request) is not offer:
            return
        has_all = 0 < offer.tp <= len(offer.ended_ranks)
        if not (has_all or offer.dropped or expired):
            return
        del self._offers[offer.request]
        if self._by_transfer.get(offer.transfer_id) is offer:
            del self._by_transfer[offer.transfer_id]
            why = offer.dropped or ("its lease has run out" if expired else "a decoder has had it, or has let it go")
            self._over[offer.transfer_id] = why
        self._on_sent(offer.request)

    # ---- what decoders say

    async def _on_dispatch(self, sender: bytes, dispatch: m.Dispatch) -> m.Message:
        answer = self._take(sender, dispatch)
        if isinstance(answer, m.DispatchRefused):
            log.warning("transfer %s: refused to %s: %s", dispatch.request, engine_name(sender), answer.reason)
        return answer

    def _take(self, sender: bytes, dispatch: m.Dispatch) -> m.Dispatched | m.DispatchRefused:
        key = self._book.key_of(sender, dispatch)
        answer = (dispatch.request, dispatch.attempt)
        transfer_id, _, tp = parse_rank_name(dispatch.request)
        if key in self._book.ended:
            return m.DispatchRefused(*answer, m.clipped(f"this attempt has ended: {self._book.ended[key].detail}"))
        if transfer_id in self._over and transfer_id not in self._by_transfer:
            return m.DispatchRefused(*answer, m.clipped(f"transfer {transfer_id}: {self._over[transfer_id]}"))
        if transfer_id not in self._by_transfer and len(self._by_transfer) >= len(self._offers) + _UNSEEN_MAX:
            return m.DispatchRefused(*answer, f"{_UNSEEN_MAX} transfers were asked for that nobody prefills")
        try:
            target = KvTarget.from_wire(dispatch.ticket)
            plan_transfer(self._layout, target.layout, target.request)
        except UsageError as refusal:
            return m.DispatchRefused(*answer, m.clipped(refusal))
        if target.request != dispatch.request or target.layout.tp != tp:
            return m.DispatchRefused(*answer, "the ticket is for another rank than the one that asks")
        offer = self._heard(transfer_id, tp)
        if key in offer.asks:
            return m.Dispatched(*answer)
        ask = _Ask(key, sender, target, dispatch.tokens, loop_time_s() + dispatch.timeout_s)
        refusal_words = offer.dropped or (offer.request and self._unfit(offer, ask))
        if refusal_words:
            self._book.end(key, None, "failed", refusal_words)
            return m.DispatchRefused(*answer, m.clipped(refusal_words))
        offer.asks[key] = ask
        self._send_late(offer)
        return m.Dispatched(*answer)

    async def _on_probe(self, sender: bytes, probe: m.Probe) -> m.Message:
        key = self._book.key_of(sender, probe)
        answer = (probe.request, probe.attempt)
        if key in self._book.ended:
            return self._book.ended[key]
        transfer_id, _, tp = parse_rank_name(probe.request)
        offer = self._by_transfer.get(transfer_id)
        if offer is None:
            return m.Progress(*answer, "unknown", m.clipped(self._over.get(transfer_id, "")))
        self._heard(transfer_id, tp)
        ask = offer.asks.get(key)
        return m.Progress(*answer, "queued" if ask is None or ask.job is None else "running", offer.told())

    async def _on_withdraw(self, sender: bytes, withdraw: m.Withdraw) -> m.Message:
        key = self._book.key_of(sender, withdraw)
        if key in self._book.ended:
            return self._book.quiesced(key)
        transfer_id, rank, tp = parse_rank_name(withdraw.request)
        offer = self._by_transfer.get(transfer_id)
        ask = offer.asks.get(key) if offer is not None else None
        why = "its decoder withdrew it"
        job = ask.job if ask is not None else None
        if job is not None:
            await job.cancel(why)
        elif offer is not None and ask is not None:
            self._end(offer, ask, "failed", why)
        else:
            self._book.end(key, None, "failed", why)
            if offer is not None:
                self._heard(transfer_id, tp).ended_ranks.add(rank)
                self._end_if_over(offer)
        return self._book.quiesced(key, job)

    def _heard(self, transfer_id: str, tp: int) -> _Offer:
        """A decoder of so many ranks shows that it wants this."""
        offer = self._by_transfer.get(transfer_id)
        if offer is None:
            offer = self._by_transfer[transfer_id] = _Offer(transfer_id)
        offer.heard_s = loop_time_s()
        offer.tp = tp
        return offer

    async def _watch(self) -> None:
        """Leases, deadlines, decoders that are gone."""
        while True:
            await asyncio.sleep(_TICK_S)
            for offer in {id(offer): offer for offer in (*self._offers.values(), *self._by_transfer.values())}.values():
                self._look_at(offer)

    def _look_at(self, offer: _Offer) -> None:
        for ask in list(offer.asks.values()):
            if why := self._book.why_unwanted(ask.decoder, ask.deadline_at_s):
                self._stop(offer, ask, f"{why}; {offer.told()}")
        expired = loop_time_s() - offer.heard_s > self._options.lease_s
        if not expired or offer.asks:
            return
        if not offer.request:  # asked for, withdrawn, and never seen
            self._by_transfer.pop(offer.transfer_id, None)
        elif offer.held and self._offers.get(offer.request) is offer:
            log.warning("transfer %s: no decoder came within %g s", offer.transfer_id, self._options.lease_s)
            self.counts["lease expired"] += 1
            self._end_if_over(offer, expired=True)
