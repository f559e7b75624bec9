"""How the part of a rank ends: the errors that its waits raise, what the others are told, and what they have told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import crossrail as xr
from crossrail.errors import CrossrailError, TransferError, UsageError, WaitTimeout
from crossrail.moe.config import Config
from crossrail.moe.countdown import Countdown
from crossrail.moe.errors import MaskedOut, PeerFailed
from crossrail.moe.farewell import Why, described
from crossrail.moe.links.either import link_of
from crossrail.moe.links.far import Far
from crossrail.moe.links.near import Near
from crossrail.moe.links.notes import Notes
from crossrail.moe.masking.agreement import Agreement
from crossrail.moe.outcome import Outcome, call_failed_error, error_of, unposted_error

_GIVE_UP_S = 5.0  # for the farewell; the rest is sent when it is closed
_TELL_LOSS_S = 1.0  # likewise, where a call that is to say at once who is lost waits for it


class Parting:
    """Of one rank. Threads: one at a time.

    addresses: of all ranks. near, far, notes, agreement: as of Peers.
    Lifecycle: 1. rounds: check() after each wait, call_failed() or call_succeeded() after each call; perhaps
    tell_failure(), give_up() or leave(). 2. farewell(). 3. end().
    """

    def __init__(
        self,
        engine: xr.Engine,
        config: Config,
        rank: int,
        addresses: Sequence[xr.Address],
        near: Near,
        far: Far | None,
        notes: Notes,
        agreement: Agreement | None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._rank = rank
        self._addresses = addresses
        self._near, self._far, self._notes, self._agreement = near, far, notes, agreement
        self._lost: int | None = None  # the rank that we cannot continue without
        self._late: int | None = None  # the rank that the last wait was for in vain
        self._failure = ""  # of the last call, as text
        self._told_error = ""  # of a call that failed, which others were told, and that we have not made since
        self._given_up: Callable[[], CrossrailError] | None = None  # what every call raises from now on
        self._has_told_near = False
        self._has_said_farewell = False

    # ---- what waits raise

    def check(self, outcome: Outcome, half: str, timeout_s: float) -> None:
        """Raises the error of a wait for that half, unless it ended well."""
        is_late = outcome.result == "late" and timeout_s > 0  # who only looks has not waited
        self._late = outcome.rank if is_late else None
        if outcome.result != "ready":
            raise self._final_error(outcome, half, timeout_s)

    def check_notes(self, is_missing: Callable[[int], bool], half_of: Callable[[int], str]) -> None:
        """PeerFailed if a call has failed on a rank whose part of a half is missing; once for each such call."""
        note = self._notes.due(is_missing)
        if note is not None:
            raise call_failed_error(note.rank, self._addresses[note.rank], half_of(note.rank), note.words)

    def error_of(self, outcome: Outcome, half: str, timeout_s: float) -> CrossrailError:
        """The error to raise after a wait that somebody else made."""
        self._late = outcome.rank if outcome.result == "late" else None
        return self._error(outcome, half, timeout_s)

    def _final_error(self, outcome: Outcome, half: str, timeout_s: float) -> CrossrailError:
        """The error to raise. If a rank is lost, or a write to it has failed, no round of ours ends any more; the
        others may not notice, so they are told.
        """
        error = self._error(outcome, half, timeout_s)
        if isinstance(error, TransferError) and self._config.on_lost == "raise":
            self._given_up = lambda: self._error(outcome, half, timeout_s)
            self._leave(f"wait for the {half}" if half else "call", error, _TELL_LOSS_S)
        return error

    def _error(self, outcome: Outcome, half: str, timeout_s: float) -> CrossrailError:
        """The error to raise. If a rank gave up because another one was lost, that loss is reported, and passed on;
        likewise if it waited for another in vain, or failed.
        """
        result, rank, _ = outcome
        if result == "late" and rank == self._rank:
            return unposted_error(rank, half, timeout_s)
        if result == "late":
            outcome = Outcome("late", rank, self._notes.words_of(rank))
        link = link_of(self._near, self._far, rank)
        if result == "peer-lost" and link.has_left(rank):  # in order, and then its engine was closed, too
            result, outcome = "left", Outcome("left", rank)
        lost, late, words = link.why_left(rank) if result in ("left", "peer-lost") else Why()
        if lost == self._rank:
            outcome = Outcome("peer-lost", rank, "it lost sight of this rank, and has closed its AllToAll")
        elif lost is not None:
            who = "another rank" if lost == rank else f"rank {rank}"
            outcome = Outcome("peer-lost", lost, f"{who} lost sight of it, and has closed its AllToAll")
            half = ""
        elif late is not None:
            who = "this rank" if late == self._rank else f"rank {late} ({self._addresses[late].name!r})"
            why = f"it had waited for {who} in vain" if late != rank else "it had not posted its own part in time"
            outcome = Outcome("left", rank, why)
        elif words:
            outcome = Outcome("left", rank, words)
        if outcome.result == "peer-lost":
            # When two ranks lose sight of each other, all report the same one, whichever of the two they hear first.
            self._lost = outcome.rank if lost is None else lost
        return error_of(self._engine, outcome, self._addresses[outcome.rank], half, timeout_s)

    # ---- what others are told

    def give_up(self, what: str, error: BaseException) -> None:
        """Others were told a part of this, and `error` prevented the rest. They count what arrives, so it cannot be
        repeated: we take part no more, and say so. Waits some seconds at most, also in calls that do not wait.
        """
        if isinstance(error, MaskedOut):
            return  # they continue without us already
        text = f"{what} failed after a part of it was sent: {error!r}"
        self._given_up = lambda: CrossrailError(f"{text}. Next: close it, and make a new one, on all ranks")
        self._leave(what, error, _GIVE_UP_S)

    @property
    def given_up(self) -> CrossrailError | None:
        """The error to raise after giving up, or after a rank was lost."""
        return None if self._given_up is None else self._given_up()

    def leave(self, what: str, error: BaseException) -> None:
        """Our rounds have ended by this error: the others are told at once."""
        self._leave(what, error, _GIVE_UP_S)

    def _leave(self, what: str, error: BaseException, patience_s: float) -> None:
        self.call_failed(what, error)
        with contextlib.suppress(CrossrailError):
            self.farewell(patience_s)

    def call_failed(self, call: str, error: BaseException) -> None:
        """A call has failed. As far as is known here it may be repeated; if we leave instead, others are told why."""
        # a rank that waited in vain says for whom
        is_late = isinstance(error, WaitTimeout) and self._late is not None
        self._failure = "" if is_late else described(f"its {call}", error)

    def tell_failure(self, call: str, error: BaseException) -> None:
        """Those who wait for what a call was to send are told why it did not. Not of errors that others have made, or
        get as well; nor twice of one.
        """
        is_ours = not isinstance(error, CrossrailError) or isinstance(error, UsageError)
        if not is_ours or isinstance(error, PeerFailed) or self._given_up is not None or self._has_told_near:
            return
        if (text := repr(error)) != self._told_error:
            self._told_error = text
            self._notes.post(described(f"its {call}", error))

    @property
    def is_well(self) -> bool:
        """No call of ours has failed and not been mended since."""
        return not self._failure and self._lost is None and self._late is None

    def dropped(self) -> None:
        """We were dropped without being closed: that is why we leave, if there is no other reason."""
        if self.is_well:
            self._failure = "it was garbage-collected, and not closed before"

    def call_succeeded(self) -> None:
        """The earlier failure has been mended."""
        self._failure = ""
        if self._told_error:
            self._told_error = ""
            self._notes.post("")

    def farewell(self, timeout_s: float) -> None:
        """Tells everybody that nothing more will come from us. Idempotent. Waits at most so long."""
        if self._has_said_farewell:
            return
        patience = Countdown(self._engine, timeout_s)
        if self._agreement is not None and not self._engine.closed:
            self._agreement.farewell(timeout_s)
        if self._lost is not None:
            why = Why(lost=self._lost)
        else:
            why = Why(words=self._failure) if self._failure else Why(late=self._late)
        if not self._has_told_near:
            self._near.farewell(why)
            self._has_told_near = True
        self._has_said_farewell = self._far is None or self._engine.closed or self._far.farewell(why, patience.left_s)

    def end(self) -> None:
        """From now on nothing can be told any more."""
        self._has_said_farewell = True
