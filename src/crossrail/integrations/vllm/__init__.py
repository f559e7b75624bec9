"""KV transfer between instances of vLLM: `"kv_connector": "CrossrailConnector"`, with this package as its module path.

    --kv-transfer-config '{"kv_connector": "CrossrailConnector", "kv_role": "kv_both",
                           "kv_connector_module_path": "crossrail.integrations.vllm"}'

A prompt is prefilled by one instance and decoded by another; crossrail.kv writes the KV into the decoder's blocks.

    vLLM's scheduler                        vLLM's worker, one per rank of tensor parallelism
      scheduler.py: which request, which      worker.py: a thread with an event loop, an engine, a mailbox
      blocks, when they may be freed            producer.py: offers computed prompts, writes them to who asks
           └──── orders.py, each step ────▶     consumer.py: asks, counts, takes back
    connector.py turns vLLM's calls into theirs; beside it only plugin.py, experts.py, weights.py, weights_model.py and
    weights_reload.py import vLLM.

Weight updates (docs/weights-vllm.md): plugin.py registers the backend, weights.py is it. weights_model.py: where in a
worker's model weights are written; weights_reload.py: layers that are loaded again from there; weights_worker.py: the
inference rank inside of a worker; weights_trainer.py drives instances from the trainers' side.

And expert parallelism: `CrossrailPrepareAndFinalize` (experts.py) brings rows to vLLM's fused experts by crossrail.moe.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from crossrail._extras import needs
from crossrail.integrations.interface import VLLM

if TYPE_CHECKING:
    from crossrail.integrations.vllm.connector import CrossrailConnector
    from crossrail.integrations.vllm.experts import CrossrailPrepareAndFinalize

__all__ = ["CrossrailConnector", "CrossrailPrepareAndFinalize"]

_MODULES = {"CrossrailConnector": "connector", "CrossrailPrepareAndFinalize": "experts"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        with needs(f"{__name__}.{name}", "vllm 'crossrail[vllm]'"):
            return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ImportError as error:
        if not (error.name or "").startswith("vllm."):
            raise
        raise ImportError(VLLM.refusal(str(error)), name=error.name) from error
