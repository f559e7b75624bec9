"""The options of a controller, and what it reports about its updates."""

from __future__ import annotations

from dataclasses import dataclass, field

from crossrail._options import check_seconds, check_whole
from crossrail.errors import UsageError
from crossrail.observe.durations import Durations
from crossrail.weights.step.step import StepReport

ATTEMPTS = 1 << 19  # until numbers of immediates are used again

_DURATION_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_IMM_END = 1 << 27  # from here on engines hand them out


@dataclass(frozen=True)
class ControllerOptions:
    """Options of a controller.

    imm_first: the first of 2**20 immediates that updates use on the engines of all members. They are in the lower
        half, which engines do not hand out.
    abort_s: how long members may take to end an attempt, or to commit one: inference ranks, then trainers.
    evict_s: how long a member that was left out is told so. progress_s: how often trainers are asked for their
    progress.
    straggler_ratio: a trainer that was busy this many times as long as the median, and took that many times as long per
        byte, gets less to send in a new plan from the next update on (speeds.measured). None: all are treated alike.
    UsageError for an invalid value.
    """

    imm_first: int = 1 << 24
    abort_s: float = 10.0
    evict_s: float = 600.0
    progress_s: float = 0.25
    straggler_ratio: float | None = None

    def __post_init__(self) -> None:
        check_whole(imm_first=self.imm_first)
        if not 0 <= self.imm_first <= _IMM_END - 2 * ATTEMPTS:
            raise UsageError(f"imm_first is {self.imm_first}, must be in 0..{_IMM_END - 2 * ATTEMPTS}")
        check_seconds(abort_s=self.abort_s, evict_s=self.evict_s, progress_s=self.progress_s)
        if self.progress_s == 0:
            raise UsageError("progress_s is 0, must be more: trainers would be asked without a pause")


@dataclass
class UpdateReport:
    """How long an update took, in seconds. plan_s: planning and announcing it; 0 if nobody joined, left or slowed down.

    steps: of each trainer, by rank. speeds: of trainers, as the plan assumed them; all others were taken as equal.
    left_out: names of members that may not have this version, such as "inference rank 1": they were lost or could not
        be reached as it began, and did not take part; or have not answered Commit. One that is alive has the
        previous version or this one, and joins again by itself.
    """

    version: int
    plan_s: float = 0.0
    open_s: float = 0.0
    transfer_s: float = 0.0
    commit_s: float = 0.0
    total_s: float = 0.0
    steps: dict[int, StepReport] = field(default_factory=dict)
    speeds: dict[int, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def written_bytes(self) -> int:
        """Bytes written by all trainers."""
        return sum(step.written_bytes for step in self.steps.values())


@dataclass
class UpdateTotals:
    """Totals over all updates of a controller. written_bytes, stage_s and durations: of completed ones, even if
    update() was cancelled while they committed.
    """

    done: int = 0
    failed: int = 0
    cancelled: int = 0
    written_bytes: int = 0
    stage_s: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("plan", "open", "transfer", "commit"), 0.0)
    )
    durations: Durations = field(default_factory=lambda: Durations(_DURATION_BOUNDS_S))

    def add(self, report: UpdateReport) -> None:
        """Counts one that is done."""
        self.done += 1
        self.written_bytes += report.written_bytes
        for stage in self.stage_s:
            self.stage_s[stage] += getattr(report, f"{stage}_s")
        self.durations.add(report.total_s)
