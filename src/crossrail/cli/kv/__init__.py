"""`crossrail kv`: the group of commands. Each is imported when it runs; all need the extra `crossrail[kv]`."""

from __future__ import annotations

from crossrail.cli.group import LazyGroup

_COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "Run a prompt through several processes and check the tokens against a single node."),
    "router": ("router", "Accept requests over HTTP and pass them to prefillers and decoders."),
    "prefiller": ("nodes", "Run prompts and write their KV to decoders."),
    "decoder": ("nodes", "Have prompts' KV sent here and generate tokens."),
    "top": ("top", "Show a router's nodes and what they are doing."),
}

command = LazyGroup("kv", "Serve a model with disaggregated prefill and decode.", _COMMANDS)
