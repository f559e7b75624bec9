"""Errors of crossrail.weights, in addition to those of the engine."""

from __future__ import annotations

from crossrail.errors import CrossrailError, UsageError


class NotFinite(CrossrailError):
    """A weight is infinite or NaN and cannot be quantised. parameter, value; index: in the whole parameter."""

    def __init__(self, parameter: str, index: tuple[int, ...], value: float) -> None:
        place = f"[{', '.join(str(at) for at in index)}]" if index else ""
        super().__init__(f"{parameter}{place} is {value}: weights that are not finite cannot be quantised")
        self.parameter = parameter
        self.index = index
        self.value = value


class WatermarkTooSmall(UsageError):
    """The largest task does not fit into the memory that tasks may use. needed_bytes: how much it takes."""

    def __init__(self, task: str, needed_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"the memory watermark is {limit_bytes} bytes, preparing {task} takes {needed_bytes}. Next: "
            f"tmp_bytes_max= of WeightTrainer, or --watermark, of at least {needed_bytes}"
        )
        self.needed_bytes = needed_bytes


class MemberRefused(CrossrailError):
    """A controller does not take this trainer or inference rank, and will not: the words say why."""


class UpdateFailed(CrossrailError):
    """An update did not reach all inference ranks. version: its number; the message says why each side gave it up.

    asked_for: at a trainer that offered another version than the controller asked for: the controller's. Offering the
        same one again fails, unless the controller asks for it again. Otherwise None.
    """

    def __init__(self, version: int, why: str, asked_for: int | None = None) -> None:
        super().__init__(f"weight update {version} failed: {why}")
        self.version = version
        self.asked_for = asked_for


class TornWeights(CrossrailError):
    """The weights are part old, part new, because an update in place failed: only another update makes them whole."""


class Unheld(UsageError):
    """Something that targets want is held by no trainer: one that joins may hold it."""


class PlanError(CrossrailError):
    """A plan that must not be carried out with these inventories: it was made for others, or is wrong."""
