"""`crossrail kv`: the group of commands. Each is imported when it runs; all need the extra `crossrail[kv]`."""

from __future__ import annotations

from crossrail.cli.group import LazyGroup

_COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "Prompt in, tokens out, from several processes, checked against one node alone."),
    "router": ("router", "Take requests over HTTP and give them to prefillers and decoders."),
    "prefiller": ("nodes", "Run prompts and write their KV to decoders."),
    "decoder": ("nodes", "Have prompts' KV sent here and generate tokens."),
    "top": ("top", "Show a router's nodes and what they do."),
}

command = LazyGroup("kv", "Disaggregated prefill and decode of a model.", _COMMANDS)
