"""`crossrail moe`: the group of commands, each imported when it runs."""

from __future__ import annotations

from crossrail.cli.group import LazyGroup

_COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "A Qwen3-MoE of transformers with its experts spread over processes, against one process alone."),
    "sim": ("sim", "Simulate dispatch and combine of up to 256 GPUs, beside what was published."),
}

command = LazyGroup("moe", "Mixture of experts over several processes; see also crossrail bench moe.", _COMMANDS)
