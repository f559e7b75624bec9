"""The exceptions that crossrail raises.

- `UsageError`: the caller's mistake, raised by the call; names the argument, what was given and the bound.
- `TransportError`: set-up or the system failed; says what was attempted and what to do next.
- `TransferError` and its subclasses: one operation failed, others are unaffected; names peer, operation and bytes.
- `EngineClosed`, `WaitTimeout`: a wait ended without what it waited for. `SimulationIdle`: it would never end.

Each class has a code, and under it a section in errors.md, beside this file: what it means, and what to do.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from crossrail._text import plain

_SECTION = re.compile(r"^### (\S+)\n(.*?)\n*(?=^#|\Z)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[([^]]*)\]\((?:\.\./)*([^)#]*)[^)]*\)")


def error_texts() -> dict[str, str]:
    """The text of the page errors.md for each error code, for reading in a terminal."""
    from pathlib import Path  # slow to import, and most programs do not need it

    sections = _SECTION.findall(Path(__file__).with_name("errors.md").read_text(encoding="utf-8"))
    return {
        code: _LINK.sub(lambda link: f"{link[1]} ({link[2]})" if link[2] else link[1], text) for code, text in sections
    }


class CrossrailError(Exception):
    """Base class of all errors of crossrail.

    error_code: the code of the class, such as "peer-lost" or "kv-no-pages". A subclass defined outside of crossrail has
    the code of its base.
    """

    error_code: ClassVar[str] = "crossrail-error"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        package, *modules = cls.__module__.split(".")
        if package == "crossrail":
            system = f"{modules[0]}-" if len(modules) > 1 else ""
            cls.error_code = system + re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()

    def __str__(self) -> str:
        return plain(super().__str__())  # it contains names that peers chose

    def __reduce__(self) -> tuple[Any, ...]:
        # Python's own calls the class with `args`, that is with the finished message, which most of ours do not take.
        return _as_it_was, (type(self), self.args), vars(self)

    @property
    def docs(self) -> str:
        """What the documentation says of this error: its meaning and what to do. `crossrail error CODE` prints it."""
        return error_texts().get(self.error_code, "")


def _as_it_was(kind: type[CrossrailError], args: tuple[Any, ...]) -> CrossrailError:
    """A copy of an error, before its attributes: for pickle and copy."""
    error = kind.__new__(kind, *args)
    error.args = args
    return error


class UsageError(CrossrailError, ValueError):
    """The caller's mistake."""


class EngineClosed(CrossrailError):
    """The engine was closed, or belongs to the parent of this forked process."""


class TransportError(CrossrailError):
    """Set-up or system failure.

    call: what was attempted ("mmap"); code: errno or 0; text: what happened; remedy: what to do next, may be empty.
    """

    def __init__(self, call: str, code: int, text: str, remedy: str = "") -> None:
        super().__init__(call, code, text, remedy)
        self.call = call
        self.code = code
        self.text = text
        self.remedy = remedy

    def __str__(self) -> str:
        code = f" (errno {self.code})" if self.code else ""
        remedy = f". Next: {self.remedy}" if self.remedy else ""
        return plain(f"{self.call}: {self.text}{code}{remedy}")


class TransferError(CrossrailError):
    """One operation failed. By the time this is raised nothing touches its source or target any more.

    op: "write", "read", ...; peer: name of the peer; nbytes: bytes of the operation; nbytes_retired: how many of them
    are known to have moved; imm: its immediate or None; status: how it ended; detail: more about the cause, may be
    empty. region: number of the peer's region (RegionDescriptor.region), offset: where in it; None if there is no
    region or there are several, as for a scatter.
    """

    def __init__(
        self,
        message: str,
        *,
        op: str = "",
        peer: str = "",
        nbytes: int = 0,
        nbytes_retired: int = 0,
        imm: int | None = None,
        status: str = "",
        detail: str = "",
        region: int | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(message)
        self.op = op
        self.peer = peer
        self.nbytes = nbytes
        self.nbytes_retired = nbytes_retired
        self.imm = imm
        self.status = status
        self.detail = detail
        self.region = region
        self.offset = offset


class PeerLost(TransferError):
    """The peer died, left, or is an older incarnation of itself."""


class TransferCancelled(TransferError):
    """Cancelled by its owner."""


class RemoteRegionClosed(TransferError):
    """The peer closed the region, or never had it."""


class RemoteRegionRevoked(RemoteRegionClosed):
    """The peer revoked the region (Region.revoke), and with it this descriptor.

    Engines remember the last 1024 descriptors that they revoked; with an older one the error is RemoteRegionClosed.
    """


class RemoteAccessError(TransferError):
    """The target refused: the range ends past the region, or the region does not allow this operation."""


class ChecksumMismatch(TransferError):
    """An operation with verify=True: the peer's memory differs from what was sent (it was not counted), or from what
    was read.

    sum_sent, sum_found: 64-bit checksums of the bytes that were sent, or that a read returned, and of the peer's
        memory. For paged writes, of the first group of pages that differs; for a scatter, at the first target that
        differs.
    """

    sum_sent: int = 0
    sum_found: int = 0


class MessageTooLong(TransferError):
    """No buffer of the peer's receive pool can hold the message."""


class WaitTimeout(CrossrailError, TimeoutError):
    """A wait reached its timeout. What it waited for goes on.

    arrived, expected: counts, if it waited for a counter; else None.
    """

    def __init__(self, message: str, arrived: int | None = None, expected: int | None = None) -> None:
        super().__init__(message)
        self.arrived = arrived
        self.expected = expected


class LateWrite(CrossrailError):
    """Somebody wrote to poisoned memory.

    region: which one, in words; offset: of the first changed byte, from the region's start; nbytes: from there to the
        last changed byte of the same range or page; found: the first of the bytes there now, at most 16; pages: how
        many ranges or pages were changed.
    """

    def __init__(self, region: str, offset: int, nbytes: int, found: bytes, pages: int) -> None:
        more = f", and {pages - 1} more page(s)" if pages > 1 else ""
        super().__init__(
            f"{region} was written to after it was poisoned: {nbytes} bytes at offset {offset}{more}; they begin with "
            f"{found.hex(' ')}"
        )
        self.region = region
        self.offset = offset
        self.nbytes = nbytes
        self.found = found
        self.pages = pages


class SimulationIdle(CrossrailError):
    """A simulated world has no event left, so what a wait without a deadline waits for will never happen."""
