"""A dict that keeps only its latest keys."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


class Latest(OrderedDict[_K, _V]):
    """The latest `most` keys that were added; the one that was added first is forgotten for a new one.

    Who sets a key again does not make it later: move_to_end() does.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: _K, value: _V) -> None:
        super().__setitem__(key, value)
        while len(self) > self._most:
            self.popitem(last=False)
