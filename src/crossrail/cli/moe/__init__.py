"""`crossrail moe`: the group of commands, each imported when it runs."""

from __future__ import annotations

from crossrail.cli.group import LazyGroup

_COMMANDS: dict[str, tuple[str, str]] = {
    "demo": (
        "demo",
        "Run a Qwen3-MoE from transformers with its experts spread over processes, and compare it with one process.",
    ),
    "sim": ("commands", "Simulate dispatch and combine on up to 256 GPUs, next to published figures."),
}

command = LazyGroup(
    "moe", "Run or simulate mixture-of-experts layers over several processes; see also crossrail bench moe.", _COMMANDS
)
