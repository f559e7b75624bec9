"""The router: takes requests, chooses a prefiller and a decoder for each, and sees them to their end.

Life of a request here:
1. admitted, unless `requests_max` are under way (Overloaded).
2. given to a decoder, together with the prefiller that it is to ask. A decoder that is busy or silent is passed over.
3. tokens come from the decoder, in order, repeated until taken.
4. a decoder whose prefiller dies asks for another; the client sees nothing but time.
5. ended: by the decoder's word; or because the decoder is gone, the client is gone, or time is up.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import numpy as np

from crossrail.errors import CrossrailError, UsageError
from crossrail.kv import messages as m
from crossrail.kv.errors import DuplicateRequest
from crossrail.kv.mailbox import Mailbox, NoAnswer
from crossrail.kv.membership import Member, Roster
from crossrail.kv.model import Tokens
from crossrail.kv.prefix import page_hashes
from crossrail.kv.router_requests import Adopted, Adoptions, Chunk, Overloaded, Running, Unavailable
from crossrail.kv.selection import Candidate, PrefixMemory, rank
from crossrail.kv.wire import Unreachable

log = logging.getLogger("crossrail.kv")

_PREFIX_TOKENS = 64  # of a block in the router's own memory of prefixes; nodes have pages of their own sizes
_SAME_AGAIN_S = 0.5  # times the attempt: what refused or failed a moment ago may do so again
_ENDED_KEPT = 16384
_TIMELINES_KEPT = 256  # of these


@dataclass(frozen=True)
class RouterOptions:
    """heartbeat_s: how often nodes are to report. lease_s: one that was not heard of for so long is gone.

    requests_max: under way at once, more are Overloaded. queue_s: how long a request waits for a node with room.
    request_s: how long one may take in all. ask_s: how long a node may take to answer. attempts_max: prefillers tried.
    sweep_s: how often members are looked after.
    """

    heartbeat_s: float = 1.0
    lease_s: float = 4.0
    requests_max: int = 1024
    queue_s: float = 10.0
    request_s: float = 600.0
    ask_s: float = 3.0
    attempts_max: int = 8
    sweep_s: float = 0.25


class Router:
    """Threads: the event loop's. start(), then complete() any number of times side by side, then close()."""

    def __init__(self, name: str, mailbox: Mailbox, options: RouterOptions | None = None) -> None:
        self.name = name
        self.options = options or RouterOptions()
        self.roster = Roster(self.options.lease_s)
        self.counts: Counter[str] = Counter()  # requests by how they ended, and "redispatched"
        self._mailbox = mailbox
        self._running: dict[str, Running] = {}
        self._ended: OrderedDict[str, m.End] = OrderedDict()
        self._with_timeline: deque[str] = deque()
        self._adopted = Adoptions()
        self._numbers = itertools.count(1)
        self._prefixes = PrefixMemory()
        self._sent: Counter[bytes] = Counter()  # tokens under way by node, by what this router sent there
        self._room = asyncio.Event()  # set whenever something changed that a waiting request may profit from
        self.roster.on_gone(self._on_gone)
        mailbox.handle(m.Join, self._on_join)
        mailbox.handle(m.Heartbeat, self._on_heartbeat)
        mailbox.handle(m.Leave, self._on_leave)
        mailbox.handle(m.Tokens, self._on_tokens)
        mailbox.handle(m.PrefillerLost, self._on_prefiller_lost)

    @property
    def requests(self) -> int:
        """Under way."""
        return len(self._running)

    @property
    def mailbox(self) -> Mailbox:
        return self._mailbox

    def start(self) -> None:
        """Begins to take messages."""
        self._mailbox.start()
        self._mailbox.spawn(self._sweep(), "looking after members")

    async def close(self) -> None:
        """Ends requests under way here; decoders go on with theirs until another router is there. Idempotent."""
        for running in self._running.values():
            running.finish("error", "the router is closing")
        await self._mailbox.close()

    def adopted(self, request: str) -> Adopted | None:
        """A request that was begun by an earlier router, as far as it is known."""
        return self._adopted.get(request)

    def ended(self, request: str) -> m.End | None:
        """How a request ended; None when it did not, or too long ago. The latest few hundred have their timelines."""
        return self._ended.get(request)

    def new_name(self) -> str:
        """For a request; no other router, nor this one, gives it to another."""
        return f"{self._mailbox.wire.identity(self._mailbox.address).hex()[:16]}-{next(self._numbers)}"

    # --- requests ---

    async def complete(
        self,
        prompt: Tokens,
        sampling: m.Sampling,
        *,
        model: str | None = None,
        request: str | None = None,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Chunks of tokens that follow the prompt; the last has an end. Leaving the iteration cancels the request.

        model: which, None: that of any node. request: its name, None: a new one. deadline_s: from now on.
        Raises UsageError, DuplicateRequest, Overloaded, Unavailable; all before the first chunk.
        """
        running = self._admit(prompt, sampling, request, deadline_s)
        try:
            try:
                await self._place(running, model)
            except CrossrailError:
                del self._running[running.request]  # nobody has it: there is nothing to cancel
                raise
            while True:
                chunk = await self._next_chunk(running)
                running.end = chunk.end
                yield chunk
                if chunk.end is not None:
                    return
        finally:
            self._drop(running)

    def has_enough(self, request: str, why: str) -> None:
        """Whoever iterates complete() has all he wants, and leaves: it ends as "stop", not as cancelled."""
        running = self._running.get(request)
        if running is not None and not running.ended:
            running.ended = True
            running.end = m.End("stop", why)
            self._cancel(running, why)

    def _admit(self, prompt: Tokens, sampling: m.Sampling, request: str | None, deadline_s: float | None) -> Running:
        if len(prompt) == 0:
            raise UsageError("the prompt is empty: at least one token is needed")
        if len(prompt) + sampling.max_tokens > m.TOKENS_MAX:
            raise UsageError(f"{len(prompt)} + {sampling.max_tokens} tokens, at most {m.TOKENS_MAX} are served")
        request = request or self.new_name()
        if request in self._running or request in self._ended or self._adopted.get(request) is not None:
            raise DuplicateRequest(f"request {request!r} is or was under way: names are used once")
        if len(self._running) >= self.options.requests_max:
            self.counts["overloaded"] += 1
            raise Overloaded(f"{len(self._running)} requests are under way, at most {self.options.requests_max} may be")
        patience_s = min(deadline_s or self.options.request_s, self.options.request_s)
        names = page_hashes(prompt, _PREFIX_TOKENS)
        running = self._running[request] = Running(request, prompt, sampling, names, _now_s() + patience_s)
        return running

    async def _place(self, running: Running, model: str | None) -> None:
        """Finds a decoder that takes it."""
        give_up_s = min(_now_s() + self.options.queue_s, running.deadline_s)
        why = ""
        while True:
            self._room.clear()
            decoders = self._ranked("decoder", running, model)
            for candidate in decoders:
                why = await self._offer(running, candidate.member)
                if not why:
                    return
            if _now_s() >= give_up_s:
                break
            await _wait(self._room, min(0.2, give_up_s - _now_s()))
        self.counts["overloaded" if decoders else "unavailable"] += 1
        if not decoders:
            of = f" for model {model!r}" if model else ""
            raise Unavailable(why or f"no decoder{of} has joined router {self.name!r}")
        raise Overloaded(f"no node took the request within {self.options.queue_s:g} s; the last one said: {why}")

    async def _offer(self, running: Running, decoder: Member) -> str:
        """Empty when the decoder has taken it, else why not."""
        prefiller = None
        if len(running.prompt) > 1:
            prefiller = self._best_prefiller(running, decoder.record.model)
            if prefiller is None:
                return f"no prefiller for model {decoder.record.model!r} has joined router {self.name!r}"
        running.decoder = decoder
        start = m.Start(
            running.request,
            m.pack_tokens(running.prompt),
            running.sampling,
            max(running.deadline_s - _now_s(), 0.0),
            None if prefiller is None else _reference(prefiller),
        )
        try:
            answer = await self._mailbox.ask(decoder.address, start, (m.Started, m.StartRefused), self.options.ask_s)
        except (Unreachable, NoAnswer) as error:
            if running.received or running.ended:
                return ""  # only its answer was late
            # It may have begun all the same: what comes from it is refused from now on, and ends there.
            running.decoder = None
            self._tell_cancelled(running.request, decoder, "it was given to another decoder")
            return str(error)
        if isinstance(answer, m.StartRefused):
            running.decoder = None
            if not answer.busy:
                raise UsageError(answer.reason)
            return answer.reason
        self._assign(running, prefiller)
        running.charged = True
        self._sent[decoder.address] += _weight(running)
        self._prefixes.note(decoder.address, running.names)
        return ""

    async def _next_chunk(self, running: Running) -> Chunk:
        left_s = running.deadline_s - _now_s()
        try:
            return await asyncio.wait_for(running.chunks.get(), max(left_s, 0.0))
        except asyncio.TimeoutError:
            running.ended = True
            self._cancel(running, "its time is up")
            return Chunk([], m.End("deadline", "the router's time for it was up"))

    def _drop(self, running: Running) -> None:
        """Forgets a request; one that has not ended is cancelled at its decoder."""
        if self._running.pop(running.request, None) is None:
            return
        if not running.ended:
            running.ended = True
            self._cancel(running, "the client is gone")
        end = running.end or m.End("cancelled", "the client is gone")
        self.counts[end.reason] += 1
        self._keep_end(running.request, end)
        if running.decoder is not None and running.charged:
            self._discharge(running.decoder, _weight(running))
        self._assign(running, None)
        self._room.set()

    def _keep_end(self, request: str, end: m.End) -> None:
        self._ended[request] = end
        self._with_timeline.append(request)
        if len(self._with_timeline) > _TIMELINES_KEPT:
            stripped = self._with_timeline.popleft()
            self._ended[stripped] = m.End(self._ended[stripped].reason, self._ended[stripped].detail)
        while len(self._ended) > _ENDED_KEPT:
            self._ended.popitem(last=False)

    def _cancel(self, running: Running, why: str) -> None:
        if running.decoder is not None:
            self._tell_cancelled(running.request, running.decoder, why)

    def _tell_cancelled(self, request: str, decoder: Member, why: str) -> None:
        async def tell() -> None:
            try:
                await self._mailbox.ask(decoder.address, m.Cancel(request, why), m.Taken, self.options.lease_s)
            except (Unreachable, NoAnswer) as error:
                # When it comes back it offers tokens, and hears then that nobody wants them.
                log.info("cancel of %s did not reach %s: %s", request, decoder.name, error)

        self._mailbox.spawn(tell(), "cancelling")

    # --- choosing ---

    def _ranked(self, role: m.Role, running: Running, model: str | None) -> list[Candidate]:
        members = [
            member
            for member in self.roster.members(role)
            if not member.load.draining and model in (None, member.record.model)
        ]
        return rank((self._candidate(member, running) for member in members), len(running.prompt))

    def _candidate(self, member: Member, running: Running) -> Candidate:
        waiting = max(member.load.queued_tokens, self._sent[member.address])
        return Candidate(member, waiting, self._prefixes.match(member.address, running.names) * _PREFIX_TOKENS)

    def _best_prefiller(self, running: Running, model: str, avoid: bytes = b"") -> Member | None:
        """The best whose address is another than that to avoid; that one when there is no other."""
        ranked = [candidate.member for candidate in self._ranked("prefiller", running, model)]
        return next((member for member in ranked if member.address != avoid), ranked[0] if ranked else None)

    def _assign(self, running: Running, prefiller: Member | None) -> None:
        """Counts the prompt as work of its prefiller, from now on until it has another or ends."""
        if running.prefiller is not None:
            self._discharge(running.prefiller, len(running.prompt))
        running.prefiller = prefiller
        if prefiller is not None:
            self._sent[prefiller.address] += len(running.prompt)
            self._prefixes.note(prefiller.address, running.names)

    def _discharge(self, member: Member, tokens: int) -> None:
        if member.address in self._sent:  # else it is gone, and forgotten
            self._sent[member.address] -= tokens

    # --- what nodes say ---

    async def _on_join(self, sender: bytes, join: m.Join) -> m.Message:
        if join.record.address != sender:
            return m.JoinRefused(f"node {join.record.node!r} gives an address that is not its own")
        try:
            self.roster.join(join.record, join.load, _now_s())
        except UsageError as refusal:
            log.warning("refused: %s", refusal)
            return m.JoinRefused(m.clipped(refusal))
        for request in join.running:
            if request not in self._running and request not in self._ended and self._adopted.get(request) is None:
                self._adopted.add(request, sender)
        self._room.set()
        return m.Joined(self.name, self.options.heartbeat_s, self.options.lease_s)

    async def _on_heartbeat(self, sender: bytes, heartbeat: m.Heartbeat) -> m.Message:
        self._room.set()
        return m.HeartbeatTaken(self.roster.heartbeat(heartbeat.node, sender, heartbeat.load, _now_s()))

    async def _on_leave(self, sender: bytes, leave: m.Leave) -> m.Message:
        self.roster.leave(leave.node, sender)
        return m.Taken()

    async def _on_tokens(self, sender: bytes, tokens: m.Tokens) -> m.Message:
        numbers = m.unpack_tokens(tokens.tokens).tolist()
        running = self._running.get(tokens.request)
        if running is not None and running.decoder is not None and running.decoder.address == sender:
            running.take(tokens.first, numbers, tokens.end)
            if running.received and running.prefiller is not None:
                self._assign(running, None)  # a first token: the prefiller has done its part
            return m.Taken(wanted=not running.ended or tokens.end is not None)
        adopted = self._adopted.get(tokens.request)
        if adopted is not None and adopted.decoder == sender:
            adopted.take(tokens.first, numbers, tokens.end)
            return m.Taken()
        return m.Taken(wanted=False)

    async def _on_prefiller_lost(self, sender: bytes, lost: m.PrefillerLost) -> m.Message:
        running = self._running.get(lost.request) or self._adopted_as_running(lost, sender)
        if running is None or running.ended or running.decoder is None or running.decoder.address != sender:
            return m.Reassigned(lost.request, lost.attempt, None, "nobody waits for this request any more")
        if lost.attempt >= self.options.attempts_max:
            return m.Reassigned(
                lost.request, lost.attempt, None, f"{lost.attempt} prefillers were tried: {lost.reason}"
            )
        log.info("request %s, attempt %d: prefiller %s: %s", lost.request, lost.attempt, lost.node, lost.reason)
        found = await self._other_prefiller(running, running.decoder.record.model, lost)
        if found is None:
            why = f"no other prefiller within {self.options.queue_s:g} s after {lost.node!r}: {lost.reason}"
            return m.Reassigned(lost.request, lost.attempt, None, m.clipped(why))
        self.counts["redispatched"] += 1
        running.attempt = lost.attempt + 1
        self._assign(running, found)
        return m.Reassigned(lost.request, running.attempt, _reference(found))

    def _adopted_as_running(self, lost: m.PrefillerLost, sender: bytes) -> Running | None:
        """A request of an earlier router, as far as choosing a prefiller goes: nothing is known of its prompt."""
        adopted = self._adopted.get(lost.request)
        decoder = next((member for member in self.roster.members("decoder") if member.address == sender), None)
        if adopted is None or adopted.decoder != sender or decoder is None:
            return None
        nothing = np.zeros(0, np.int32)
        return Running(lost.request, nothing, m.Sampling(), [], _now_s() + self.options.queue_s, decoder=decoder)

    async def _other_prefiller(self, running: Running, model: str, lost: m.PrefillerLost) -> Member | None:
        """One that is there, or comes within queue_s. The same again, after a pause, if there is no other."""
        same_after_s = _now_s() + _SAME_AGAIN_S * lost.attempt
        self.roster.sweep(_now_s(), self._mailbox.wire.is_lost)
        give_up_s = _now_s() + self.options.queue_s
        while True:
            self._room.clear()
            found = self._best_prefiller(running, model, avoid=lost.address)
            is_other = found is not None and found.address != lost.address
            if is_other or running.ended or _now_s() >= min(give_up_s, same_after_s if found else give_up_s):
                return found
            await _wait(self._room, min(0.2, give_up_s - _now_s()))

    def _on_gone(self, member: Member, why: str) -> None:
        log.info("gone: %s", why)
        self._prefixes.forget(member.address)
        self._sent.pop(member.address, None)
        for running in self._running.values():
            # One that it was only offered to goes to another, once it has not answered.
            if running.decoder is member and running.charged and not running.ended:
                running.finish("error", f"its decoder is gone: {why}")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.options.sweep_s)
            self.roster.sweep(_now_s(), self._mailbox.wire.is_lost)


def _reference(member: Member) -> m.PrefillerRef:
    return m.PrefillerRef(member.name, member.address, member.record.layout)


def _weight(running: Running) -> int:
    return len(running.prompt) + running.sampling.max_tokens


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), max(timeout_s, 0.0))
