"""Errors of the checkpoint engine for verl, in addition to those of the engine."""

from __future__ import annotations

from crossrail.errors import CrossrailError


class VerlUpdateFailed(CrossrailError, RuntimeError):
    """An update of verl's weights came to nothing. The rollout's weights may be part old, part new."""
