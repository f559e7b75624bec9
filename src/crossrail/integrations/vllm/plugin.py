"""The entry point `crossrail` of `vllm.general_plugins`, which vLLM calls at start in each of its processes."""

from __future__ import annotations

import contextlib
import logging
import os

log = logging.getLogger("crossrail.vllm")

BACKEND = "crossrail"
PLAIN_VARIABLE = "CROSSRAIL_VLLM_PLAIN_WEIGHTS"


def register() -> None:
    """Makes `--weight-transfer-config '{"backend": "crossrail"}'` known to a vLLM that has such. Idempotent.

    CROSSRAIL_VLLM_PLAIN_WEIGHTS=1: vLLM on CPU does not repack the weights of linear layers for oneDNN, so that they
    are updated in place; it then computes with torch's own kernels.
    """
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    except ImportError as error:  # of a vLLM that is older: it must start all the same
        log.info("no weight transfer by crossrail: %s", error)
        return
    with contextlib.suppress(ValueError):  # registered before
        WeightTransferEngineFactory.register_engine(
            BACKEND, "crossrail.integrations.vllm.weights", "CrossrailWeightTransferEngine"
        )
    if os.environ.get(PLAIN_VARIABLE) == "1":
        from vllm import _custom_ops

        _custom_ops._supports_onednn = False
