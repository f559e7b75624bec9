"""KV transfer between SGLang's prefill and decode servers: `--disaggregation-transfer-backend crossrail`.

A prompt is prefilled by one server and decoded by another; crossrail.kv writes its pages into the decoder's.

    SGLang's scheduler, one per rank          a thread beside it (node.py): event loop, engine, mailbox
      conn.py: SGLang's four classes            prefill.py: rooms, writes their pages to whoever asked
           └──── state.py, polled ───────▶      decode.py: pulls, counts, takes back

plugin.py makes the name known, bootstrap.py is how decoders find prefillers, memory.py reads SGLang's KVArgs,
messages.py is what ranks say to each other, recompute.py has a prefill server compute KV again that SGLang gave up.
front.py watches what the prefill server refuses before a rank hears of it. Only conn.py, plugin.py and front.py import
SGLang.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from crossrail._extras import needs

if TYPE_CHECKING:
    from crossrail.integrations.sglang.conn import (
        CrossrailKVBootstrapServer,
        CrossrailKVManager,
        CrossrailKVReceiver,
        CrossrailKVSender,
    )

__all__ = ["CrossrailKVBootstrapServer", "CrossrailKVManager", "CrossrailKVReceiver", "CrossrailKVSender"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs(f"{__name__}.{name}", "sglang 'crossrail[sglang]'"):
        return getattr(importlib.import_module(f"{__name__}.conn"), name)
