"""Why a rank stops taking part: what its farewell tells the others, and which calls can be the reason."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from crossrail import _core
from crossrail._torch import uncompiled
from crossrail.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")


class Why(NamedTuple):
    """Why a rank leaves. lost: the rank that it cannot continue without. late: the rank that its last wait was for in
    vain. words: what failed, for people. At most one of them is set.
    """

    lost: int | None = None
    late: int | None = None
    words: str = ""

    def number(self, world: int) -> int | None:
        """The reason as a number: the rank that was lost, or the one that was late plus the number of ranks."""
        return (
            None if self.lost is None and self.late is None else self.lost if self.late is None else world + self.late
        )

    def words_bytes(self) -> bytes:
        """The words as bytes, cut to the room that there is."""
        return self.words.encode(errors="replace")[: _core.moe.FAREWELL_WORDS]

    @classmethod
    def of_peer(cls, number: int | None, words: bytes, world: int) -> Why:
        """Decodes what another rank wrote, which may be anything."""
        if number is not None and 0 <= number < world:
            return cls(lost=number)
        if number is not None and world <= number < 2 * world:
            return cls(late=number - world)
        return cls(words=text_of_peer(words))


def text_of_peer(words: bytes) -> str:
    """What another rank wrote for people, which may be anything."""
    return "".join(one if one.isprintable() else " " for one in words.decode(errors="ignore"))


class Turn(Protocol):
    """threading.RLock: a call inside of another one is the same thread's."""

    def acquire(self, blocking: bool = ...) -> bool: ...

    def release(self) -> None: ...


class Leaver(Protocol):
    """Parting."""

    def call_failed(self, call: str, error: BaseException) -> None: ...

    def call_succeeded(self) -> None: ...

    def tell_failure(self, call: str, error: BaseException) -> None: ...


class Caller(Protocol):
    """AllToAll."""

    @property
    def _parting(self) -> Leaver: ...
    @property
    def _closed(self) -> bool: ...
    @property
    def _turn(self) -> Turn: ...


C = TypeVar("C", bound=Caller)
S = TypeVar("S")


@contextlib.contextmanager
def telling(caller: Caller, name: str) -> Iterator[None]:
    """Around a call of a round: those who wait for us are told if it has failed; and if we leave after that, it is why.
    Unless a later one succeeded.

    UsageError while another thread is in one: both would write the same round.
    """
    turn = caller._turn
    if not turn.acquire(False):
        raise UsageError(f"{name} while another thread is in a call of this AllToAll, which is for one at a time")
    was_closed = caller._closed
    try:
        yield
        caller._parting.call_succeeded()
    except BaseException as error:
        if caller._closed and not was_closed and isinstance(error, Exception):  # by a signal's handler, say
            # Whatever it was: what the call needs is gone.
            raise UsageError(f"{name} did not end: this AllToAll was closed meanwhile") from None
        caller._parting.call_failed(name, error)
        caller._parting.tell_failure(name, error)
        raise
    finally:
        turn.release()


def is_told(call: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """Decorates the calls of a round: see telling()."""

    @uncompiled
    @functools.wraps(call)
    def noted(self: C, /, *arguments: P.args, **options: P.kwargs) -> T:
        with telling(self, call.__name__):
            return call(self, *arguments, **options)

    return noted


def is_told_by(
    callers: Callable[[S], Iterable[Caller]],
) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """Decorates calls of an object that makes its rounds by others: of what it refuses by itself, too, their ranks are
    told. callers: those of which it may be a call.
    """

    def decorated(call: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        @uncompiled
        @functools.wraps(call)
        def noted(self: S, /, *arguments: P.args, **options: P.kwargs) -> T:
            with contextlib.ExitStack() as all_of_them:
                for caller in callers(self):
                    all_of_them.enter_context(telling(caller, call.__name__))
                return call(self, *arguments, **options)

        return noted

    return decorated


def described(what: str, error: BaseException) -> str:
    """The error as the reason to leave."""
    words = str(error)  # of a KeyboardInterrupt there are none
    return f"{what} failed: {type(error).__name__}" + (words and f": {words}")
