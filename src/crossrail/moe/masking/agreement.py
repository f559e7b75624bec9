"""on_lost="mask" without shared memory: a half counts once all ranks confirm it, and all mask the same lost ranks.

A rank that has everything of a half tells everybody, and continues when everybody has said so. So when a rank is lost,
either nobody has continued from a half, or everybody has all of it: the remaining ranks agree on its last half
(paxos.py), and on who remains, and nothing that a call returned has to be taken back. Then its writes are fenced off:
each rank has its own registration of our memory, which is revoked.

A rank takes part while it is in a call that waits. One that computes is waited for, as always.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import crossrail as xr
from crossrail.errors import CrossrailError, WaitTimeout
from crossrail.moe.errors import NoMajority, masked_out
from crossrail.moe.links.board import PARITIES, RETURNED, SENT
from crossrail.moe.links.either import link_of
from crossrail.moe.links.far import Far
from crossrail.moe.links.near import Near
from crossrail.moe.links.notes import Notes
from crossrail.moe.masking.confirmations import Confirmations
from crossrail.moe.masking.paxos import Paxos
from crossrail.moe.masking.views import COMBINE, DISPATCH, Lasts, View
from crossrail.moe.outcome import Outcome, call_failed_error, error_of, unposted_error
from crossrail.moe.rounds import Round

_SLICE_S = 5e-3  # of a wait for data, until we look at what others say
_TROUBLED_SLICE_S = 1e-3
_RETRY_S = 50e-6  # until a confirmation may follow the one before
_ASK_EVERY_S = 0.25  # while we wait: who is gone is noticed, and who was masked learns of it
_FROZEN_SHARE = 0.5  # of timeout_s: the rest is for the agreement
_LAST_WORDS_S = 2.0  # for an answer of ranks that we have lost sight of, when too few are left
_HALVES = {DISPATCH: ("dispatch", SENT), COMBINE: ("combine", RETURNED)}
_STEPS = {DISPATCH: ("routes", "rows"), COMBINE: ("results",)}


class Agreement:
    """One rank's part. Threads: one at a time. Owner: close() gives its memory back.

    timeout_s: of calls as a rule; a rank that does not move for half of it is lost.
    """

    def __init__(
        self, engine: xr.Engine, world: int, rank: int, near: Near, far: Far, notes: Notes, timeout_s: float
    ) -> None:
        self._engine = engine
        self._rank, self._world = rank, world
        self._near, self._far, self._notes = near, far, notes
        self._confirmations = Confirmations(engine, world, rank)
        self._paxos = Paxos(rank, world)
        self._addresses: Sequence[xr.Address] = []
        self._suspicions: dict[int, str] = {}  # why we suspect a rank
        self._rounds: dict[int, Round] = {}  # by parity: the last that was opened
        self._passed = [-1] * PARITIES  # marks: nothing yet
        self._confirmed = [-1] * PARITIES  # in this view
        self._fences: list[int] = []  # masked ranks whose writes are not fenced off yet
        self._frozen_at_s: dict[int, float] = {}  # since when, as far as we saw
        self._frozen_max_s = timeout_s * _FROZEN_SHARE
        self._asked_at_s = 0.0
        self._last_words: list[xr.Transfer] | None = None  # asked for when too few were left
        self._last_words_deadline_at_s = 0.0
        self._next_step_at_s = 0.0
        self._members = np.array(self._paxos.view.members)

    @property
    def masked(self) -> tuple[int, ...]:
        """Ranks that are masked so far, ascending."""
        return tuple(sorted(self._paxos.view.lasts))

    def card(self) -> dict[str, Any]:
        """What others need to know about it."""
        return self._confirmations.card()

    def connect(self, cards: Sequence[dict[str, Any]], addresses: Sequence[xr.Address], timeout_s: float) -> None:
        """cards, addresses: of all ranks."""
        self._addresses = addresses
        for rank, card in enumerate(cards):
            if rank != self._rank:
                self._engine.connect(addresses[rank], timeout_s)
                self._confirmations.connect(rank, card)

    def open(self, opened: Round) -> None:
        """A round was opened: later messages refer to this one."""
        self._rounds[opened.ordinal % PARITIES] = opened

    # ---- a half

    def wait(self, opened: Round, half: int, timeout_s: float) -> tuple[int, ...]:
        """Waits until that half of the round is whole everywhere. Returns masked ranks that are not part of it.

        Raises WaitTimeout, after which it may be called again; MaskedOut, NoMajority, EngineClosed, PeerFailed.
        """
        mark, parity = 2 * opened.ordinal + half, opened.ordinal % PARITIES
        deadline_at_s = self._engine._now_s + timeout_s
        while self._passed[parity] < mark:
            left_s = max(deadline_at_s - self._engine._now_s, 0.0)
            late = self._gather(opened, half, min(left_s, self._slice_s))
            missing: list[int] = []
            has_confirmed = late is None and not self._fences and self._confirm(mark)
            if has_confirmed:
                missing = self._confirmations.unconfirmed(self._paxos.view.number, mark, self._members)
                if not missing:
                    self._passed[parity] = mark
                    break
                late = missing[0]
            left_s = max(deadline_at_s - self._engine._now_s, 0.0)
            if self._is_time_to_step(left_s):
                if self._step():
                    continue
                self._check_none_left(missing, opened, half)
                self._check_notes(missing, opened, half)
                if left_s <= 0:
                    raise self._give_up(opened, half, late, timeout_s)
            # While data is missing, the wait for it has been one already.
            if has_confirmed or self._paxos.is_troubled or self._fences:
                self._confirmations.wait_news(min(left_s, self._slice_s))
            elif late is None:
                self._confirmations.wait_news(min(left_s, _RETRY_S))
        return self._paxos.view.absent(mark)

    @property
    def _slice_s(self) -> float:
        return _TROUBLED_SLICE_S if self._paxos.is_troubled or self._fences else _SLICE_S

    def _is_time_to_step(self, left_s: float) -> bool:
        now_s = self._engine._now_s
        if left_s > 0 and now_s < self._next_step_at_s and not self._paxos.is_troubled and not self._fences:
            return False
        self._next_step_at_s = now_s + _SLICE_S
        return True

    def _gather(self, opened: Round, half: int, slice_s: float) -> int | None:
        """Waits a little for what members have to send us. Returns a rank that is late, None: nobody is."""
        name, word = _HALVES[half]
        outcomes = [self._near.wait(word, opened.number, slice_s)[0]]
        steps = _STEPS[half]
        for step in steps:
            outcomes.append(self._far.wait(step, opened.number, slice_s if outcomes[-1].result == "ready" else 0.0))
        late = None
        for outcome in outcomes:
            if outcome.result == "peer-lost" and self._has_left(outcome.rank) and not self._paxos.is_troubled:
                if not self._has(outcome.rank, opened, half):  # it left in order, and is not masked for that
                    raise self._error(Outcome("left", outcome.rank), f"{name} of round {opened.number}")
            elif outcome.result in ("peer-lost", "failed"):
                self._suspect(outcome.rank, outcome.detail)
            elif outcome.result == "masked-out":
                raise masked_out()
            elif outcome.result not in ("ready", "late"):
                raise self._error(outcome, f"{name} of round {opened.number}")
            late = outcome.rank if outcome.result != "ready" and late is None else late
        # What a lost rank sent before still counts.
        if late is None or not all(self._has(rank, opened, half) for rank in self._paxos.view.members):
            return late
        for step in steps:
            self._far.wait(step, opened.number, 0.0)  # counts that have come are taken, or the next round had them
        return None

    def _has(self, rank: int, opened: Round, half: int) -> bool:
        if rank == self._rank:
            return True
        if rank in self._near.ranks:
            return self._near.has_come(rank, _HALVES[half][1], opened.number)
        return all(self._far.has_come(step, opened.number, rank) for step in _STEPS[half])

    def _confirm(self, mark: int) -> bool:
        """Tells that we have all of that half, unless done before, or while the next view is being decided on."""
        parity = mark // 2 % PARITIES
        if self._confirmed[parity] >= mark:
            return True
        if self._paxos.is_frozen:
            return False
        if not self._confirmations.confirm(self._paxos.view.number, mark, self._paxos.view.members):
            return False
        self._confirmed[parity] = mark
        return True

    def _check_none_left(self, missing: list[int], opened: Round, half: int) -> None:
        """PeerFailed when one that has not confirmed has closed its AllToAll: its confirmations came before."""
        for rank in missing:
            if self._has_left(rank) and rank in self._confirmations.unconfirmed(
                self._paxos.view.number, 2 * opened.ordinal + half, self._members
            ):
                name = f"{_HALVES[half][0]} of round {opened.number}"
                raise self._error(Outcome("left", rank), name)

    def _check_notes(self, unconfirmed: list[int], opened: Round, half: int) -> None:
        """PeerFailed when a call has failed on a rank that we wait for."""
        members = self._paxos.view.members

        def is_missing(rank: int) -> bool:
            has_all = self._has(rank, opened, half) and rank not in unconfirmed
            return rank in members and not has_all and not self._has_left(rank)

        if (note := self._notes.due(is_missing)) is not None:
            name = f"{_HALVES[half][0]} of round {opened.number}"
            raise call_failed_error(note.rank, self._addresses[note.rank], name, note.words)

    def _has_left(self, rank: int) -> bool:
        return rank != self._rank and link_of(self._near, self._far, rank).has_left(rank)

    # ---- who is left

    def _step(self) -> bool:
        """Processes what others said. Returns whether the view has changed. Raises MaskedOut, NoMajority."""
        self._confirmations.repeat_failed()
        for record in self._confirmations.fresh():
            self._paxos.hear(record)
        now_s = self._engine._now_s
        self._look_at_members(now_s)
        view = self._paxos.step(now_s, self._got)
        if view is not None:
            self._adopt(view)
        self._fences = [rank for rank in self._fences if not self._far.shut_out(rank)]
        if self._paxos.view.number > 0:
            # A rank that has not continued from a half wants it confirmed in the new view, too.
            for passed in self._passed:
                self._confirm(passed)
        living = [rank for rank in self._paxos.view.members if rank not in self._paxos.suspects]
        if self._paxos.is_troubled or self._paxos.view.number > 0:
            self._confirmations.publish(self._paxos.record, living)
        if self._paxos.is_hopeless:
            self._end_hopeless(now_s)
        elif now_s >= self._asked_at_s + _ASK_EVERY_S:
            for rank in living if self._asked_at_s > 0 else []:
                if rank != self._rank:
                    self._confirmations.ask(rank)
            self._asked_at_s = now_s
        return view is not None

    def _look_at_members(self, now_s: float) -> None:
        for rank in self._paxos.view.members:
            state = "" if rank == self._rank else self._engine.peer_state(self._addresses[rank])
            if state == "lost":
                # One that has left in order has sent everything that it had. It loses its vote, if there is to be one.
                if self._paxos.is_troubled or not self._has_left(rank):
                    self._suspect(rank, "")
            elif state != "frozen":
                self._frozen_at_s.pop(rank, None)
            elif now_s > self._frozen_at_s.setdefault(rank, now_s) + self._frozen_max_s:
                self._suspect(rank, f"frozen for {now_s - self._frozen_at_s[rank]:.3g} s")

    def _suspect(self, rank: int, detail: str) -> None:
        if rank not in self._suspicions:
            self._suspicions[rank] = detail or self._engine.explain(self._addresses[rank]).note
        self._paxos.suspect(rank)

    def _got(self) -> tuple[Lasts, ...]:
        """By rank, the mark of the last half of each parity that we have completely."""
        return tuple((self._got_of(rank, 0), self._got_of(rank, 1)) for rank in range(self._world))

    def _got_of(self, rank: int, parity: int) -> int:
        opened = self._rounds.get(parity)
        if opened is None:
            return -1
        mark = 2 * opened.ordinal
        has_rows = self._passed[parity] >= mark or self._has(rank, opened, DISPATCH)
        if has_rows and (self._passed[parity] > mark or self._has(rank, opened, COMBINE)):
            return mark + COMBINE
        return mark if has_rows else mark - 2 * PARITIES + COMBINE  # the round before of this parity has ended

    def _adopt(self, view: View) -> None:
        """Goes on in that view: who is not in it is left out of all waits, and cannot write here any more."""
        if self._rank not in view.members:
            raise masked_out()
        gone = [int(rank) for rank in self._members if rank not in view.members]
        self._members = np.array(view.members)
        self._confirmed = [-1] * PARITIES
        self._near.announce(view.number)  # before we write anything that those who are gone may still read
        for rank in gone:
            self._near.leave_out(rank)
            self._far.leave_out(rank)
            if self._engine.peer_state(self._addresses[rank]) != "lost":
                self._engine.forget_peer(self._addresses[rank])
        self._fences += gone

    def check_still_in(self, timeout_s: float) -> None:
        """MaskedOut if a rank whose memory we have just read may have written to it after continuing without us."""
        deadline_at_s = self._engine._now_s + timeout_s
        while self._near.is_ahead(self._paxos.view.number):
            if not self._step() and self._engine._now_s >= deadline_at_s:
                raise NoMajority("the ranks of this node decided on who is left, and this rank was not told", op="moe")
            self._confirmations.wait_news(_TROUBLED_SLICE_S)

    # ---- what ends it

    def _end_hopeless(self, now_s: float) -> None:
        """Too few are left. If the others have masked us meanwhile, they may still say so: asked once more."""
        view, suspects = self._paxos.view, sorted(self._paxos.suspects)
        if self._last_words is None:
            for rank in suspects:
                self._engine.forget_peer(self._addresses[rank])  # otherwise nothing is sent there any more
            self._last_words = [self._confirmations.ask(rank) for rank in suspects]
            self._last_words_deadline_at_s = now_s + _LAST_WORDS_S
        if now_s < self._last_words_deadline_at_s and not all(one.done for one in self._last_words):
            return
        for record in self._confirmations.fresh():
            self._paxos.hear(record)
        if (decided := self._paxos.step(now_s, self._got)) is not None:
            self._adopt(decided)
            return
        names = ", ".join(f"{rank} ({self._addresses[rank].name!r}: {self._suspicions[rank]})" for rank in suspects)
        raise NoMajority(
            f"ranks lost: {names}. Those left are {len(view.members) - len(suspects)} of {len(view.members)}: too few "
            "to go on, since the others may do so without this one. Next: make a new AllToAll",
            op="moe", peer=self._addresses[suspects[0]].name, status="peer-lost",
        )  # fmt: skip

    def _give_up(self, opened: Round, half: int, late: int | None, timeout_s: float) -> CrossrailError:
        name = f"{_HALVES[half][0]} of round {opened.number}"
        if self._paxos.is_troubled:
            awaited = self._paxos.awaited()
            suspects = sorted(self._paxos.suspects)
            return WaitTimeout(
                f"{name}: ranks {suspects} are lost, and within {timeout_s:g} s it was not agreed who goes on; ranks "
                f"{awaited} have not answered. Nothing is lost: wait again. Next: see whether these make the same calls"
            )
        if self._fences:
            return WaitTimeout(f"{name}: masked rank {self._fences[0]} is in the middle of a write to us: wait again")
        rank = self._rank if late is None else late
        return self._error(Outcome("late", rank), name, timeout_s)

    def _error(self, outcome: Outcome, half: str, timeout_s: float = 0.0) -> CrossrailError:
        if outcome.result == "late" and outcome.rank == self._rank:
            return unposted_error(self._rank, half, timeout_s)
        if outcome.result == "left":
            words = link_of(self._near, self._far, outcome.rank).why_left(outcome.rank).words
            outcome = Outcome("left", outcome.rank, words or outcome.detail)
        if outcome.result == "late":
            outcome = Outcome("late", outcome.rank, self._notes.words_of(outcome.rank))
        return error_of(self._engine, outcome, self._addresses[outcome.rank], half, timeout_s)

    def farewell(self, timeout_s: float) -> None:
        """Ends our part; what we confirmed arrives first."""
        self._confirmations.settle(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Gives its memory back. Idempotent."""
        self._confirmations.close(timeout_s)
