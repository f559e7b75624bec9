"""`crossrail kv`: the group of commands. Each is imported when it runs; all but `sim` need `crossrail[kv]`."""

from __future__ import annotations

from crossrail.cli.group import LazyGroup

_COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("commands", "Run a prompt through several processes and check the tokens against a single node."),
    "router": ("commands", "Accept requests over HTTP and pass them to prefillers and decoders."),
    "prefiller": ("commands", "Run prompts and write their KV to decoders."),
    "decoder": ("commands", "Have prompts' KV sent here and generate tokens."),
    "sim": ("commands", "Simulate the transfer of a large model's KV, next to published figures."),
    "top": ("top", "Show a router's nodes and what they are doing."),
}

command = LazyGroup("kv", "Serve a model with disaggregated prefill and decode.", _COMMANDS)
