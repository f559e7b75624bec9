"""What the checkpoint engine for verl raises beside what the engine does."""

from __future__ import annotations

from crossrail.errors import CrossrailError


class VerlUpdateFailed(CrossrailError, RuntimeError):
    """An update of verl's weights came to nothing. The rollout's weights may be part old, part new."""
