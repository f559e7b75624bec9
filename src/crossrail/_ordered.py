"""A weak set that iterates in insertion order."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


class OrderedWeakSet(Generic[_T]):
    """Holds objects weakly. A WeakSet would iterate in the order of their addresses, that is, by chance."""

    def __init__(self) -> None:
        self._by_id: weakref.WeakValueDictionary[int, _T] = weakref.WeakValueDictionary()

    def add(self, one: _T) -> None:
        self._by_id[id(one)] = one

    def discard(self, one: _T) -> None:
        self._by_id.pop(id(one), None)

    def clear(self) -> None:
        self._by_id.clear()

    def __iter__(self) -> Iterator[_T]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)
