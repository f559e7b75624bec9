"""vLLM's weight-transfer backend "crossrail": trainers write into the parameters of a live model.

    vllm serve ... --weight-transfer-config '{"backend": "crossrail"}'

While vLLM is in `update_weights` nothing is computed, and writers are let in; it returns when the version is complete.
weights_worker.py is the part without vLLM, weights_trainer.py drives instances from the side of the trainers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from crossrail.errors import UsageError
from crossrail.integrations.ports import port_of_rank
from crossrail.integrations.vllm.weights_model import WorkerModel
from crossrail.integrations.vllm.weights_worker import Link, WeightsWorker
from crossrail.weights.inventory.mapping import Ranks

log = logging.getLogger("crossrail.vllm")


@dataclass
class CrossrailInitInfo(WeightTransferInitInfo):
    """Fields of Link, as JSON has them. first_rank: the number of this instance's first worker among all inference
    ranks of the controller; the others follow.
    """

    controller: str
    first_rank: int = 0
    transport: str = "auto"
    rails: int | list[str] = 1
    port: int = 0
    secret_file: str | None = None
    join_s: float = 60.0


@dataclass
class CrossrailUpdateInfo(WeightTransferUpdateInfo):
    """version: what the controller is asked for. timeout_s: how long it may take."""

    version: int
    timeout_s: float = 60.0


class CrossrailWeightTransferEngine(WeightTransferEngine[CrossrailInitInfo, CrossrailUpdateInfo]):
    """One worker of an instance as one inference rank. Threads: vLLM's worker thread.

    Parameters that kernels read as they were loaded are written in place. Layers that vLLM changes after loading are
    written to memory beside the model, as large, and loaded again from there. What can be neither is refused by name in
    init_transfer_engine().
    """

    init_info_cls = CrossrailInitInfo
    update_info_cls = CrossrailUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config
        if parallel.pipeline_parallel_size != 1:
            raise UsageError(
                f"pipeline_parallel_size is {parallel.pipeline_parallel_size}: weight transfer by crossrail knows "
                "tensor and expert parallelism, not pipelines. Next: start it with --pipeline-parallel-size 1"
            )
        if parallel.enable_eplb:
            raise UsageError(
                "enable_eplb: vLLM moves experts while it runs, and weight transfer by crossrail needs them to stay. "
                "Next: start it without"
            )
        if vllm_config.lora_config is not None:
            raise UsageError(
                "enable_lora: vLLM wraps layers for adapters, and weight transfer by crossrail writes whole models "
                "without. Next: start it without --enable-lora, and merge adapters at the trainers"
            )
        if getattr(vllm_config.model_config, "enable_sleep_mode", False):
            raise UsageError(
                "enable_sleep_mode: weight transfer by crossrail needs parameters that stay where they are in memory. "
                "Next: start it without --enable-sleep-mode"
            )
        self._device = str(device) if getattr(device, "type", "") == "cuda" else None
        self._worker: WeightsWorker | None = None
        self._is_torn = False  # as the last worker has left them

    def init_transfer_engine(self, init_info: CrossrailInitInfo) -> None:
        """Joins the controller. Called again: leaves, and joins again."""
        self.shutdown()
        try:
            controller = bytes.fromhex(init_info.controller)
        except (TypeError, ValueError) as error:
            raise UsageError(f"controller is {init_info.controller!r:.80}, must be an address: {error}") from None
        parallel = self.vllm_config.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        link = Link(
            controller=controller,
            rank=init_info.first_rank + rank,
            transport=init_info.transport,
            rails=init_info.rails,
            port=port_of_rank(init_info.port, rank, init_info.rails),
            secret_file=init_info.secret_file,
            join_s=init_info.join_s,
            device=self._device,
        )
        ranks = Ranks(get_tensor_model_parallel_rank(), parallel.tensor_parallel_size)
        config = self.model_config.hf_text_config.to_dict()
        model = WorkerModel(self.model, self.model_config, config, ranks)
        self._worker = WeightsWorker(link, model.fill, apply=model.apply, is_torn=self._is_torn)
        log.info("rank %d: %d bytes of weights are kept beside the model", link.rank, model.bytes_beside)

    def start_weight_update(self) -> None:
        """Comes before the controller is asked for the update."""
        self._opened().start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Returns when the version is complete in this worker, loaded again where it must be: its next kernels see it.
        Nothing is to be synchronised: on a GPU writers are let in when the kernels launched before have ended.

        Raises UpdateFailed: the weights may be torn then, it says so, and must be updated before they are used.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: CrossrailUpdateInfo) -> None:
        self._opened().receive(update_info.version, update_info.timeout_s)

    def finish_weight_update(self) -> None:
        self._opened()

    def shutdown(self) -> None:
        """Nothing is written into the model any more when it returns. Idempotent.

        Raises WaitTimeout while a frozen writer may still write to the model, whose memory must stay: call it again.
        """
        if self._worker is not None:
            self._worker.close()
            self._is_torn = self._worker.is_torn
            self._worker = None

    def _opened(self) -> WeightsWorker:
        if self._worker is None:
            raise UsageError("init_weight_transfer_engine comes first")
        return self._worker
