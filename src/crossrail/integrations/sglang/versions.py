"""Checks at start-up that our classes fit the installed SGLang."""

from __future__ import annotations

from crossrail.errors import UsageError
from crossrail.integrations.interface import installed_version, misfit

WRITTEN_AGAINST = "0.5.23"


def check_interface(ours: type, theirs: type) -> None:
    """Raises UsageError, which names the method, when `theirs`, a base class of SGLang's, wants more than we have."""
    if why := misfit(ours, theirs):
        raise UsageError(refusal(why))


def refusal(why: str) -> str:
    """For an error's text. why: what this SGLang does that we do not know."""
    return (
        f"this SGLang is {installed_version('sglang')}, crossrail's transfer backend is written against "
        f"{WRITTEN_AGAINST}: {why}; install sglang=={WRITTEN_AGAINST}, or a crossrail for yours"
    )
