"""How the remaining ranks agree on who they are, and on the last half of each masked rank: Paxos, once per view.

Pure: hears records, is told the time, and says what its own record is. confirmations.py carries records; they may be
late, be lost or come in any order, and each replaces the one before.

One decision, from view v to v + 1, in ballots; a ballot's number names its leader, and is greater than any it knew:
  1. The leader asks for promises. A member promises the greatest ballot that it has seen; from then on, until v + 1, it
     confirms no half any more, and says how far it has everything of each rank.
  2. When every rank that shall go on has promised, and these are a quorum of v, the leader proposes: what of their
     accepted proposals has the greatest ballot, else v + 1 of these ranks, in which a masked rank's last half is the
     last that all of them have whole. A member accepts unless it has promised a greater ballot.
  3. When a quorum of v has accepted, it is decided. Whoever reads of v + 1 takes it over.
That two decisions cannot differ is Lamport's argument (Paxos made simple, 2001): quorums of v meet. That a half which
somebody passed counts at all: he passed it after all of v had confirmed it, so before each of these promised.

Who leads: the lowest rank that one does not suspect, at once; another one, if nothing is decided for a while.
"""

from __future__ import annotations

from collections.abc import Callable

from crossrail.moe.masking.views import Lasts, Record, View

PATIENCE_S = 0.5  # until the next rank in turn takes over from a leader that gets nowhere

Got = Callable[[], tuple[Lasts, ...]]


class Paxos:
    """One rank's part in it. Threads: one at a time."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.view = View(0, tuple(range(world)), {})
        self._world = world
        self._heard: dict[int, Record] = {}
        self._suspects: set[int] = set()
        self._since_s: float | None = None  # when this view became troubled, or our own ballot failed
        self._begin(self.view)

    @property
    def record(self) -> Record:
        """What all members have to know about us."""
        suspects = frozenset(self._suspects)
        return Record(self.rank, self.view, suspects, self._promised, self._got, self._accepted, self._proposal)

    @property
    def is_frozen(self) -> bool:
        """Whether no half may be confirmed before the next view."""
        return self._promised > 0

    @property
    def is_troubled(self) -> bool:
        """Whether a next view is wanted, by us or by others."""
        return bool(self._suspects) or self._promised > 0 or any(one.suspects or one.proposal for one in self._peers())

    @property
    def suspects(self) -> frozenset[int]:
        """Members that we have lost sight of."""
        return frozenset(self._suspects)

    @property
    def is_hopeless(self) -> bool:
        """Whether those whom we do not suspect are no quorum: nothing that we take part in can be decided any more."""
        return not self.view.is_quorum(set(self.view.members) - self._suspects)

    def suspect(self, rank: int) -> None:
        """We have lost sight of it. For good: it is masked, or we are."""
        if rank in self.view.members and rank != self.rank:
            self._suspects.add(rank)

    def hear(self, record: Record) -> None:
        """A member's latest."""
        if record.rank in self.view.members:
            self._heard[record.rank] = record

    def awaited(self) -> list[int]:
        """Members whose promise our ballot lacks; if another rank leads, that rank, which tells whom it waits for."""
        if self._proposal is None:
            return [rank for rank in self._survivors() if rank < self.rank][:1]
        promised = self._promises(self._proposal[0])
        return [rank for rank in self._survivors() if rank not in promised]

    def step(self, now_s: float, got: Got) -> View | None:
        """Processes what was heard. The next view, once it is decided; it may be without us.

        got: by rank, how far we have everything of it; read when a promise is made.
        """
        newer = [one.view for one in self._heard.values() if one.view.number > self.view.number]
        if newer:
            return self._begin(max(newer, key=lambda view: view.number))
        if not self.is_troubled:
            return None
        if self._since_s is None:
            self._since_s = now_s
        self._answer(got)
        self._propose(now_s)
        self._answer(got)
        if self._proposal is None or self._proposal[1] is None:
            return None
        ballot, view = self._proposal
        accepted = [one.rank for one in self._all() if one.accepted is not None and one.accepted[0] == ballot]
        return self._begin(view) if view is not None and self.view.is_quorum(accepted) else None

    # ---- parts

    def _begin(self, view: View) -> View:
        self.view = view
        self._suspects &= set(view.members)
        self._heard = {rank: one for rank, one in self._heard.items() if rank in view.members}
        self._promised = 0
        self._got: tuple[Lasts, ...] = ()
        self._accepted: tuple[int, View] | None = None
        self._proposal: tuple[int, View | None] | None = None
        self._since_s = None
        return view

    def _peers(self) -> list[Record]:
        """The latest of other members that are in this view."""
        return [one for one in self._heard.values() if one.view.number == self.view.number]

    def _all(self) -> list[Record]:
        return [*self._peers(), self.record]

    def _answer(self, got: Got) -> None:
        for one in self._all():
            if one.proposal is None or one.rank in self._suspects:
                continue
            ballot, view = one.proposal
            if ballot > self._promised:
                self._promised, self._got = ballot, got()
            if view is not None and ballot == self._promised:
                self._accepted = (ballot, view)

    def _propose(self, now_s: float) -> None:
        ahead = max(one.promised for one in self._all())
        if self._proposal is not None and ahead > self._proposal[0]:
            self._proposal, self._since_s = None, now_s  # another one's turn; ours comes again
        survivors = self._survivors()
        if not self.view.is_quorum(survivors):
            return
        if self._proposal is None:
            turn = sum(rank < self.rank for rank in self.view.members if rank not in self._suspects)
            turn += ahead > 0  # who leads already is given time
            if self._since_s is None or now_s < self._since_s + turn * PATIENCE_S:
                return
            self._proposal = ((ahead // self._world + 1) * self._world + self.rank, None)
        elif self._proposal[1] is None:
            self._choose(self._proposal[0], survivors)

    def _promises(self, ballot: int) -> dict[int, Record]:
        return {one.rank: one for one in self._all() if one.promised == ballot}

    def _choose(self, ballot: int, survivors: list[int]) -> None:
        promises = self._promises(ballot)
        if not set(survivors) <= set(promises):
            return
        before = [promises[rank].accepted for rank in survivors]
        accepted = max((one for one in before if one is not None), key=lambda one: one[0], default=None)
        if accepted is not None:
            self._proposal = (ballot, accepted[1])
            return
        lost = [rank for rank in self.view.members if rank not in survivors]
        lasts = {rank: _least([promises[one].got[rank] for one in survivors]) for rank in lost}
        view = View(self.view.number + 1, tuple(survivors), {**self.view.lasts, **lasts})
        self._proposal = (ballot, view)

    def _survivors(self) -> list[int]:
        """Who should continue: we, and those who agree with us and each other on who is there. Whoever disagrees with
        most is left out first; of two the accused one, since a frozen rank accuses nobody; then the higher rank.
        """
        suspects = {one.rank: one.suspects for one in self._all()}
        accused = frozenset().union(*suspects.values())

        def disagree(one: int, other: int) -> bool:
            return other in suspects.get(one, ()) or one in suspects.get(other, ())

        chosen = {rank for rank in self.view.members if not disagree(self.rank, rank)}
        while True:
            conflicts = {rank: sum(disagree(rank, other) for other in chosen) for rank in chosen}
            worst = max(chosen, key=lambda rank: (conflicts[rank], rank in accused, rank))
            if conflicts[worst] == 0:
                return sorted(chosen)
            chosen.discard(worst)


def _least(marks: list[Lasts]) -> Lasts:
    return min(even for even, _ in marks), min(odd for _, odd in marks)
