"""The memory of the tasks under way: its size is the watermark, and a step allocates nothing else."""

from __future__ import annotations

from bisect import bisect_left

from crossrail.errors import UsageError

ALIGN_BYTES = 256


def aligned(nbytes: int) -> int:
    """Rounded up to what pieces of an arena are multiples of."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


class Arena:
    """Pieces of one block of memory, by offset. First fit; neighbours that are free become one.

    Invariant: `_free` is sorted, its pieces neither overlap nor touch, and with those in `_taken` make the block.
    used_bytes, peak_bytes: taken now, and at most since reset_peak(). Threads: one.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 0 or nbytes % ALIGN_BYTES:
            raise UsageError(f"an arena of {nbytes} bytes: must be a multiple of {ALIGN_BYTES}")
        self.nbytes = nbytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._free: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []  # offset, length
        self._taken: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """The offset of a piece, aligned to ALIGN_BYTES; None when no gap is long enough now. 0 bytes: always offset 0.

        UsageError when no piece could ever be so long.
        """
        wanted = aligned(nbytes)
        if wanted > self.nbytes:
            raise UsageError(f"{nbytes} bytes are more than the {self.nbytes} of this arena")
        if wanted == 0:
            return 0
        for index, (offset, length) in enumerate(self._free):
            if length >= wanted:
                if length == wanted:
                    del self._free[index]
                else:
                    self._free[index] = (offset + wanted, length - wanted)
                self._taken[offset] = wanted
                self.used_bytes += wanted
                self.peak_bytes = max(self.peak_bytes, self.used_bytes)
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Returns what take(nbytes) gave."""
        if nbytes == 0:
            return
        length = self._taken.pop(offset, None)
        if length != aligned(nbytes):
            raise UsageError(f"no piece of {nbytes} bytes at {offset} was taken from this arena")
        self.used_bytes -= length
        at = bisect_left(self._free, (offset, 0))
        if at < len(self._free) and self._free[at][0] == offset + length:
            length += self._free.pop(at)[1]
        if at > 0 and sum(self._free[at - 1]) == offset:
            at -= 1
            offset, before = self._free.pop(at)
            length += before
        self._free.insert(at, (offset, length))

    def reset_peak(self) -> None:
        """peak_bytes counts from now on."""
        self.peak_bytes = self.used_bytes
