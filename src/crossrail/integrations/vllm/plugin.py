"""What vLLM calls when it starts, in each of its processes: the entry point `crossrail` of `vllm.general_plugins`."""

from __future__ import annotations

import os

BACKEND = "crossrail"
PLAIN_VARIABLE = "CROSSRAIL_VLLM_PLAIN_WEIGHTS"


def register() -> None:
    """Makes `--weight-transfer-config '{"backend": "crossrail"}'` known to vLLM. Imports none of it. Idempotent.

    CROSSRAIL_VLLM_PLAIN_WEIGHTS=1: vLLM on CPU does not repack the weights of linear layers for oneDNN, so that they
    can be updated in place; it then computes with torch's own kernels.
    """
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # what it has been asked for twice, it refuses
        WeightTransferEngineFactory.register_engine(
            BACKEND, "crossrail.integrations.vllm.weights", "CrossrailWeightTransferEngine"
        )
    if os.environ.get(PLAIN_VARIABLE) == "1":
        from vllm import _custom_ops

        _custom_ops._supports_onednn = False
