"""Memory through which ranks confirm halves and say who is left: each rank writes to its own part of every other's.

Nothing here is counted on to be written whole: a confirmation lies beside its complement, a record under its hash, so
one that is still being written looks like none. An immediate only wakes those who wait.

Two writes of one thing never overtake each other: the next begins when the one before has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import crossrail as xr
from crossrail.errors import CrossrailError, WaitTimeout
from crossrail.moe.countdown import Countdown
from crossrail.moe.links.board import PARITIES
from crossrail.moe.masking.views import Record, record_bytes

_WORD_BYTES = 16  # a value and its complement
_VIEW_SHIFT = 40  # a confirmation: number of the view, then the mark
_MARK = np.uint64((1 << _VIEW_SHIFT) - 1)
_OUT_WORDS = 8

Marks = npt.NDArray[np.uint64]


class Confirmations:
    """One rank's, and the way to those of others. Threads: one at a time. Owner: what it allocates, until close().

    Parts: confirmations [world][parity]; records that came, by rank, our own among them; records that leave; what we
    read of others; confirmations that leave.
    """

    def __init__(self, engine: xr.Engine, world: int, rank: int) -> None:
        self._engine = engine
        self._world, self._rank = world, rank
        self._slot_bytes = record_bytes(world)
        self._words_bytes = -(-world * PARITIES * _WORD_BYTES // 64) * 64
        self._records_at = self._words_bytes
        self._leaving_at = self._records_at + world * self._slot_bytes
        self._reading_at = self._leaving_at + world * self._slot_bytes
        self._out_at = self._reading_at + world * self._slot_bytes
        self.region = engine.alloc(self._out_at + _OUT_WORDS * _WORD_BYTES)
        self.news = engine.alloc_imm()
        view = self.region.view()
        self._words = np.frombuffer(view, np.uint64, world * PARITIES * 2).reshape(world, PARITIES, 2)
        self._out = np.frombuffer(view, np.uint64, _OUT_WORDS * 2, self._out_at).reshape(_OUT_WORDS, 2)
        self._bytes = np.frombuffer(view, np.uint8)
        self._regions: dict[int, xr.RegionDescriptor] = {}
        self._imms: dict[int, int] = {}
        self._next_out = 0
        self._confirming: list[tuple[xr.Transfer, int, list[int]]] = []  # of the last ones: also which word, to whom
        self._serial = 0
        self._own: Record | None = None
        self._sent: dict[int, tuple[xr.Transfer, int]] = {}  # by rank: the last record's, and its serial
        self._reads: dict[int, xr.Transfer] = {}
        self._was_read: list[Record] = []  # and not yet returned by fresh()
        self._seen: dict[int, bytes] = {}  # by rank: the hash of what was read last
        self._serials: dict[int, int] = {}

    def card(self) -> dict[str, Any]:
        """What the others need to know about it."""
        return {"region": self.region.descriptor.to_bytes().hex(), "imm": self.news.imm}

    def connect(self, rank: int, card: dict[str, Any]) -> None:
        """card: of that rank."""
        self._regions[rank] = xr.RegionDescriptor.from_bytes(bytes.fromhex(card["region"]))
        self._imms[rank] = card["imm"]

    # ---- confirmations

    def confirm(self, view: int, mark: int, ranks: Sequence[int]) -> bool:
        """Tells these ranks, and ourselves, that we have all of that half in that view. False: not yet possible, since
        the last one of its parity is still on its way.
        """
        value = np.uint64(view << _VIEW_SHIFT | mark)
        word, parity = self._next_out % _OUT_WORDS, mark // 2 % PARITIES
        # A failed one is dropped: ranks that lack it accept this one in its place.
        self._confirming = [one for one in self._confirming if not one[0].done]
        if any(used == word or self._parity_of(used) == parity for _, used, _ in self._confirming):
            return False
        self._next_out += 1
        self._out[word] = value, ~value
        self._words[self._rank, parity] = self._out[word]
        others = [rank for rank in ranks if rank != self._rank]
        if others:
            self._confirming.append((self._write_word(word, mark, others), word, others))
        return True

    def _write_word(self, word: int, mark: int, ranks: list[int]) -> xr.Transfer:
        to = (self._rank * PARITIES + mark // 2 % PARITIES) * _WORD_BYTES
        return self._engine.submit_scatter(
            self.region, [self._regions[rank] for rank in ranks], lengths=_WORD_BYTES,
            src_offsets=self._out_at + word * _WORD_BYTES, dst_offsets=to, imm=[self._imms[rank] for rank in ranks],
        )  # fmt: skip

    def repeat_failed(self) -> None:
        """A confirmation that failed for one of its targets may not have reached the others: each gets it again,
        separately.
        """
        for transfer, word, ranks in list(self._confirming):
            if transfer.done and transfer.status != "done":
                self._confirming.remove((transfer, word, ranks))
                mark = int(self._out[word, 0] & _MARK)
                for rank in ranks if len(ranks) > 1 or transfer.status != "peer-lost" else []:
                    self._confirming.append((self._write_word(word, mark, [rank]), word, [rank]))

    def _parity_of(self, word: int) -> int:
        return int(self._out[word, 0] & _MARK) // 2 % PARITIES

    def unconfirmed(self, view: int, mark: int, ranks: Marks) -> list[int]:
        """Those of an array of ranks that have not confirmed that half in that view."""
        words = self._words[ranks, mark // 2 % PARITIES]
        values = words[:, 0]
        has = (values == ~words[:, 1]) & (values >> np.uint64(_VIEW_SHIFT) == view) & (values & _MARK >= mark)
        return [] if has.all() else [int(rank) for rank in ranks[~has]]

    # ---- records

    def publish(self, record: Record, ranks: Collection[int]) -> None:
        """Sends our record to the ranks that have an older one; to those that have not received the last one yet,
        later.
        """
        if record != self._own:
            self._own = record
            self._serial += 1
            self._put(self._records_at + self._rank * self._slot_bytes, record)
        for rank in ranks:
            transfer, serial = self._sent.get(rank, (None, 0))
            if rank == self._rank or (transfer is not None and not transfer.done):
                continue
            if serial == self._serial and (transfer is None or transfer.status == "done"):
                continue
            begin = self._leaving_at + rank * self._slot_bytes
            nbytes = self._put(begin, record)
            moved = self._engine.submit_write(
                self.region, self._regions[rank], nbytes, src_offset=begin,
                dst_offset=self._records_at + self._rank * self._slot_bytes, imm=self._imms[rank],
            )  # fmt: skip
            self._sent[rank] = (moved, self._serial)

    def ask(self, rank: int) -> xr.Transfer:
        """Reads that rank's own record; one at a time. fresh() returns it once it has come. Notices ranks that are
        gone.
        """
        before = self._reads.get(rank)
        if before is not None and not before.done:
            return before
        self._collect(rank)
        self._reads[rank] = self._engine.submit_read(
            self.region, self._regions[rank], self._slot_bytes, dst_offset=self._reading_at + rank * self._slot_bytes,
            src_offset=self._records_at + rank * self._slot_bytes,
        )  # fmt: skip
        return self._reads[rank]

    def fresh(self) -> list[Record]:
        """Records of others that are newer than those seen before."""
        for rank in list(self._reads):
            if self._reads[rank].done:
                self._collect(rank)
        found, self._was_read = self._was_read, []
        for rank in self._regions:
            begin = self._records_at + rank * self._slot_bytes
            digest = self._bytes[begin : begin + 8].tobytes()
            if digest != self._seen.get(rank, bytes(8)):
                record = self._take(rank, begin)
                if record is not None:
                    self._seen[rank] = digest
                    found.append(record)
        return found

    def _collect(self, rank: int) -> None:
        read = self._reads.pop(rank, None)
        if read is None or read.status != "done":
            return
        record = self._take(rank, self._reading_at + rank * self._slot_bytes)
        if record is not None:
            self._was_read.append(record)

    def _take(self, rank: int, begin: int) -> Record | None:
        decoded = Record.decode(self._bytes[begin : begin + self._slot_bytes].tobytes())
        if decoded is None:
            return None
        serial, record = decoded
        if record.rank != rank or serial <= self._serials.get(rank, 0):
            return None
        self._serials[rank] = serial
        return record

    def _put(self, begin: int, record: Record) -> int:
        data = np.frombuffer(record.encode(self._serial), np.uint8)
        assert len(data) <= self._slot_bytes, "a record is longer than record_bytes says"
        self._bytes[begin : begin + len(data)] = data
        return len(data)

    # ---- waiting and the end

    def wait_news(self, timeout_s: float) -> None:
        """Waits until something was written here, or that time has passed."""
        if timeout_s > 0:
            try:
                self.news.wait(1, timeout_s)
            except WaitTimeout:
                return
        if (count := self.news.poll()) > 0:
            self.news.try_consume(count)

    def settle(self, timeout_s: float) -> None:
        """Waits until our confirmations have arrived wherever they can; to be called before we leave."""
        patience = Countdown(self._engine, timeout_s)
        for transfer, _, _ in self._confirming:
            try:
                transfer.wait(patience.left_s)
            except CrossrailError:
                continue  # a rank that did not get it is gone, or learns from its wait that it gives up
        self._confirming = []

    def close(self, timeout_s: float) -> None:
        """Gives the memory back. Idempotent. Questions that nobody has answered yet are taken back."""
        if not self._engine.closed:
            self.region.close(timeout_s, drain=False)
