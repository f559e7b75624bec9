"""Why a rank takes part no more: what its farewell tells the others, and the calls of which that may be the reason."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from crossrail import _core

P = ParamSpec("P")
T = TypeVar("T")


class Why(NamedTuple):
    """lost: the rank that it cannot go on without. late: the rank that its last wait was for in vain. words: what
    failed, for people. At most one of them is set.
    """

    lost: int | None = None
    late: int | None = None
    words: str = ""

    def number(self, world: int) -> int | None:
        """As it travels: the rank that was lost; or the one that was late, plus how many ranks there are."""
        return (
            None if self.lost is None and self.late is None else self.lost if self.late is None else world + self.late
        )

    def words_bytes(self) -> bytes:
        """As they travel, cut to what there is room for."""
        return self.words.encode(errors="replace")[: _core.moe.FAREWELL_WORDS]

    @classmethod
    def of_peer(cls, number: int | None, words: bytes, world: int) -> Why:
        """What another rank wrote, which may be anything."""
        if number is not None and 0 <= number < world:
            return cls(lost=number)
        if number is not None and world <= number < 2 * world:
            return cls(late=number - world)
        text = words.decode(errors="ignore")
        return cls(words="".join(one if one.isprintable() else " " for one in text))


class Leaver(Protocol):
    """Peers."""

    def call_failed(self, call: str, error: BaseException) -> None: ...

    def call_succeeded(self) -> None: ...


class Caller(Protocol):
    """AllToAll."""

    @property
    def _peers(self) -> Leaver: ...


C = TypeVar("C", bound=Caller)


def is_told(call: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """Of a call of a round: should we leave after it failed, that is the reason; unless a later one succeeded."""
    name = call.__name__

    @functools.wraps(call)
    def noted(self: C, /, *arguments: P.args, **options: P.kwargs) -> T:
        try:
            result = call(self, *arguments, **options)
        except BaseException as error:
            self._peers.call_failed(name, error)
            raise
        self._peers.call_succeeded()
        return result

    return noted


def described(what: str, error: BaseException) -> str:
    """That error, as the reason to leave."""
    return f"{what} failed: {type(error).__name__}: {error}"
