"""How an AllToAll is left that is not just closed: by an error, or dropped."""

from __future__ import annotations

import contextlib
import warnings
from types import TracebackType
from typing import NoReturn

import crossrail as xr
from crossrail._closing import Closing
from crossrail.errors import CrossrailError
from crossrail.moe.parting import Parting

_DROPPED_S = 1.0  # for a garbage-collected one to tell the others, and to be closed


class Leaving(Closing):
    """`with` closes it; the other ranks are told of an error that leaves the block, and of one that is dropped.

    Invariant: _closed is set last by the constructor, so one that was not made has none.
    """

    _engine: xr.Engine
    _parting: Parting
    _closed: bool
    _timeout_s: float

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        if self._parting.is_well:
            self._parting.call_failed("with block", error)
        with contextlib.suppress(CrossrailError):  # the first error is the one to see
            self.close()

    def __reduce__(self) -> NoReturn:
        """No copies: one that is dropped would end the rounds of the other."""
        raise TypeError(
            f"{self!r} cannot be copied or pickled: each rank has one. Next: leave it out of what is copied, or give "
            "the copy the same object"
        )

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or self._engine.closed:  # was not made; or others see that the engine left
            return
        warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)
        self._parting.dropped()
        self._timeout_s = _DROPPED_S
        with contextlib.suppress(CrossrailError):
            self.close()
