"""A dict that keeps only its latest keys."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


class Latest(OrderedDict[_K, _V]):
    """Holds the latest `most` keys; adding another one evicts the oldest.

    Setting an existing key again does not refresh its age; move_to_end() does.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: _K, value: _V) -> None:
        super().__setitem__(key, value)
        while len(self) > self._most:
            self.popitem(last=False)
