"""Books of what engines were asked to do, held against what they did: the promises of the contract as checks.

A Ledger submits operations on tracked memory and notes what the contract then promises: completion exactly once, counts
equal to operations, bytes as they were sent, no touch of source or target after a completion, messages delivered once,
everything ended once faults stop, nothing left over. It works on any engines whose memory is in reach. On those of a
World it checks at the very moment of each event, and runs are repeatable; on those of other processes, when it hears.

What is not promised is not checked: a peer that was given up (PeerLost) may still be written to by what was on its way,
and a failed operation may have been counted, as a whole or in part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from crossrail.campaign.books import Arena, Bytes, Op, Piece, Tally
from crossrail.campaign.parts import AnyEngine, AnyTransfer
from crossrail.errors import WaitTimeout

SOURCE_POISON = 0xD5  # what a source is filled with once its operation is complete,
TARGET_POISON = 0xEA  # and a target: neither may be seen, nor change
UNTOUCHED = 0x00
_UNITS_PER_COUNT = 48
_POOL_BYTES = 4 << 20
# Failures after which nothing is promised of the target: it is the memory of a peer that was given up.
_GIVEN_UP = ("peer-lost", "engine-closed")
REFUSED = "refused"  # by the submit itself, in another process: nothing was begun, nothing counts


class CheckFailed(AssertionError):
    """A promise was not kept. The message says which, and of which operation."""


class Ledger:
    """Submits operations and keeps book of them. One thread.

    seed: which bytes sources have. Faults that nothing can survive (a killed engine, say) are told by
    note_dead(). Checks raise CheckFailed; those that run in callbacks are kept and raised by the next check().
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.ops: list[Op] = []
        self.arenas: list[Arena] = []
        self.failures: list[str] = []
        self._tallies: list[Tally] = []
        self._dead: list[AnyEngine] = []
        self._messages: dict[bytes, int] = {}
        self._next_message = 0

    # ---- memory

    def arena(self, engine: AnyEngine, memory: Bytes) -> Arena:
        """Registers memory, which is all zeros. Raises TransportError as Engine.register does."""
        arena = Arena(engine, memory, engine.register(memory))
        self.arenas.append(arena)
        return arena

    def adopt(self, arena: Arena) -> None:
        """Takes over an arena of another ledger that has ended: its memory is all zeros again."""
        arena.taken = 0
        self.arenas.append(arena)

    def close_arena(self, arena: Arena, timeout_s: float) -> bool:
        """Closes the region; what is in it from then on stays as it is. False: still in use after timeout_s."""
        try:
            arena.region.close(timeout_s)
        except WaitTimeout:
            return False
        self.note_closed(arena)
        return True

    def note_closed(self, arena: Arena) -> None:
        """Its region was closed, or was revoked and has no use of its owner's: nothing in it may change any more."""
        arena.is_closed = True
        arena.memory[:] = TARGET_POISON

    # ---- counting

    def tally(self, engine: AnyEngine, imm: int | None = None) -> Tally:
        """A number of the receiver's, allocated unless given. Several operations may share it."""
        tally = Tally(engine.alloc_imm() if imm is None else engine.imm_counter(imm), engine)
        self._tallies.append(tally)
        return tally

    # ---- operations. All ranges are fresh; None where an arena has no room left

    def write(self, source: Arena, target: Arena, nbytes: int, tally: Tally | None = None, **options: Any) -> Op | None:
        """One contiguous range. options: rail and verify, as of submit_write."""
        ranges = _take_both(source, target, nbytes)
        if ranges is None:
            return None
        at, to = ranges
        piece = self._piece(source, at, target, to, nbytes)
        transfer = source.engine.submit_write(
            source.region, target.region.descriptor, nbytes, src_offset=at, dst_offset=to, imm=_imm(tally), **options
        )
        return self._add("write", transfer, [(source, at, nbytes)], [piece], {} if tally is None else {tally: 1})

    def read(self, target: Arena, source: Arena, nbytes: int) -> Op | None:
        """One contiguous range of a peer's, whose bytes are put there for it."""
        ranges = _take_both(source, target, nbytes)
        if ranges is None:
            return None
        at, to = ranges
        piece = self._piece(source, at, target, to, nbytes)
        transfer = target.engine.submit_read(
            target.region, source.region.descriptor, nbytes, dst_offset=to, src_offset=at
        )
        return self._add("read", transfer, [(source, at, nbytes)], [piece], {})

    def paged_writes(
        self, source: Arena, target: Arena, from_pages: Sequence[int], to_pages: Sequence[int], page_bytes: int,
        tally: Tally | None = None, **options: Any,
    ) -> Op | None:  # fmt: skip
        """Pages, by their numbers in a fresh range of each arena. options: verify, as of submit_paged_writes."""
        source_bytes, target_bytes = (page_bytes * (max(pages) + 1) for pages in (from_pages, to_pages))
        at, to = source.take(source_bytes), target.take(target_bytes)
        if at is None or to is None:
            return None
        pieces = [
            self._piece(source, at + a * page_bytes, target, to + b * page_bytes, page_bytes)
            for a, b in zip(from_pages, to_pages, strict=True)
        ]
        transfer = source.engine.submit_paged_writes(
            source.region, np.array(from_pages, np.uint32), target.region.descriptor, np.array(to_pages, np.uint32),
            page_bytes, src_offset=at, dst_offset=to, imm=_imm(tally), **options,
        )  # fmt: skip
        counts = {} if tally is None else {tally: len(pieces)}
        return self._add("paged", transfer, [(source, at, source_bytes)], pieces, counts)

    def scatter(self, source: Arena, targets: Sequence[Arena], lengths: Sequence[int], imm: int) -> Op | None:
        """A slice to each target. The number is the same at all of them: each has its own tally of it."""
        ats = [source.take(nbytes) for nbytes in lengths]
        tos = [target.take(nbytes) for target, nbytes in zip(targets, lengths, strict=True)]
        if any(at is None for at in ats) or any(to is None for to in tos):
            return None
        starts, ends = [at for at in ats if at is not None], [to for to in tos if to is not None]
        pieces = [
            self._piece(source, at, target, to, nbytes)
            for at, to, target, nbytes in zip(starts, ends, targets, lengths, strict=True)
        ]
        counts = self._tallies_of([target.engine for target in targets], imm)
        transfer = source.engine.submit_scatter(
            source.region, [target.region.descriptor for target in targets], lengths=list(lengths),
            src_offsets=starts, dst_offsets=ends, imm=imm,
        )  # fmt: skip
        sources = [(source, at, nbytes) for at, nbytes in zip(starts, lengths, strict=True)]
        return self._add("scatter", transfer, sources, pieces, counts)

    def barrier(self, engine: AnyEngine, peers: Sequence[AnyEngine], imm: int) -> Op:
        """The immediate alone, to each."""
        group = engine.add_peer_group([peer.address for peer in peers])
        counts = self._tallies_of(peers, imm)
        transfer = engine.submit_barrier(group, imm)
        return self._add("barrier", transfer, [], [], counts)

    def send(self, engine: AnyEngine, peer: AnyEngine, nbytes: int) -> Op:
        """A message; the first eight bytes name it."""
        self._next_message += 1
        filler = self._data(max(0, nbytes - 8)).tobytes()
        payload = self._next_message.to_bytes(8, "little") + filler
        op = self._add("send", engine.submit_send(peer.address, payload), [], [], {})
        op.payload, op.receiver = payload, peer
        self._messages[payload] = 0
        return op

    def note_message(self, payload: bytes) -> None:
        """Tells of a message that arrived: from the callback of a receive pool."""
        if payload not in self._messages:
            self._fail(f"a message of {len(payload)} bytes arrived that nobody sent")
        else:
            self._messages[payload] += 1
            if self._messages[payload] > 1:
                self._fail(f"message {int.from_bytes(payload[:8], 'little')} was delivered twice")

    def delivered(self, op: Op) -> int:
        """How often a message arrived."""
        return self._messages[op.payload]

    def note_dead(self, engine: AnyEngine) -> None:
        """That engine was killed or closed: nothing is promised of what it had, nor of what was on its way to it."""
        self._dead.append(engine)
        for op in self.ops:
            for piece in op.pieces:
                piece.is_unsure = piece.is_unsure or piece.arena.engine is engine

    def note_given_up(self, engine: AnyEngine, peer: AnyEngine) -> None:
        """The engine is about to forget the peer: what is on its way to the peer's memory may still arrive."""
        for op in self.ops:
            for piece in op.pieces:
                if op.completions == 0 and op.transfer._engine is engine and piece.arena.engine is peer:
                    piece.is_unsure = True

    def retire(self, tally: Tally) -> None:
        """That number is about to be released: its count is checked now, and no more."""
        self._check_tally(tally, self._fail)
        self._tallies.remove(tally)

    def is_dead(self, engine: object) -> bool:
        """Whether note_dead() was told of it."""
        return any(dead is engine for dead in self._dead)

    # ---- checks

    @property
    def pending(self) -> list[Op]:
        """Operations that are not complete."""
        return [op for op in self.ops if op.completions == 0]

    def check(self) -> None:
        """What has to hold at any time."""
        for op in self.ops:
            for piece in op.pieces:
                self._check_poison(op, piece)
        for arena in self.arenas:
            if arena.is_closed and not self.is_dead(arena.engine) and (arena.memory != TARGET_POISON).any():
                self._fail(f"memory of engine {arena.engine.name!r} was touched after its region was closed")
        if self.failures:
            raise CheckFailed("; ".join(self.failures[:5]))

    def check_end(self) -> None:
        """What has to hold once faults have stopped and everything had time to end."""
        for op in self.ops:
            if op.completions != 1:
                self._fail(f"{op} completed {op.completions} times")
            elif op.transfer.status != op.status:
                self._fail(f"{op} completed, and is {op.transfer.status} now")
        self.failures += self.unsettled()
        self.check()

    def unsettled(self) -> list[str]:
        """What has to hold in the end, and does not yet: counts and messages may come later than the completion."""
        found: list[str] = []
        for tally in self._tallies:
            self._check_tally(tally, found.append)
        for op in self.ops:
            if op.kind == "send":
                self._check_message(op, found.append)
        for engine in {id(arena.engine): arena.engine for arena in self.arenas}.values():
            if not self.is_dead(engine):
                self._check_engine(engine, found.append)
        return found

    @property
    def tallies(self) -> list[Tally]:
        """The numbers that are not retired."""
        return list(self._tallies)

    # ---- how

    def _tallies_of(self, engines: Sequence[AnyEngine], imm: int) -> dict[Tally, int]:
        """Of one number at several engines, and how often each is named."""
        named = {id(engine): engine for engine in engines if not engine.closed}
        counts = {key: sum(id(engine) == key for engine in engines) for key in named}
        return {self.tally(engine, imm): counts[key] for key, engine in named.items()}

    def _data(self, nbytes: int) -> Bytes:
        """Bytes that no other operation of about that length has."""
        pool = _random_bytes(-(-(nbytes + 1) // _POOL_BYTES))
        self._seed = self._seed * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        at = (self._seed >> 32) % (len(pool) - nbytes)
        return pool[at : at + nbytes]

    def _piece(self, source: Arena, at: int, target: Arena, to: int, nbytes: int) -> Piece:
        data = self._data(nbytes)
        source.memory[at : at + nbytes] = data
        return Piece(target, to, data, is_unsure=self.is_dead(target.engine))

    def _add(
        self, kind: str, transfer: AnyTransfer, sources: list[tuple[Arena, int, int]], pieces: list[Piece],
        counts: dict[Tally, int],
    ) -> Op:  # fmt: skip
        op = Op(len(self.ops), kind, transfer, sources, pieces, counts)
        self.ops.append(op)
        for tally in counts:
            tally.ops.append(op)
        if len(counts) == 1 and kind in ("write", "paged"):
            self._watch_count(op)
        transfer.add_done_callback(lambda done: self._completed(op, done))
        return op

    def _watch_count(self, op: Op) -> None:
        """Where the number is this operation's alone, its bytes are there when its last count is."""
        (tally, count), *_ = op.counts.items()
        if len(tally.ops) > 1 or self.is_dead(tally.engine):
            return

        def counted() -> None:
            if len(tally.ops) > 1:  # not alone any more
                tally.counter._give_back(count)
                return
            for piece in op.pieces:
                is_ours = piece.is_poisoned or piece.is_unsure or piece.arena.is_closed  # by now
                if not is_ours and not np.array_equal(piece.memory, piece.data):
                    self._fail(f"{op} was counted before its bytes were in place")
            tally.counter._give_back(count)

        tally.counter.on_count(count, counted)

    def _completed(self, op: Op, transfer: AnyTransfer) -> None:
        op.completions += 1
        op.status = transfer.status
        if op.completions > 1:
            self._fail(f"{op} completed {op.completions} times")
            return
        if op.status == "pending":
            self._fail(f"{op} completed, and says that it is pending")
        for arena, at, nbytes in op.sources:
            if not arena.is_closed:
                arena.memory[at : at + nbytes] = SOURCE_POISON
        for piece in op.pieces:
            if op.status in _GIVEN_UP or self.is_dead(op.transfer._engine):
                piece.is_unsure = True
            if piece.is_unsure or piece.arena.is_closed:
                continue
            if op.status == "checksum-mismatch":
                self._fail(f"{op} fails its checksum, and nobody else wrote there")
            if op.status == "done" and not np.array_equal(piece.memory, piece.data):
                wrong = int(np.flatnonzero(piece.memory != piece.data)[0])
                self._fail(f"{op} is done, and byte {wrong} of {len(piece.data)} at its target is not what was sent")
            if not ((piece.memory == piece.data) | (piece.memory == UNTOUCHED)).all():
                self._fail(f"{op} left bytes at its target that are neither old nor new")
            piece.memory[:] = TARGET_POISON
            piece.is_poisoned = True

    def _check_poison(self, op: Op, piece: Piece) -> None:
        if piece.arena.is_closed:
            return
        if piece.is_poisoned and not piece.is_unsure and (piece.memory != TARGET_POISON).any():
            at = int(np.flatnonzero(piece.memory != TARGET_POISON)[0])
            self._fail(f"the target of {op} was touched after its completion, at byte {at} of {len(piece.data)}")
            piece.is_unsure = True  # said once
        if op.completions and (piece.memory == SOURCE_POISON).any():
            self._fail(f"the source of {op} was read after its completion")

    def _check_tally(self, tally: Tally, fail: Callable[[str], None]) -> None:
        if self.is_dead(tally.engine):
            return
        least = sum(op.counts[tally] for op in tally.ops if op.status == "done")
        most = least + sum(op.counts[tally] for op in tally.ops if op.status != "done" and not _counts_nothing(op))
        got = tally.counter.poll()
        if not least <= got <= most:
            names = ", ".join(map(str, tally.ops))
            number = f"immediate {tally.counter.imm}"
            fail(f"engine {tally.engine.name!r} counts {got} of {number}, must be {least} to {most}: {names}")

    def _check_message(self, op: Op, fail: Callable[[str], None]) -> None:
        assert op.receiver is not None
        delivered = self._messages[op.payload]
        if op.status == "done" and delivered != 1 and not self.is_dead(op.receiver):
            fail(f"{op} is done, and was delivered {delivered} times")
        if op.status == "cancelled" and delivered:
            fail(f"{op} was delivered all the same")

    def _check_engine(self, engine: AnyEngine, fail: Callable[[str], None]) -> None:
        """Nothing is left over, and no fraction of a count."""
        stats = engine.stats()
        ended = stats["transfers_done"] + stats["transfers_failed"] + stats["transfers_cancelled"]
        if stats["transfers_inflight"] or ended != stats["transfers_submitted"]:
            fail(f"engine {engine.name!r} has transfers left: {stats}")
        has_failed = any(
            op.status not in ("done", "cancelled") and any(tally.engine is engine for tally in op.counts)
            for op in self.ops
        )
        if not has_failed and stats["imm_units_received"] % _UNITS_PER_COUNT:
            fail(f"engine {engine.name!r} has counted {stats['imm_units_received']}/48: not a whole number")

    def _fail(self, text: str) -> None:
        self.failures.append(text)


def ends_within(ledger: Ledger, run: Callable[[float], object], limit_s: float, step_s: float = 0.25) -> bool:
    """Runs until every operation is complete, for limit_s at most. run: lets so much time pass."""
    passed_s = 0.0
    while ledger.pending and passed_s < limit_s:
        run(step_s)
        passed_s += step_s
    return not ledger.pending


@functools.cache
def _random_bytes(pools: int) -> Bytes:
    """Made once: drawing them anew would take longer than all else. Neither poison nor zero among them."""
    return np.random.Generator(np.random.PCG64(1)).integers(1, 0xD0, 2 * pools * _POOL_BYTES, np.uint8)


def _take_both(source: Arena, target: Arena, nbytes: int) -> tuple[int, int] | None:
    at, to = source.take(nbytes), target.take(nbytes)
    return None if at is None or to is None else (at, to)


def _imm(tally: Tally | None) -> int | None:
    return None if tally is None else tally.counter.imm


def _counts_nothing(op: Op) -> bool:
    """Pages and targets count 1 or nothing each when it was cancelled; a write counts nothing, nor what was refused."""
    return op.status == REFUSED or (op.status == "cancelled" and op.kind == "write")


__all__ = ["REFUSED", "UNTOUCHED", "Arena", "Bytes", "CheckFailed", "Ledger", "Op", "Piece", "Tally", "ends_within"]
