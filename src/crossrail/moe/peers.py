"""The other ranks, whether or not they share memory with us: meeting them, and waiting for them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import crossrail as xr
from crossrail.errors import CrossrailError, UsageError
from crossrail.moe.arrays import Array
from crossrail.moe.config import Config
from crossrail.moe.countdown import Countdown
from crossrail.moe.group import Group
from crossrail.moe.links.board import PARITIES, RETURNED, SENT, Board, BoardLayout
from crossrail.moe.links.either import link_of
from crossrail.moe.links.far import Far
from crossrail.moe.links.near import Near
from crossrail.moe.links.node_sums import NodeSums
from crossrail.moe.links.notes import Notes
from crossrail.moe.masking.agreement import Agreement
from crossrail.moe.masking.routes import sources_of
from crossrail.moe.masking.views import COMBINE, DISPATCH
from crossrail.moe.meeting import Member, all_are_ready, make_layout, meet, meet_far, tell_absence, telling_others
from crossrail.moe.outcome import Outcome
from crossrail.moe.parting import Parting
from crossrail.moe.rounds import Round
from crossrail.moe.rows.interface import RowMemory

_SLICE_S = 0.1  # of a wait, between looks at what others say
_HALVES = {DISPATCH: ("dispatch", SENT, "routes"), COMBINE: ("combine", RETURNED, "results")}


class OtherRoute(NamedTuple):
    """A route that two ranks with the same tokens should have alike. place: by expert; ours, theirs: of which token."""

    place: int
    ours: int
    theirs: int


class Peers:
    """All ranks of an AllToAll. Threads: one at a time.

    near: those that share memory with us, we among them. far: the others, None where there are none. sums: with
    node_sums, what our node returns to them. agreement: with on_lost="mask", unless all share memory. layout: where
    rows go. parting: how our part ends, and theirs. waited_s: in all calls here so far.
    Owner: board is the caller's; what far allocates is ours, until close().
    Lifecycle: 1. made: met, and connected to far ranks. 2. ready(). 3. rounds. 4. parting.farewell(). 5. close(), also
    after a failure of ready().
    """

    def __init__(
        self,
        engine: xr.Engine,
        group: Group,
        config: Config,
        board: Board,
        memory: RowMemory,
        timeout_s: float,
        kernels_wait: bool = False,
    ) -> None:
        """Meets them, as all of them do. kernels_wait: ours do so, on a GPU, for what the engine does; then even a rank
        alone has a far.

        Raises UsageError for arguments that differ, or cannot be here; WaitTimeout, PeerLost, EngineClosed.
        """
        self.waited_s = 0.0
        self._is_closed = False
        self.far: Far | None = None
        self.sums: NodeSums | None = None
        self.agreement: Agreement | None = None
        self._engine = engine
        self._slice_s = _SLICE_S if engine._world is None else math.inf  # simulated waits for near ranks take no time
        self._config = config
        self._rank = group.rank
        members = meet(engine, group, config, board.region, timeout_s)
        self._addresses = [member.address for member in members]
        self._all_sources = sources_of(config, group.rank, ())
        near = [member for member in members if member.board is not None]
        masks_far = config.on_lost == "mask" and len(near) < group.size
        if masks_far:
            config = with_room_for_all(config)
        self.layout = make_layout(config, tuple(member.node for member in members))
        masks = config.on_lost == "mask" and not masks_far  # by words, which all map
        boards = [member.board for member in near if member.board is not None]
        ranks, addresses = [member.rank for member in near], [member.address for member in near]
        layouts = [BoardLayout(config, rank, board.layout.holds_rows) for rank in ranks]
        self.near = Near(engine, group.rank, ranks, boards, addresses, layouts, board.rows, masks, group.size)
        self._notes = Notes(engine, group.rank, group.size, self.near, None)
        if len(near) < group.size or kernels_wait:
            try:
                self._meet_far(group, config, members, boards, memory, kernels_wait, timeout_s)
            except BaseException:
                self._close_links(timeout_s)
                raise
        self.parting = Parting(
            engine, self._config, group.rank, self._addresses, self.near, self.far, self._notes, self.agreement
        )

    def _meet_far(
        self,
        group: Group,
        config: Config,
        members: Sequence[Member],
        boards: Sequence[memoryview],
        memory: RowMemory,
        kernels_wait: bool,
        timeout_s: float,
    ) -> None:
        """boards: of near ranks, ascending."""
        masks = config.on_lost == "mask"
        # An engine that kernels wait for must not call the driver, which may wait for them; tcp uses it to copy GPU
        # memory, and so does shm between GPU and host.
        rows_on_host = kernels_wait and any(member.uses_tcp for member in members)
        with telling_others(partial(meet_far, group, None, None, (), timeout_s)):
            self.far = far = Far(self._engine, config, self.layout, group.rank, memory, rows_on_host)
            self._notes = Notes(self._engine, group.rank, group.size, self.near, far)
            if masks:
                self.agreement = Agreement(self._engine, group.size, group.rank, self.near, far, self._notes, timeout_s)
        meet_far(group, far, self.agreement, self._addresses, timeout_s)
        for rank in far.ranks:
            self.near.watch(rank, members[rank].address, far.imms_of(rank), masks)
        for rank, theirs in zip(self.near.ranks, boards, strict=True):
            if rank != group.rank:
                far.watch(rank, theirs)
        if config.node_sums:
            self.sums = NodeSums(self.layout, group.rank, self.near.boards, far, memory, config.max_tokens)

    @staticmethod
    def expected(group: Group, config: Config, timeout_s: float) -> contextlib.AbstractContextManager[None]:
        """Around what is made before this is: what fails there is raised on the others, too, who would wait for us."""
        return telling_others(partial(tell_absence, group, config, timeout_s))

    def ready(self, group: Group, timeout_s: float, trouble: CrossrailError | None = None) -> None:
        """Until all are. Others write here from then on: what is to be prepared before that, is by now. trouble: what
        kept us from it; raised here, and on all others, which would wait for us else.
        """
        if self.far is not None:
            all_are_ready(group, self.far, timeout_s, trouble)

    @contextlib.contextmanager
    def readying(self, group: Group, timeout_s: float) -> Iterator[None]:
        """ready(), once what is to be prepared before that is; what keeps us from it is raised on the others, too."""
        with telling_others(partial(self.ready, group, timeout_s)):
            yield
        self.ready(group, timeout_s)

    # ---- what is known of a round

    def opened(self, opened: Round) -> None:
        """We have sent what we have for it."""
        if self.agreement is not None:
            self.agreement.open(opened)

    def counts(self, number: int, sources: list[int | None]) -> Array:
        """int32 [groups, experts], rows that each group sends to each expert. sources: of each group, as in Round."""
        counts = np.zeros((self._config.groups, self._config.experts), np.int32)
        for group, source in enumerate(sources):
            if source is None:
                continue  # every rank with these tokens is gone
            counts[group] = self.counts_of(number, source)
        return counts

    def counts_of(self, number: int, rank: int) -> Array:
        """int32 [experts]: the same of one rank, once its routes are here."""
        half = self.near.halves.get((rank, number % PARITIES))
        if half is not None:
            return half.counts
        assert self.far is not None
        return self.far.routes_of(number, rank)

    def other_routes(self, opened: Round, rank: int) -> OtherRoute | bool:
        """Whether routes are of another token at that rank, where both send as many to each expert: where we see them
        the first that is, else by their hash. Which of a token's experts it is makes no difference.
        """
        parity = opened.number % PARITIES
        if (half := self.near.halves.get((rank, parity))) is None:
            assert self.far is not None
            return self.far.hash_of(opened.number, rank) != opened.routes_hash
        ours, theirs = (one.order[: opened.routes] for one in (self.near.own[parity], half))
        if np.array_equal(ours, theirs):
            return False
        tokens, others = ours // self._config.top_k, theirs // self._config.top_k
        differ = np.flatnonzero(tokens != others)
        if len(differ) == 0:
            return False
        place = int(differ[0])
        return OtherRoute(place, int(tokens[place]), int(others[place]))

    def results(self, number: int) -> list[Any]:
        """Where Kernels.reduce finds the results: of each near rank, and then those that far ranks wrote here."""
        near = [self.near.halves[rank, number % PARITIES].y for rank in self.near.ranks]
        return near if self.far is None else [*near, self.far.results(number)]

    def wait_sent(self, number: int, timeout_s: float) -> None:
        """Waits until the memory of the round before the last is free, so that ours can be sent to far ranks."""
        assert self.far is not None
        outcome = self.far.wait_sent(number, timeout_s)
        # If ranks can be masked, the waiting calls handle a lost one.
        if not (self.agreement is not None and outcome.result in ("peer-lost", "failed")):
            self.parting.check(outcome, f"dispatch of round {number}", timeout_s)

    # ---- waiting; all raise PeerLost, WaitTimeout, EngineClosed, PeerFailed

    def check_alive(self) -> None:
        """PeerLost if a rank is lost; for calls that wait for nobody. Not if ranks can be masked."""
        if self._config.on_lost == "mask":
            return
        for rank, address in enumerate(self._addresses):
            if rank != self._rank and self._engine.peer_state(address) == "lost":
                self.parting.check(Outcome("peer-lost", rank), "", 0.0)

    @property
    def masked(self) -> tuple[int, ...]:
        """The ranks that calls so far went on without (on_lost="mask"), ascending."""
        return tuple(sorted(self.near.masked)) if self.agreement is None else self.agreement.masked

    def silent_in(self, number: int) -> Collection[int]:
        """With on_lost="mask": ranks to which no routes are to go in that round. One that is masked is not among them
        as long as it may take part in its dispatch: with dp_size, ranks of a group know of it at different times, and
        would send different counts of the same tokens.
        """
        return self.near.silent_in(number) if self.agreement is None else self.agreement.masked

    def check_not_masked(self, number: int, timeout_s: float) -> None:
        """MaskedOut when others have masked us, and may write to what we have just read for this round."""
        if self.agreement is None:
            self.near.check_not_masked(number)
        else:
            self.agreement.check_still_in(timeout_s)

    def wait_sources(self, opened: Round, timeout_s: float) -> list[int | None]:
        """Waits for the routes of all. Returns for each group the rank whose rows come to us, as in Round."""
        absent = self._wait(opened, DISPATCH, timeout_s)
        opened.silent = tuple(absent)
        return sources_of(self._config, self._rank, absent) if absent else self._all_sources

    def wait_rows(self, number: int, timeout_s: float) -> None:
        """Waits for rows of far ranks; if ranks are masked, these came with the routes."""
        begin = time.monotonic()
        try:
            if self.far is not None and self.agreement is None:
                self._wait_far("rows", number, f"rows of dispatch of round {number}", timeout_s)
        finally:
            self.waited_s += time.monotonic() - begin

    def wait_results(self, opened: Round, timeout_s: float) -> Sequence[int]:
        """Until all have returned. The masked ranks that never did. With node_sums, what others are to get of us leaves
        as soon as our node has it.
        """
        if self.sums is not None and not opened.has_sent_sums and not opened.is_refused:
            self._wait_near(opened, COMBINE, timeout_s)
            try:
                self.sums.send(opened.number, opened.placement)
                opened.has_sent_sums = True
            except BaseException as error:
                if self.sums.begun == opened.number:
                    self.parting.give_up(f"sums of round {opened.number}", error)
                raise
        opened.absent = tuple(self._wait(opened, COMBINE, timeout_s))
        return opened.absent

    def _wait(self, opened: Round, half: int, timeout_s: float) -> Sequence[int]:
        """Waits for near ranks, then for the others. Returns the masked ranks that never had it."""
        begin = time.monotonic()
        try:
            if self.agreement is not None:
                return self.agreement.wait(opened, half, timeout_s)
            absent = self._wait_near(opened, half, timeout_s)
            if self.far is not None:
                name, _, step = _HALVES[half]
                self._wait_far(step, opened.number, f"{name} of round {opened.number}", timeout_s)
            return absent
        finally:
            self.waited_s += time.monotonic() - begin

    def _wait_near(self, opened: Round, half: int, timeout_s: float) -> list[int]:
        name, word, step = _HALVES[half]
        number = opened.number
        absent: list[int] = []

        def look(slice_s: float) -> Outcome:
            nonlocal absent
            outcome, absent = self.near.wait(word, number, slice_s)
            return outcome

        def is_missing(rank: int) -> bool:
            if rank in self.near.ranks:
                return rank not in self.near.masked and not self.near.has_come(rank, word, number)
            return self._is_missing_far(step, number, rank)

        self._wait_in_slices(look, is_missing, f"{name} of round {number}", timeout_s)
        return absent

    def _wait_far(self, step: str, number: int, half: str, timeout_s: float) -> None:
        assert self.far is not None
        look, is_missing = partial(self.far.wait, step, number), partial(self._is_missing_far, step, number)
        self._wait_in_slices(look, is_missing, half, timeout_s)

    def _is_missing_far(self, step: str, number: int, rank: int) -> bool:
        return self.far is not None and rank in self.far.ranks and not self.far.has_come(step, number, rank)

    def _wait_in_slices(
        self, look: Callable[[float], Outcome], is_missing: Callable[[int], bool], half: str, timeout_s: float
    ) -> None:
        """Waits for that half, and looks now and then whether it does not come since a call has failed elsewhere.

        look: waits so long.
        """

        def is_to_come(rank: int) -> bool:
            return is_missing(rank) and not link_of(self.near, self.far, rank).has_left(rank)

        left_s = timeout_s
        while True:
            slice_s = min(left_s, self._slice_s)
            outcome = look(slice_s)
            if outcome.result != "late":
                break
            self.parting.check_notes(is_to_come, lambda _rank: half)
            if slice_s == left_s:
                break
            left_s -= slice_s
        self.parting.check(outcome, half, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Gives back what far ranks write to, and lets go of all memory. Idempotent. WaitTimeout while a far rank is in
        the middle of a write, so long.
        """
        if self._is_closed:
            return
        self.parting.end()
        self._close_links(timeout_s)
        self._is_closed = True
        self.near.close()
        if self.far is not None:
            self.far.forget()

    def _close_links(self, timeout_s: float) -> None:
        patience = Countdown(self._engine, timeout_s)
        if self.far is not None:
            self.far.stop_thread()
            if not self._engine.closed:
                self.far.close(timeout_s)
        if self.agreement is not None:
            self.agreement.close(patience.left_s)


def with_room_for_all(config: Config) -> Config:
    """If a rank may be masked in the middle of a round, no row's place may depend on what others send: each source has
    room for everything that it can have.
    """
    for name in ("dp_size", "node_sums", "private_tokens"):
        value, wanted = getattr(config, name), {"dp_size": 1, "node_sums": False, "private_tokens": None}[name]
        if value != wanted:
            raise UsageError(
                f"{name} is {value}, must be {wanted} with on_lost='mask' where not all ranks share memory: not built"
            )
    return dataclasses.replace(config, private_tokens=config.routes_to_rank_max)
