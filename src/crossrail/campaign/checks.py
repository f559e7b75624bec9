"""The checks that a Ledger (crossrail.campaign.checkers) applies to its operations."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from crossrail.campaign.books import Arena, Bytes, Op, Piece, Tally
from crossrail.campaign.parts import AnyEngine, AnyTransfer

SOURCE_POISON = 0xD5  # what a source is filled with once its operation is complete,
TARGET_POISON = 0xEA  # and a target: neither may be seen, nor change
UNTOUCHED = 0x00
_UNITS_PER_COUNT = 48
# Failures after which nothing is promised of the target: it is the memory of a peer that was given up.
_GIVEN_UP = ("peer-lost", "engine-closed")
REFUSED = "refused"  # by the submit itself, in another process: nothing was begun, nothing counts


class CheckFailed(AssertionError):
    """A promise was not kept. The message says which, and of which operation."""


class Checks:
    """Operations, their memory and their counts, and the promises about them. One thread submits and checks.

    Engines of real transports have a callback thread each: their callbacks and the checks take turns, by a lock.

    Faults that nothing can survive (a killed engine, say) are told by note_dead(). Checks raise CheckFailed; those that
    run in callbacks are kept and raised by the next check().
    """

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.arenas: list[Arena] = []
        self.failures: list[str] = []
        self._tallies: list[Tally] = []
        self._dead: list[AnyEngine] = []
        self._messages: dict[bytes, int] = {}
        self._turn = threading.RLock()  # what callbacks note, and the memory that they poison and compare

    # ---- what happened

    def note_message(self, payload: bytes) -> None:
        """Tells of a message that arrived: from the callback of a receive pool."""
        with self._turn:
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
        """The engine was killed or closed: nothing is promised about its operations, nor those on their way to it."""
        self._dead.append(engine)
        for op in self.ops:
            for piece in op.pieces:
                piece.is_unsure = piece.is_unsure or piece.arena.engine is engine

    def note_given_up(self, engine: AnyEngine, peer: AnyEngine) -> None:
        """The engine is about to forget the peer: what is on its way to the peer's memory may still arrive."""
        for op in self.ops:
            for piece in op.pieces:
                if op.completions == 0 and op.transfer._engine is engine and piece.arena.engine is peer:
                    piece.is_unsure = piece.is_unsure or not piece.is_fenced

    def retire(self, tally: Tally) -> None:
        """The number is about to be released: its count is checked now, and not again."""
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
        """Checks what must hold at any time."""
        with self._turn:
            for op in self.ops:
                for piece in op.pieces:
                    self._check_poison(op, piece)
            for arena in self.arenas:
                if arena.is_closed and not self.is_dead(arena.engine) and (arena.memory != TARGET_POISON).any():
                    self._fail(f"memory of engine {arena.engine.name!r} was touched after its region was closed")
        if self.failures:
            raise CheckFailed("; ".join(self.failures[:5]))

    def check_end(self) -> None:
        """Checks what must hold once faults have stopped and everything had time to end."""
        with self._turn:
            for op in self.ops:
                if op.completions != 1:
                    self._fail(f"{op} completed {op.completions} times")
                elif op.transfer.status != op.status:
                    self._fail(f"{op} completed, and is {op.transfer.status} now")
            self.failures += self.unsettled()
            self.check()

    def unsettled(self) -> list[str]:
        """What must hold in the end, and does not yet: counts and messages may arrive after the completion."""
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

    def _watch_count(self, op: Op) -> None:
        """If the number is used by this operation alone, its bytes must have arrived with its last count."""
        (tally, count), *_ = op.counts.items()
        if len(tally.ops) > 1 or self.is_dead(tally.engine):
            return

        def counted() -> None:
            with self._turn:  # pairs with _completed(), which poisons the memory and records that
                for piece in op.pieces if len(tally.ops) == 1 else ():  # alone still
                    is_ours = piece.is_poisoned or piece.is_unsure or piece.arena.is_closed  # by now
                    if not is_ours and not np.array_equal(piece.memory, piece.data):
                        self._fail(f"{op} was counted before its bytes were in place")
            tally.counter._give_back(count)

        tally.counter.on_count(count, counted)

    def _completed(self, op: Op, transfer: AnyTransfer) -> None:
        with self._turn:
            self._note_completion(op, transfer)

    def _note_completion(self, op: Op, transfer: AnyTransfer) -> None:
        op.completions += 1
        op.status = transfer.status
        if op.completions > 1:
            self._fail(f"{op} completed {op.completions} times")
            return
        if op.status == "pending":
            self._fail(f"{op} completed, and says that it is pending")
        if op.status == "done" and op.is_stale:
            self._fail(f"{op} is done, by a descriptor that was revoked before")
        if op.status == "done" and op.is_spoiled:
            self._fail(f"{op} was verified, and its bytes had changed on their way")
        for arena, at, nbytes in op.sources:
            if not arena.is_closed:
                arena.memory[at : at + nbytes] = SOURCE_POISON
        for piece in op.pieces:
            if piece.is_fenced:
                continue
            if op.status in _GIVEN_UP or self.is_dead(op.transfer._engine):
                piece.is_unsure = True
            if piece.is_unsure or piece.arena.is_closed:
                continue
            if op.status == "checksum-mismatch" and not op.is_spoiled:
                self._fail(f"{op} fails its checksum, and nobody else wrote there")
            if wrong := wrong_bytes(piece.memory, piece.data, UNTOUCHED, is_done=op.status == "done"):
                self._fail(f"{op} {wrong}")
            piece.memory[:] = TARGET_POISON
            piece.is_poisoned = True

    def _check_poison(self, op: Op, piece: Piece) -> None:
        if piece.arena.is_closed:
            return
        if piece.is_poisoned and not piece.is_unsure and (piece.memory != TARGET_POISON).any():
            at = int(np.flatnonzero(piece.memory != TARGET_POISON)[0])
            after = "its peer was locked out" if piece.is_fenced else "its completion"
            self._fail(f"the target of {op} was touched after {after}, at byte {at} of {len(piece.data)}")
            piece.is_unsure = True  # report it once
        if (op.completions or op.is_source_fenced) and (piece.memory == SOURCE_POISON).any():
            after = "its completion" if op.completions else "its peer was locked out"
            self._fail(f"the source of {op} was read after {after}")

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
        may_leave_shares = any(
            op.status not in ("done", "cancelled")
            and not op.is_verified
            and any(tally.engine is engine for tally in op.counts)
            for op in self.ops
        )
        if not may_leave_shares and stats["imm_units_received"] % _UNITS_PER_COUNT:
            fail(f"engine {engine.name!r} has counted {stats['imm_units_received']}/48: not a whole number")

    def _fail(self, text: str) -> None:
        self.failures.append(text)


def wrong_bytes(memory: Bytes, data: Bytes, old: int, *, is_done: bool) -> str:
    """What is wrong with a target whose write of data has completed; empty: nothing.

    old: the previous value of each of its bytes. If done, all of data must be there; otherwise some of it may be.
    """
    if is_done and not np.array_equal(memory, data):
        wrong = int(np.flatnonzero(memory != data)[0])
        return f"is done, and byte {wrong} of {len(data)} at its target is not what was sent"
    if not is_done and not ((memory == data) | (memory == old)).all():
        return "left bytes at its target that are neither old nor new"
    return ""


def _counts_nothing(op: Op) -> bool:
    """Whether an operation that did not succeed must count nothing. Cancelled, pages and targets count 1 or nothing
    each; a write nothing.

    A verified operation is counted by the peer that confirms it, which only a peer that was given up can do unheard. A
    refused operation was never begun.
    """
    if op.is_verified and op.kind != "scatter":  # a scatter's targets are independent of each other
        return op.status not in _GIVEN_UP
    return op.status == REFUSED or (op.status == "cancelled" and op.kind == "write")
