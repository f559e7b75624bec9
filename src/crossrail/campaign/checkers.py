"""Compares what engines were asked to do with what they did: the promises of the contract as checks.

A Ledger submits operations on tracked memory and notes what the contract then promises: completion exactly once, counts
equal to operations, bytes as they were sent, no touch of source or target after a completion, messages delivered once,
everything ended once faults stop, nothing left over. It works on any engines whose memory it can reach. With engines of
a World it checks at the very moment of each event, and runs are repeatable; with those of other processes, when their
messages arrive.

Only promises are checked: writes in flight may still reach a peer that was given up (PeerLost), and a failed operation
may have been counted, as a whole or in part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from crossrail.campaign.books import Arena, Bytes, Op, Piece, Tally
from crossrail.campaign.checks import REFUSED, SOURCE_POISON, TARGET_POISON, UNTOUCHED, CheckFailed, Checks
from crossrail.campaign.parts import AnyEngine, AnyTransfer
from crossrail.errors import WaitTimeout
from crossrail.regions import Region, RegionDescriptor

_POOL_BYTES = 4 << 20


class Ledger(Checks):
    """Submits operations and keeps the books on them. One thread.

    seed: determines the sources' bytes. Everything said of Checks applies here too.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
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
        arena.older.clear()
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
        """The region was closed, or revoked and unused by its owner: nothing in it may change any more."""
        arena.is_closed = True
        arena.memory[:] = TARGET_POISON

    def revoke_arena(self, arena: Arena, timeout_s: float) -> bool:
        """Locks peers out of a region of this process, whose owner goes on using it.

        What they were at there must not change any more, nor be read by them. False: one may still be at it after
        timeout_s. Raises TransportError as Region.revoke does.
        """
        assert isinstance(arena.region, Region)
        descriptor, is_new = arena.descriptor, not (arena.is_fencing or arena.is_fenced)
        try:
            arena.region.revoke(timeout_s)
            arena.is_fencing, arena.is_fenced = False, True
        except WaitTimeout:
            arena.is_fencing = True
        if is_new:
            arena.older.append(descriptor)
        if arena.is_fenced:
            for op in self.ops:
                self._fence(op, arena)
        return arena.is_fenced

    def renew_arena(self, arena: Arena) -> None:
        """Lets peers in again. Raises TransportError as Region.renew does."""
        assert isinstance(arena.region, Region)
        arena.region.renew()
        arena.is_fenced = False

    def _fence(self, op: Op, arena: Arena) -> None:
        """The operation that peers had in the arena is over, whatever is known about its end."""
        if op.kind == "read":
            if op.completions == 0 and op.sources[0][0] is arena:
                _, at, nbytes = op.sources[0]
                arena.memory[at : at + nbytes] = SOURCE_POISON
                op.is_source_fenced = True
            return  # what it reads into is its submitter's, who is no peer there
        for piece in op.pieces:
            if piece.arena is arena:
                piece.memory[:] = TARGET_POISON
                piece.is_poisoned = piece.is_fenced = True
                piece.is_unsure = False  # not even a peer that was given up can get there

    # ---- counting

    def tally(self, engine: AnyEngine, imm: int | None = None) -> Tally:
        """A number of the receiver's, allocated unless given. Several operations may share it."""
        tally = Tally(engine.alloc_imm() if imm is None else engine.imm_counter(imm), engine)
        self._tallies.append(tally)
        return tally

    # ---- operations. All ranges are fresh; None where an arena has no room left

    def write(
        self, source: Arena, target: Arena, nbytes: int, tally: Tally | None = None, *,
        by: RegionDescriptor | None = None, **options: Any,
    ) -> Op | None:  # fmt: skip
        """One contiguous range. by: another than the target's present descriptor; options: rail and verify."""
        ranges = _take_both(source, target, nbytes)
        if ranges is None:
            return None
        at, to = ranges
        descriptor = target.descriptor if by is None else by
        piece = self._piece(source, at, target, to, nbytes, descriptor)
        transfer = source.engine.submit_write(
            source.region, descriptor, nbytes, src_offset=at, dst_offset=to, imm=_imm(tally), **options
        )
        return self._add("write", transfer, [(source, at, nbytes)], [piece], _counts([piece], tally), **options)

    def spoiled_write(self, source: Arena, target: Arena, nbytes: int, tally: Tally) -> Op | None:
        """A checked write whose last byte changes before it is sent. On simulated engines only: they post in their
        turns.
        """
        op = self.write(source, target, nbytes, tally, verify=True)
        if op is None:
            return None
        (_, at, _), piece = op.sources[0], op.pieces[0]
        source.memory[at + nbytes - 1] ^= 1
        piece.data = source.memory[at : at + nbytes].copy()
        op.is_spoiled = True
        return op

    def read(self, target: Arena, source: Arena, nbytes: int, **options: Any) -> Op | None:
        """Reads one contiguous range of a peer, after putting bytes there for it. options: verify."""
        ranges = _take_both(source, target, nbytes)
        if ranges is None:
            return None
        at, to = ranges
        piece = self._piece(source, at, target, to, nbytes)
        transfer = target.engine.submit_read(
            target.region, source.descriptor, nbytes, dst_offset=to, src_offset=at, **options
        )
        op = self._add("read", transfer, [(source, at, nbytes)], [piece], {}, **options)
        op.is_stale = source.is_fenced
        return op

    def paged_writes(
        self, source: Arena, target: Arena, from_pages: Sequence[int], to_pages: Sequence[int], page_bytes: int,
        tally: Tally | None = None, **options: Any,
    ) -> Op | None:  # fmt: skip
        """Pages, numbered within a fresh range of each arena. options: verify, as in submit_paged_writes."""
        source_bytes, target_bytes = (page_bytes * (max(pages) + 1) for pages in (from_pages, to_pages))
        at, to = source.take(source_bytes), target.take(target_bytes)
        if at is None or to is None:
            return None
        pieces = [
            self._piece(source, at + a * page_bytes, target, to + b * page_bytes, page_bytes, target.descriptor)
            for a, b in zip(from_pages, to_pages, strict=True)
        ]
        transfer = source.engine.submit_paged_writes(
            source.region, np.array(from_pages, np.uint32), target.descriptor, np.array(to_pages, np.uint32),
            page_bytes, src_offset=at, dst_offset=to, imm=_imm(tally), **options,
        )  # fmt: skip
        return self._add("paged", transfer, [(source, at, source_bytes)], pieces, _counts(pieces, tally), **options)

    def scatter(
        self, source: Arena, targets: Sequence[Arena], lengths: Sequence[int], imm: int, **options: Any
    ) -> Op | None:
        """A slice to each target. All targets use the same number, each with a tally of its own."""
        ats = [source.take(nbytes) for nbytes in lengths]
        tos = [target.take(nbytes) for target, nbytes in zip(targets, lengths, strict=True)]
        if any(at is None for at in ats) or any(to is None for to in tos):
            return None
        starts, ends = [at for at in ats if at is not None], [to for to in tos if to is not None]
        pieces = [
            self._piece(source, at, target, to, nbytes, target.descriptor)
            for at, to, target, nbytes in zip(starts, ends, targets, lengths, strict=True)
        ]
        counts = self._tallies_of([target.engine for target in targets], imm)
        for tally in counts:
            counts[tally] = sum(piece.arena.engine is tally.engine and not piece.is_fenced for piece in pieces)
        transfer = source.engine.submit_scatter(
            source.region, [target.descriptor for target in targets], lengths=list(lengths),
            src_offsets=starts, dst_offsets=ends, imm=imm, **options,
        )  # fmt: skip
        sources = [(source, at, nbytes) for at, nbytes in zip(starts, lengths, strict=True)]
        return self._add("scatter", transfer, sources, pieces, counts, **options)

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

    # ---- how

    def _tallies_of(self, engines: Sequence[AnyEngine], imm: int) -> dict[Tally, int]:
        """The tallies of one number at several engines, and how often each engine is named."""
        named = {id(engine): engine for engine in engines if not engine.closed}
        counts = {key: sum(id(engine) == key for engine in engines) for key in named}
        return {self.tally(engine, imm): counts[key] for key, engine in named.items()}

    def _data(self, nbytes: int) -> Bytes:
        """Bytes that no other operation of about that length has."""
        pool = _random_bytes(-(-(nbytes + 1) // _POOL_BYTES))
        self._seed = self._seed * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        at = (self._seed >> 32) % (len(pool) - nbytes)
        return pool[at : at + nbytes]

    def _piece(
        self, source: Arena, at: int, target: Arena, to: int, nbytes: int, descriptor: RegionDescriptor | None = None
    ) -> Piece:
        """descriptor: by which a peer is to write there; None where the target is the submitter's own."""
        data = self._data(nbytes)
        source.memory[at : at + nbytes] = data
        piece = Piece(target, to, data, is_unsure=self.is_dead(target.engine))
        if descriptor is not None and target.refuses(descriptor):
            piece.memory[:] = TARGET_POISON
            piece.is_poisoned = piece.is_fenced = True
        return piece

    def _add(
        self, kind: str, transfer: AnyTransfer, sources: list[tuple[Arena, int, int]], pieces: list[Piece],
        counts: dict[Tally, int], *, verify: bool = False, **_: Any,
    ) -> Op:  # fmt: skip
        op = Op(len(self.ops), kind, transfer, sources, pieces, counts, is_verified=verify)
        op.is_stale = any(piece.is_fenced for piece in pieces)
        self.ops.append(op)
        for tally in counts:
            tally.ops.append(op)
        if len(counts) == 1 and kind in ("write", "paged") and not op.is_stale:
            self._watch_count(op)
        transfer.add_done_callback(lambda done: self._completed(op, done))
        return op


def ends_within(ledger: Ledger, run: Callable[[float], object], limit_s: float, step_s: float = 0.25) -> bool:
    """Runs until every operation is complete, for limit_s at most. run: lets so much time pass."""
    passed_s = 0.0
    while ledger.pending and passed_s < limit_s:
        run(step_s)
        passed_s += step_s
    return not ledger.pending


@functools.cache
def _random_bytes(pools: int) -> Bytes:
    """Made once: drawing them each time would take longer than everything else. None is poison or zero."""
    return np.random.Generator(np.random.PCG64(1)).integers(1, 0xD0, 2 * pools * _POOL_BYTES, np.uint8)


def _take_both(source: Arena, target: Arena, nbytes: int) -> tuple[int, int] | None:
    at, to = source.take(nbytes), target.take(nbytes)
    return None if at is None or to is None else (at, to)


def _counts(pieces: Sequence[Piece], tally: Tally | None) -> dict[Tally, int]:
    """One count for each piece; none for pieces that must be refused."""
    return {} if tally is None else {tally: sum(not piece.is_fenced for piece in pieces)}


def _imm(tally: Tally | None) -> int | None:
    return None if tally is None else tally.counter.imm


__all__ = ["REFUSED", "UNTOUCHED", "Arena", "Bytes", "CheckFailed", "Ledger", "Op", "Piece", "Tally", "ends_within"]
