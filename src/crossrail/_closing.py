"""`with` and `async with` for classes that have a close()."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

S = TypeVar("S", bound="Closing")
A = TypeVar("A", bound="AsyncClosing")


class Closing:
    """`with` closes the object at its end. Not an ABC: a native class cannot have that metaclass."""

    __slots__ = ()

    def close(self) -> None:
        """Implemented by the subclass."""
        raise NotImplementedError

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClosing(ABC):
    """`async with` closes the object at its end."""

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self: A) -> A:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
