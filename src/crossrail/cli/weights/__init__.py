"""`crossrail weights`: the group of commands, each imported when it runs; commands.py has their options."""

from __future__ import annotations

from crossrail.cli.group import LazyGroup

_COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("commands", "Trainers update inference ranks in separate processes, checked bit for bit."),
    "rl": (
        "commands",
        "Train a small Qwen3-MoE under FSDP2 and serve it in bf16 with TP 2 and in fp8, updated each step.",
    ),
    "bench": ("commands", "Measure updates on this machine next to memcpy and to other ways."),
    "load": ("commands", "Load a safetensors checkpoint into waiting inference ranks: their cold start."),
    "plan": ("commands", "Plan who sends what to whom, for a known model or from inventories."),
    "show": ("commands", "Show a plan, compare it with another, draw it."),
    "sim": ("commands", "Simulate an update of hundreds of GPUs and say what limits it."),
}

command = LazyGroup("weights", "Update the weights of inference ranks from trainers.", _COMMANDS)
