"""`crossrail weights`: the group of commands, each imported when it runs."""

from __future__ import annotations

from crossrail.cli.group import LazyGroup

_COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "Trainers update inference ranks, in processes of their own, checked bit for bit."),
    "rl": ("rl", "A small Qwen3-MoE learns under FSDP2 and is served in bf16 with TP 2 and in fp8, updated each step."),
    "bench": ("bench", "Measure updates on this machine beside memcpy, and beside gathering and broadcasting."),
    "load": ("load", "Bring a safetensors checkpoint to inference ranks that wait for it: their cold start."),
    "plan": ("plan", "Plan who sends what to whom, for a well-known model or from inventories."),
    "show": ("show", "Show a plan, compare it with another, draw it."),
    "sim": ("sim", "Simulate an update of hundreds of GPUs, and say what bounds it."),
    "play": ("play", "One process of demo and bench."),
}

command = LazyGroup("weights", "Weight updates from trainers to inference ranks.", _COMMANDS, frozenset({"play"}))
