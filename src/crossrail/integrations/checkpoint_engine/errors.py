"""Errors of the parameter server, in addition to those of the engine."""

from __future__ import annotations

from crossrail.errors import CrossrailError


class CheckpointUpdateFailed(CrossrailError, RuntimeError):
    """gather_metas or update came to nothing, on all ranks. Which rank gave it up, and why, is in the words.

    After a failed update the workers' weights may be part old, part new: update again before they are used.
    """
