"""The prefiller's half: sends the KV that SGLang computes here to the decoder's ranks that asked for it.

A room is a request, by the number that SGLang's router gave both sides. It begins when SGLang makes a sender for it;
the decoder's ranks ask for their parts before or after. It ends when all of them have all of it, or when one
thing failed: then for all of them. It is reported as ended only when no write reads its pages any more.

Room numbers may be used again. A room here is another one each time, a decoder's ask has an attempt; what ended is
remembered, so that what comes late of an old one is refused and never bound to a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import crossrail as xr
from crossrail._latest import Latest
from crossrail.control.deadlines import loop_time_s
from crossrail.control.mailbox import NoAnswer
from crossrail.control.wire import Unreachable
from crossrail.errors import CrossrailError, UsageError
from crossrail.integrations.instance import Worker, parse_rank_name
from crossrail.integrations.sglang.halves import OVERDUE_MAX, Overdue, Refused
from crossrail.integrations.sglang.memory import AuxRows
from crossrail.integrations.sglang.messages import Aux, Destination, GivenUp, Wanted
from crossrail.integrations.sglang.node import RankNode
from crossrail.integrations.sglang.prompts import Prompt, differ
from crossrail.integrations.sglang.state import Poll, Progress, unusable_room, wanted_twice
from crossrail.kv import NOT_YET, KvSender, KvTarget, SendJob, foreign_lease
from crossrail.kv import messages as m
from crossrail.kv.nodes.attempts import AttemptBook, Key
from crossrail.kv.transfer.plan import plan_transfer

log = logging.getLogger("crossrail.sglang")

_TICK_S = 0.25
_GRACE_S = 5.0  # for a decoder whose time is up to ask how far we are, and to say that it gives up
_EARLY_MAX = 4096  # asks for rooms that SGLang has not shown to us yet
_REMEMBERED = 4096  # asks and rooms that have ended, for what comes late


@dataclass(eq=False)
class _Ask:
    """A decoder's rank that wants its part. job: from when the number of pages is known here."""

    key: Key
    decoder: bytes
    target: KvTarget
    prefix_tokens: int
    prompt: Prompt | None
    deadline_at_s: float
    begun_s: float
    job: SendJob | None = None

    @property
    def rank(self) -> tuple[int, int]:
        _, rank, tp = parse_rank_name(self.key[1])
        return rank, tp


class _Awaited(NamedTuple):
    """A decoder, by its address, that will ask, and since when that is known."""

    decoder: bytes
    since_s: float


class _Over(NamedTuple):
    """A room that one side gave up before it heard of the other. by_us: our SGLang did, otherwise the decoder."""

    why: str
    by_us: bool
    until_s: float


@dataclass(eq=False)
class Room:
    """A request. progress: for SGLang's thread; all else is the loop's.

    pages[i]: our page of the i-th that is sent, NOT_YET before send(). sent: pages given to send(). posted: to engines.
    """

    number: int
    begun_s: float
    progress: Progress = field(default_factory=Progress)
    asks: dict[Key, _Ask] = field(default_factory=dict)
    pages: npt.NDArray[np.uint32] | None = None
    prompt: Prompt | None = None
    sent: int = 0
    posted: int = 0
    is_complete: bool = False
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # serialises chunks in SGLang's order
    finishing: int = 0  # number of asks whose end is awaited
    prefix_tokens: int = 0
    bytes_sent: int = 0
    sending_since_s: float = 0.0

    def told(self) -> str:
        """How far it is, for a decoder that waits."""
        if self.pages is None:
            return "the prefill server has not begun with the request"
        return f"the prefill server has computed {self.sent} of {len(self.pages)} pages"


class PrefillSide:
    """Threads: the event loop's, except where stated."""

    def __init__(self, node: RankNode, aux: AuxRows) -> None:
        self.layout = node.pool.layout()
        self.worker = Worker(node.wire.address, self.layout.to_wire(), node.pool.form)
        self._node = node
        self._aux = aux
        self._mailbox = node.mailbox
        self._rooms: dict[int, Room] = {}
        self._early: dict[Key, _Ask] = {}
        self._awaited: Latest[Key, _Awaited] = Latest(_EARLY_MAX)
        self._book = AttemptBook(node.mailbox, _REMEMBERED)
        self._over: Latest[int, _Over] = Latest(_REMEMBERED)
        self._opened: Latest[int, None] = Latest(_REMEMBERED)  # rooms that SGLang has shown to us
        self._refusals: Latest[int, None] = Latest(_REMEMBERED)  # that have been heard, by their numbers

    async def start(self) -> None:
        self._sender = KvSender(self.layout, {self._node.rank: self._node.memory(self.layout)})
        self._mailbox.handle(Wanted, self._on_wanted)
        self._mailbox.handle(Destination, self._on_destination)
        self._mailbox.handle(m.Probe, self._on_probe)
        self._mailbox.handle(m.Withdraw, self._on_withdraw)
        self._mailbox.spawn(self._watch(), "watching rooms")
        self._mailbox.start()

    async def close(self) -> None:
        """Returns when none of our writes is in flight any more."""
        for room in list(self._rooms.values()):
            self._fail(room, "the prefiller is closing")
        await self._sender.close()

    # ---- what SGLang says

    async def open(self, number: int) -> Room:
        room = Room(number, loop_time_s())
        why = unusable_room(number) or (f"room {number} is under way already" if number in self._rooms else "")
        if why:
            room.progress.fail(why)
            room.progress.end()
            return room
        self._rooms[number] = room
        self._opened[number] = None
        over = self._over.pop(number, None)
        if over is not None and not over.by_us:
            self._fail(room, over.why)
            return room
        for ask in [ask for ask in self._early.values() if parse_rank_name(ask.key[1])[0] == str(number)]:
            del self._early[ask.key]
            self._join(room, ask)
        return room

    def refuse(self, told: list[Refused]) -> None:
        """Halves of requests that SGLang refused, or that are lost, before they came to this rank or its decoder."""
        new = [refused for refused in told if refused.number not in self._refusals]
        waiting: defaultdict[int, list[Key]] = defaultdict(list)
        for key in (*self._early, *self._awaited) if new else ():
            waiting[_number_of(key[1])].append(key)
        for refused in new:
            self._refusals[refused.number] = None
            keys = waiting[refused.room]
            if refused.by_decoder:
                self._refused_by_decoder(refused, is_asked_for=bool(keys))
            elif refused.room not in self._opened:  # else its sender tells what becomes of it
                self._refused_by_us(refused, keys)

    def _refused_by_us(self, refused: Refused, keys: list[Key]) -> None:
        for key in keys:
            self._early.pop(key, None)
            self._book.end(key, None, "failed", refused.why)
            self._tell_given_up(key, refused.why)
        if not keys:
            self._give_up(refused.room, refused.why, by_us=True)

    def _refused_by_decoder(self, refused: Refused, *, is_asked_for: bool) -> None:
        """Decoders that have asked say themselves what becomes of it; perhaps it is another of that number."""
        room = self._rooms.get(refused.room)
        if is_asked_for or (room is not None and room.asks):
            return
        if room is not None:
            self._fail(room, refused.why)
        elif refused.room not in self._opened:
            self._give_up(refused.room, refused.why, by_us=False)

    def overdue(self) -> Overdue:
        """What decoders wait for, and SGLang has not shown to us for long; and the reverse."""
        after_s = self._node.options.other_half_s
        until_s = loop_time_s() - after_s
        waiting = [(ask.begun_s, key) for key, ask in self._early.items()]
        waiting += [(awaited.since_s, key) for key, awaited in self._awaited.items()]
        rooms = dict.fromkeys(_number_of(key[1]) for since_s, key in sorted(waiting) if since_s < until_s)
        announced = {_number_of(key[1]) for key in self._awaited}
        unasked = [
            room.number
            for room in self._rooms.values()
            if room.begun_s < until_s and not room.asks and not room.progress.error and room.number not in announced
        ]
        missing = [room for room in rooms if room not in self._opened]
        return Overdue(missing[:OVERDUE_MAX], after_s, unasked[:OVERDUE_MAX])

    def set_pages(self, room: Room, count: int, prompt: Prompt | None = None) -> None:
        """How many pages there will be in all, and of what. When all ranks of the decoder have asked; what has ended
        stays so.
        """
        room.pages, room.prompt = np.full(count, NOT_YET, np.uint32), prompt
        for ask in list(room.asks.values()):
            self._begin(room, ask)

    def send(self, room: Room, indices: npt.NDArray[np.uint32], rows: list[bytes] | None, ready: Any) -> None:
        """The next pages. rows: of aux, with the last pages. ready: a CUDA event, or anything that tells when they are
        computed.
        """
        if room.pages is None or room.sent + len(indices) > len(room.pages):
            self._fail(room, f"{room.sent + len(indices)} pages are sent, init announced {_count(room.pages)}")
            return
        if not room.sent:
            room.sending_since_s = loop_time_s()
        first, room.sent = room.sent, room.sent + len(indices)
        room.progress.advance(Poll.TRANSFERRING)
        self._mailbox.spawn(self._post(room, first, indices, rows, ready), f"sending room {room.number}")

    def abort(self, room: Room, why: str) -> None:
        self._fail(room, why)

    # ---- rooms

    def _join(self, room: Room, ask: _Ask) -> None:
        """A rank of the decoder has pages for it."""
        others = [other for other in room.asks.values() if other.rank[0] == ask.rank[0] or other.rank[1] != ask.rank[1]]
        agreed = next(iter(room.asks.values()), ask)
        if any(other.key[:2] == ask.key[:2] for other in others):
            why = wanted_twice(room.number)
        elif others:
            why = f"two decoders want room {room.number}: {others[0].key[1]} and {ask.key[1]}"
        elif (agreed.prefix_tokens, agreed.target.tokens) != (ask.prefix_tokens, ask.target.tokens):
            why = f"ranks of the decoder differ in what they want of room {room.number}"
        else:
            why = ""
        room.asks[ask.key] = ask
        if why:
            self._fail(room, why)
            return
        room.prefix_tokens = ask.prefix_tokens
        if len(room.asks) == ask.rank[1]:
            room.progress.advance(Poll.WAITING_FOR_INPUT)
        if room.pages is not None:
            self._begin(room, ask)

    def _begin(self, room: Room, ask: _Ask) -> None:
        if room.progress.error or room.progress.is_over:  # since SGLang polled: nobody would end the job
            return
        assert room.pages is not None
        tokens = len(room.pages) * self.layout.page_tokens
        try:
            if ask.target.tokens != tokens:
                wanted = self.layout.pages_of(ask.target.tokens)
                raise UsageError(f"the decoder has {wanted} pages for it, {len(room.pages)} are to be sent")
            if why := differ(ask.prompt, room.prompt):
                raise UsageError(why)
            lease = foreign_lease(ask.target.request, room.pages, self.layout.page_tokens)
            ask.job = self._sender.open(ask.target, lease)
        except CrossrailError as error:
            self._fail(room, str(error))
            return
        room.finishing += 1
        self._mailbox.spawn(self._finish(room, ask.job), f"ending {ask.target.request}")

    async def _post(
        self, room: Room, first: int, indices: npt.NDArray[np.uint32], rows: list[bytes] | None, ready: Any
    ) -> None:
        async with room.turn:
            if ready is not None:
                try:
                    await asyncio.to_thread(ready.synchronize)
                except RuntimeError as error:
                    self._fail(room, f"the GPU failed: {error}")
            if room.progress.error or room.progress.is_over:
                return
            assert room.pages is not None
            room.pages[first : first + len(indices)] = indices
            room.posted = first + len(indices)
            jobs = [ask.job for ask in room.asks.values() if ask.job is not None and not ask.job.stopped]
            try:
                if len(indices):
                    end = room.posted * self.layout.page_tokens
                    self._sender.begin_step([(job, end) for job in jobs])
                    self._sender.layer_done(self.layout.layers)
                    room.bytes_sent += len(indices) * self.layout.layers * self.layout.block_bytes
            except CrossrailError as error:
                self._fail(room, str(error))
                return
        if rows is not None and self._node.rank == 0:
            await self._send_rows(room, rows)
        room.is_complete = rows is not None
        self._end_if_over(room)

    async def _send_rows(self, room: Room, rows: list[bytes]) -> None:
        """Every rank of the decoder takes them, or the room fails."""

        async def send(ask: _Ask) -> None:
            left_s = max(ask.deadline_at_s - loop_time_s(), 0.0)
            taken = await self._mailbox.ask(ask.decoder, Aux(*ask.key[1:], rows), m.Taken, left_s)
            if not taken.wanted:
                raise NoAnswer(f"{ask.key[1]} does not want it any more")

        ends = await asyncio.gather(*(send(ask) for ask in list(room.asks.values())), return_exceptions=True)
        for end in ends:
            if isinstance(end, (NoAnswer, Unreachable)):
                self._fail(room, f"aux of room {room.number}: {end}")
            elif isinstance(end, BaseException):
                raise end

    async def _finish(self, room: Room, job: SendJob) -> None:
        try:
            await job.finish()
        except CrossrailError as error:
            self._fail(room, str(error))
        job.lease.release()
        room.finishing -= 1
        self._end_if_over(room)

    def _fail(self, room: Room, why: str) -> None:
        if room.progress.is_over:
            return
        room.progress.fail(why)
        for ask in room.asks.values():
            if ask.job is not None and not ask.job.stopped:
                self._mailbox.spawn(ask.job.cancel(room.progress.error), f"stopping {ask.target.request}")
        self._end_if_over(room)

    def _end_if_over(self, room: Room) -> None:
        progress = room.progress
        if progress.is_over or room.finishing or not (progress.error or room.is_complete):
            return
        if progress.error:
            sent = f"{room.posted} of {_count(room.pages)} pages sent"
            log.warning("room %d to %s: %s (%s)", room.number, _decoders(room), progress.error, sent)
        else:
            lasted_s = loop_time_s() - room.sending_since_s
            log.debug("room %d to %s: %d bytes in %.3f s", room.number, _decoders(room), room.bytes_sent, lasted_s)
        state: m.Ended = "failed" if progress.error else "written"
        for key, ask in room.asks.items():
            self._book.end(key, ask.job, state, progress.error)
        if progress.error and not room.asks:
            self._give_up(room.number, progress.error, by_us=True)
        if self._rooms.get(room.number) is room:
            del self._rooms[room.number]
        progress.end()

    # ---- what decoders say

    async def _on_wanted(self, sender: bytes, wanted: Wanted) -> m.Message:
        key = self._book.key_of(sender, wanted)
        if refusal := self._refusal(key):
            return refusal
        if key not in self._early and self._room_of(key) is None:  # otherwise it has asked already
            self._awaited[key] = _Awaited(sender, loop_time_s())
        return m.Dispatched(wanted.request, wanted.attempt)

    def _refusal(self, key: Key) -> m.DispatchRefused | None:
        """For an attempt that has ended, and one of a room that was given up here before its decoder was heard of."""
        _, request, attempt = key
        number = _number_of(request)
        if key in self._book.ended:
            why = f"this attempt has ended: {self._book.ended[key].detail}"
            return m.DispatchRefused(request, attempt, m.clipped(why))
        over = self._over.pop(number, None)
        if over is None or not over.by_us or number in self._rooms:
            return None
        self._book.end(key, None, "failed", over.why)
        return m.DispatchRefused(request, attempt, m.clipped(over.why))

    async def _on_destination(self, sender: bytes, asked: Destination) -> m.Message:
        key = self._book.key_of(sender, asked)
        answer = (asked.request, asked.attempt)
        _, rank, tp = parse_rank_name(asked.request)
        if refusal := self._refusal(key):
            return refusal
        awaited = self._awaited.pop(key, None)
        try:
            target = KvTarget.from_wire(asked.ticket)
            plan_transfer(self.layout, target.layout, target.request)
        except CrossrailError as refusal:
            return m.DispatchRefused(*answer, m.clipped(refusal))
        if target.request != asked.request or target.layout.tp != tp or target.ranks[rank] is None:
            return m.DispatchRefused(*answer, "the ticket is for another rank than the one that asks")
        room = self._rooms.get(_number_of(asked.request))
        if key in self._early or (room is not None and key in room.asks):
            return m.Dispatched(*answer)
        now_s = loop_time_s()
        begun_s = awaited.since_s if awaited is not None else now_s
        ask = _Ask(key, sender, target, asked.prefix_tokens, asked.prompt, now_s + asked.timeout_s + _GRACE_S, begun_s)
        if room is None:
            if len(self._early) >= _EARLY_MAX:
                return m.DispatchRefused(*answer, f"{_EARLY_MAX} requests wait here that nobody prefills")
            self._early[key] = ask
            return m.Dispatched(*answer)
        self._join(room, ask)
        if room.progress.error:
            return m.DispatchRefused(*answer, m.clipped(room.progress.error))
        return m.Dispatched(*answer)

    async def _on_probe(self, sender: bytes, probe: m.Probe) -> m.Message:
        key = self._book.key_of(sender, probe)
        answer = (probe.request, probe.attempt)
        if key in self._book.ended:
            return self._book.ended[key]
        if key in self._early:
            return m.Progress(*answer, "queued", "the prefill server has not got the request")
        room = self._room_of(key)
        if room is None:
            return m.Progress(*answer, "unknown")
        if room.progress.error:
            return m.Progress(*answer, "failed", m.clipped(room.progress.error))
        return m.Progress(*answer, "running", room.told())

    async def _on_withdraw(self, sender: bytes, withdraw: m.Withdraw) -> m.Message:
        """Answers once nothing of it can land any more; if its Destination still arrives, it is refused."""
        key = self._book.key_of(sender, withdraw)
        number = _number_of(withdraw.request)
        self._awaited.pop(key, None)
        if key in self._book.ended:
            return self._book.quiesced(key)
        why = f"the decoder gave it up: {withdraw.reason}" if withdraw.reason else "the decoder gave it up"
        room = self._rooms.get(number)
        ask = self._early.pop(key, None) or (room.asks.get(key) if room is not None else None)
        if room is None:
            self._give_up(number, why, by_us=False)
        elif not any(
            other[:2] == key[:2] and other[2] > key[2] for other in room.asks
        ):  # otherwise it is about an older one
            self._fail(room, why)
        job = ask.job if ask is not None else None
        if job is not None:
            await job.cancel(why)
        if key not in self._book.ended:
            self._book.end(key, job, "failed", why)
        return self._book.quiesced(key, job)

    # ---- time

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = loop_time_s()
            for room in list(self._rooms.values()):
                self._look_at(room, now_s)
            for key, ask in list(self._early.items()):
                if self._book.why_unwanted(ask.decoder, ask.deadline_at_s):
                    del self._early[key]
                    self._book.end(key, None, "failed", "nobody prefilled it in time")
            decoders = {awaited.decoder for awaited in self._awaited.values()}
            gone = {decoder for decoder in decoders if self._mailbox.wire.is_lost(decoder)}
            for key in [key for key, awaited in self._awaited.items() if awaited.decoder in gone]:
                del self._awaited[key]
                self._lose(key)
            for number in [number for number, over in self._over.items() if now_s > over.until_s]:
                del self._over[number]

    def _look_at(self, room: Room, now_s: float) -> None:
        bootstrap_s = self._node.options.bootstrap_s
        if room.progress.poll is Poll.BOOTSTRAPPING and now_s > room.begun_s + bootstrap_s:
            self._fail(room, self._why_undecoded(room, bootstrap_s))
        for ask in room.asks.values():
            if why := self._book.why_unwanted(ask.decoder, ask.deadline_at_s):
                self._fail(room, why)

    def _why_undecoded(self, room: Room, bootstrap_s: float) -> str:
        heard = next(
            (awaited.decoder for key, awaited in self._awaited.items() if _number_of(key[1]) == room.number), b""
        )
        if heard or room.asks:
            return f"no decoder had pages for room {room.number} within {bootstrap_s:g} s"
        return (
            f"no decode server has asked for room {room.number} within {bootstrap_s:g} s (bootstrap_s): has the router "
            "sent the other half of the request to one?"
        )

    def _lose(self, key: Key) -> None:
        """A decoder ended before it asked: what nobody else has asked for is over."""
        number, why = _number_of(key[1]), "its decoder is gone"
        self._book.end(key, None, "failed", why)
        room = self._rooms.get(number)
        if room is None and number not in self._opened:  # otherwise it has ended by another decoder
            self._give_up(number, why, by_us=False)
        elif room is not None and all(other[0] == key[0] for other in room.asks):
            self._fail(room, why)

    # ---- what ended

    def _room_of(self, key: Key) -> Room | None:
        room = self._rooms.get(_number_of(key[1]))
        return room if room is not None and key in room.asks else None

    def _tell_given_up(self, key: Key, why: str) -> None:
        """A decoder that has announced itself may wait for pages as long as there are none, and asks nothing."""

        async def tell(decoder: bytes) -> None:
            with contextlib.suppress(NoAnswer, Unreachable):
                told = GivenUp(key[1], key[2], m.clipped(why))
                await self._mailbox.ask(decoder, told, m.Taken, self._node.options.prefiller_timeout_s)

        if (awaited := self._awaited.pop(key, None)) is not None:
            self._mailbox.spawn(tell(awaited.decoder), f"giving up {key[1]}")

    def _give_up(self, number: int, why: str, *, by_us: bool) -> None:
        keys = [key for key in self._awaited if _number_of(key[1]) == number] if by_us else []
        for key in keys:
            self._book.end(key, None, "failed", why)
            self._tell_given_up(key, why)
        self._over[number] = _Over(why, by_us, loop_time_s() + self._node.options.bootstrap_s)


def _number_of(request: str) -> int:
    """The room that a decoder's rank asks about. Raises UsageError for a name of none."""
    name = parse_rank_name(request)[0]
    if not name.isdecimal():
        raise UsageError(f"{request!r:.140} names no room")
    return int(name)


def _decoders(room: Room) -> str:
    """Which have asked for it, for people to read."""
    names = sorted({xr.Address.from_bytes(ask.decoder).name for ask in room.asks.values()})
    return ", ".join(names) or "no decoder"


def _count(pages: npt.NDArray[np.uint32] | None) -> int:
    return 0 if pages is None else len(pages)
