"""Questions and answers between nodes, over a wire that may lose, repeat and delay.

A question is sent again until it is answered or its time is up. The receiver runs each question once; a repeated one
gets the same answer. So handlers see a question at most once per incarnation, and askers get an answer or NoAnswer.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from crossrail import _ending
from crossrail._closing import AsyncClosing
from crossrail._latest import Latest
from crossrail._text import plain
from crossrail.control.asking import Asking
from crossrail.control.deadlines import in_time, in_words, loop_time_s
from crossrail.control.language import Language, Letter
from crossrail.control.messages import Failed, clipped
from crossrail.control.seal import OURS, Rejected, Sealer, Spoken
from crossrail.control.wire import Unreachable, Wire
from crossrail.errors import CrossrailError, EngineClosed, TransportError, UsageError
from crossrail.peers import Address

log = logging.getLogger("crossrail.control")

RESEND_S = 0.5
_ANSWERS_KEPT = 4096
_ANSWERS_BYTES_MAX = 32 << 20
_ASKERS_KEPT = 1 << 16  # askers some of whose answers were dropped
_CANCEL_AGAIN_S = 0.2
_TELL_AGAIN_S = 60.0  # between two lines about dropped messages of one kind: a stranger may send thousands a second
_OTHERS_KEPT = 4096  # engines of another version
_REPLY_TIMEOUT_S = 30.0  # an asker that takes no answer for so long asks again, if it is still alive

_CLOSING = "this node is closing"

_wires: weakref.WeakSet[Wire] = weakref.WeakSet()  # that had a mailbox

Handler = Callable[[bytes, Any], Awaitable[object]]
HandlerAtOnce = Callable[[bytes, Any], object]
T = TypeVar("T")


class NoAnswer(CrossrailError):
    """No answer in time: the other node may be slow, frozen or gone. It may or may not have done what was asked.

    is_silence: nothing came at all, not even a message that it could not answer.
    """

    def __init__(self, why: str, *, is_silence: bool = False) -> None:
        super().__init__(why)
        self.is_silence = is_silence


class OtherRelease(NoAnswer):
    """The other node runs another version of crossrail, whose messages we do not understand. Use one release
    everywhere.
    """

    def __init__(self, theirs: Spoken, ours: Spoken) -> None:
        super().__init__(f"the other side speaks {theirs}, this one {ours}: use one release of crossrail on both")


class Mailbox(AsyncClosing):
    """Questions and answers over one wire, and so for one engine. Threads: the event loop's.

    Lifecycle: 1. made. 2. handle() for each type of question. 3. start(). 4. close(): questions end with NoAnswer.

    dropped: messages that were not accepted, by kind: those of seal.Rejected; "type"; "unasked"; "no-handler"; "error":
    we failed to handle it; and "old": a question no newer than one whose answer was dropped, so that it may have run
    already.
    """

    def __init__(
        self, wire: Wire, secret: str | bytes, language: Language, resend_s: float = RESEND_S, spoken: Spoken = OURS
    ) -> None:
        if wire in _wires:
            raise UsageError("this wire already has a mailbox. Next: go on with that one, or open another engine")
        self.wire = wire
        self._language = language
        self._sealer = Sealer(secret, wire.identity(wire.address), wire.packet_bytes_max, language.purpose, spoken)
        _wires.add(wire)  # after what may refuse the secret: the next attempt is one on the same wire
        self._resend_s = resend_s
        self._handlers: dict[type, Handler] = {}
        self._handlers_at_once: dict[type, HandlerAtOnce] = {}
        self._asks = 0
        self._waiting: dict[int, tuple[bytes, asyncio.Future[object]]] = {}  # by ask: of whom, and the answer
        self._answered: OrderedDict[tuple[bytes, int], bytes] = OrderedDict()  # by who asked and ask
        self._answered_bytes = 0
        # By asker: the newest question whose answer was dropped.
        self._let_go: Latest[bytes, int] = Latest(_ASKERS_KEPT)
        self._being_answered: set[tuple[bytes, int]] = set()
        self._replies: set[asyncio.Future[None]] = set()  # that are on their way
        self._others: Latest[bytes, Spoken] = Latest(_OTHERS_KEPT)  # by engine: what its notice said
        self._noticed: Latest[bytes, float] = Latest(_OTHERS_KEPT)  # by engine, when it was sent one
        self._tasks: dict[asyncio.Task[None], None] = {}  # a set in the order in which they were made
        self._loop: asyncio.AbstractEventLoop | None = None  # in which start() was called
        self._is_closed = False
        self._unsorted: Counter[str] = Counter()
        self._told: dict[str, tuple[float, int]] = {}  # by kind, of drops: when the log had one, and how many since

    @property
    def address(self) -> bytes:
        """The address of our engine."""
        return self.wire.address

    @property
    def dropped(self) -> Counter[str]:
        """How many messages were not taken, by kind. Any thread."""
        return Counter(self._unsorted) + Counter(self._sealer.rejected)

    def handle(self, kind: type, handler: Handler) -> None:
        """Questions of this type go to handler(sender's address, message); what it returns is the answer.

        Handlers of different questions run side by side, each in a task that ends once the answer has gone out. One
        that raises is logged, and answers Failed.
        """
        self._handlers[kind] = handler
        self._handlers_at_once.pop(kind, None)

    def handle_at_once(self, kind: type, handler: HandlerAtOnce) -> None:
        """Like handle(), with a plain function for frequent questions: it runs as they arrive, without a task."""
        self._handlers_at_once[kind] = handler
        self._handlers.pop(kind, None)

    def start(self) -> None:
        """Begins to receive, in tasks of the running event loop. Raises UsageError where none runs."""
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise UsageError("Mailbox.start() outside of a coroutine: its event loop has to be running") from None
        self.spawn(self._receive(), "receive")

    def check_started(self) -> None:
        """UsageError before start(), and in another event loop: no answer would be heard."""
        if self._loop is None:
            raise UsageError("this mailbox was not started, and hears nothing. Next: start() it first")
        if self._loop is not asyncio.get_running_loop():
            state = "is closed" if self._loop.is_closed() else "is another one than this"
            raise UsageError(
                f"this mailbox was started in an event loop that {state}, and hears nothing here. Next: one event loop "
                "for all, such as one in a thread with asyncio.run_coroutine_threadsafe()"
            )

    async def close(self) -> None:
        """Ends handlers and questions in progress, and all later questions. Idempotent. The wire stays open."""
        # Again and again: a model's code may lose a cancellation, as asyncio.wait_for does before Python 3.12 when it
        # meets its result. Our own waits do not (deadlines.py).
        while tasks := [task for task in self._tasks if task is not asyncio.current_task()]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_CANCEL_AGAIN_S)
        self._is_closed = True  # a running update may still tell members of its end
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(NoAnswer(_CLOSING))
                future.exception()  # mark as retrieved: the asker may be gone
        self._waiting.clear()
        for reply in list(self._replies):
            reply.cancel()

    async def ask(self, to: bytes, question: object, answer: type[T] | tuple[type[T], ...], timeout_s: float) -> T:
        """The answer to a question, of one of the given types; the question is resent meanwhile.

        Raises NoAnswer after timeout_s, once this mailbox is closed, and if the answer is Failed or of another type;
        Unreachable if the peer is gone; OtherRelease, a NoAnswer, as soon as the peer says that it runs another
        version; UsageError as check_started() does.
        """
        self.check_started()
        if self._is_closed:
            raise NoAnswer(_CLOSING)
        if theirs := self._others.get(self.wire.identity(to)):
            raise OtherRelease(theirs, self._sealer.spoken)
        self._asks += 1
        ask = self._asks
        data = self._language.encode(question, ask, 0)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[object] = loop.create_future()
        self._waiting[ask] = (self.wire.identity(to), future)
        asking = Asking(partial(self._post, to, data), self._resend_s, future)
        timer = loop.call_later(timeout_s, _give_up, future, f"{type(question).__name__} within {in_words(timeout_s)}")
        try:
            asking.begin()
            got = await future
        finally:
            self._waiting.pop(ask, None)
            timer.cancel()
            asking.end()
        if not isinstance(got, answer):
            why = got.reason if isinstance(got, Failed) else f"it answered with {type(got).__name__}"
            raise NoAnswer(f"{type(question).__name__}: {why}")
        return got

    def spawn(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """Runs a coroutine concurrently with the others until close(); what it raises is logged."""

        async def guarded() -> None:
            try:
                await work
            except Exception:
                log.exception("%s failed; the node goes on", what)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.pop(task, None)
            work.close()  # a task that was cancelled before its first turn has never awaited it

        task = asyncio.ensure_future(guarded())
        self._tasks[task] = None
        task.add_done_callback(ended)
        return task

    def _post(self, to: bytes, data: bytes) -> list[asyncio.Future[None]]:
        """Posts all packets at once: so those of one message stay together, however many messages are sent
        concurrently. A receiver keeps a bounded number of packets of incomplete messages.
        """
        return [self.wire.post(to, packet) for packet in self._sealer.seal(data, self.wire.identity(to))]

    async def _receive(self) -> None:
        async for sender, packet in self._packets():
            try:
                if theirs := self._sealer.noticed(packet, self.wire.identity(sender)):
                    self._hear_of_version(sender, theirs)
                    continue
                data = self._sealer.open(packet, self.wire.identity(sender))
                if data is not None:
                    self._sort(sender, self._language.decode(data))
            except Rejected as rejection:
                if rejection.kind == "version":
                    self._tell_version(sender)
                self._tell_dropped(sender, rejection.kind, str(rejection))
            except UsageError as error:
                self._drop(sender, "type", str(error))
            except Exception as error:  # a mistake of ours: it costs this packet, and not all that come after it
                self._unsorted["error"] += 1
                self._tell_dropped(sender, "error", f"{type(error).__name__}: {error}", exc_info=True)

    def _hear_of_version(self, sender: bytes, theirs: Spoken) -> None:
        """Ends all waits for that engine's answers. It is told our version once, so that its log shows both, too."""
        identity = self.wire.identity(sender)
        if identity in self._others:
            return
        self._others[identity] = theirs
        other = OtherRelease(theirs, self._sealer.spoken)
        self._tell_dropped(sender, "notice", str(other))
        for of, future in self._waiting.values():
            if of == identity and not future.done():
                future.set_exception(other)
                future.exception()  # mark as retrieved: the asker may be gone
        self._tell_version(sender)

    def _tell_version(self, sender: bytes) -> None:
        """At intervals: a notice may be lost, and an engine that asks again has not received it."""
        identity, now_s = self.wire.identity(sender), loop_time_s()
        if now_s - self._noticed.get(identity, float("-inf")) < self._resend_s:
            return
        self._noticed[identity] = now_s
        self.spawn(self._send_notice(sender, self._sealer.notice(identity)), "a notice of our version")

    async def _send_notice(self, to: bytes, packet: bytes) -> None:
        self.wire.revive(to)
        try:
            await in_time(self.wire.send(to, packet), _REPLY_TIMEOUT_S)
        except (Unreachable, asyncio.TimeoutError) as error:
            log.info("a notice of our version could not be delivered: %s", error)

    async def _packets(self) -> AsyncIterator[tuple[bytes, bytes]]:
        told = ""
        while True:
            try:
                async for packet in self.wire.packets():
                    yield packet
                return
            except EngineClosed:
                level = logging.DEBUG if _ending.has_begun else logging.WARNING  # a process that ends is no mistake
                log.log(level, "the engine was closed before its mailbox: nothing is received any more")
                return
            except TransportError as error:  # such as no descriptor left: a node that hears nothing is of no use
                if str(error) != told:
                    log.warning("nothing can be received now, and it is tried again: %s", error)
                told = str(error)
                await asyncio.sleep(self._resend_s)

    def _drop(self, sender: bytes, kind: str, why: str) -> None:
        self._unsorted[kind] += 1
        self._tell_dropped(sender, kind, why)

    def _tell_dropped(self, sender: bytes, kind: str, why: str, exc_info: bool = False) -> None:
        now_s = loop_time_s()
        told_s, more = self._told.get(kind, (float("-inf"), 0))
        if now_s - told_s < _TELL_AGAIN_S:
            self._told[kind] = (told_s, more + 1)
            return
        again = f"; and {more} more of this kind since the last line" if more else ""
        log.warning("dropped a message%s: %s%s", _of(sender), why, again, exc_info=exc_info)
        self._told[kind] = (now_s, 0)

    def _sort(self, sender: bytes, envelope: Letter) -> None:
        identity = self.wire.identity(sender)
        if envelope.answers:
            asked = self._waiting.get(envelope.answers)
            if asked is None or asked[0] != identity:
                self._unsorted["unasked"] += 1  # a repeated answer, or one that came too late: no news
            elif not asked[1].done():
                asked[1].set_result(envelope.body)
            return
        kind = type(envelope.body)
        handler, at_once = self._handlers.get(kind), self._handlers_at_once.get(kind)
        if (handler is None and at_once is None) or not envelope.ask:
            self._drop(sender, "no-handler", f"nobody takes {type(envelope.body).__name__} here")
            return
        key = (identity, envelope.ask)
        if (again := self._answered.get(key)) is not None:
            self._reply(sender, again)
        elif key in self._being_answered:
            return
        elif envelope.ask <= self._let_go.get(identity, 0):
            self._unsorted["old"] += 1
        elif handler is not None:
            self._being_answered.add(key)
            self.spawn(self._answer(sender, key, handler, envelope.body), kind.__name__)
        elif at_once is not None:
            self._answer_at_once(sender, key, at_once, envelope.body)

    def _keep_answer(self, key: tuple[bytes, int], answer: bytes) -> None:
        self._being_answered.discard(key)
        self._answered[key] = answer
        self._answered_bytes += len(answer)
        while len(self._answered) > _ANSWERS_KEPT or self._answered_bytes > _ANSWERS_BYTES_MAX:
            (identity, ask), oldest = self._answered.popitem(last=False)
            self._answered_bytes -= len(oldest)
            self._let_go[identity] = max(ask, self._let_go.get(identity, 0))
            self._let_go.move_to_end(identity)

    async def _answer(self, sender: bytes, key: tuple[bytes, int], handler: Handler, question: object) -> None:
        try:
            answer = self._as_answer(await handler(sender, question), key[1])
        except Exception as error:
            answer = self._failed(question, error, key[1])
        self._keep_answer(key, answer)
        if replies := self._reply(sender, answer):
            await asyncio.wait(replies)

    def _answer_at_once(self, sender: bytes, key: tuple[bytes, int], handler: HandlerAtOnce, question: object) -> None:
        try:
            answer = self._as_answer(handler(sender, question), key[1])
        except Exception as error:
            answer = self._failed(question, error, key[1])
        self._keep_answer(key, answer)
        self._reply(sender, answer)

    def _failed(self, question: object, error: Exception, ask: int) -> bytes:
        """The answer then."""
        if isinstance(error, CrossrailError):
            return self._as_answer(Failed(clipped(error)), ask)
        log.error("%s could not be answered", type(question).__name__, exc_info=error)
        return self._as_answer(Failed(clipped(f"{type(error).__name__}: {error}")), ask)

    def _as_answer(self, body: object, ask: int) -> bytes:
        """The answer as bytes. UsageError if it cannot be sent: a field is out of bounds, or it is too long."""
        data = self._language.encode(body, 0, ask)
        self._sealer.packets_of(data)
        return data

    def _reply(self, to: bytes, answer: bytes) -> list[asyncio.Future[None]]:
        """The packets of the answer, sent for as long as that may take."""
        try:
            # It has asked, so it is or was just alive; but while our engine considers it lost no answer would get
            # there. If it is dead, this attempt finds it lost again.
            self.wire.revive(to)
            replies = self._post(to, answer)
        except EngineClosed as error:
            log.info("an answer could not be sent: %s", error)
            return []
        loop = asyncio.get_running_loop()
        for reply in replies:
            self._replies.add(reply)
            timer = loop.call_later(_REPLY_TIMEOUT_S, reply.cancel)
            reply.add_done_callback(partial(self._on_replied, timer))
        return replies

    def _on_replied(self, timer: asyncio.TimerHandle, reply: asyncio.Future[None]) -> None:
        timer.cancel()
        self._replies.discard(reply)
        if reply.cancelled():
            log.info("an answer was not delivered within %g s, or before the end", _REPLY_TIMEOUT_S)
        elif (error := reply.exception()) is not None:
            log.info("an answer could not be delivered: %s", error)


def _of(sender: bytes) -> str:
    """Whom a message is from, for people, where a wire's addresses are those of engines."""
    try:
        return f" of '{plain(Address.from_bytes(sender).name)}'"
    except UsageError:
        return ""


def _give_up(answer: asyncio.Future[object], what: str) -> None:
    if not answer.done():
        answer.set_exception(NoAnswer(f"no answer to {what}", is_silence=True))
