"""vLLM's weight-transfer backend "crossrail": trainers write into the parameters of a live model.

    vllm serve ... --weight-transfer-config '{"backend": "crossrail"}'

While vLLM is in `update_weights` nothing is computed, and writers are let in; it returns when the version is complete.
weights_worker.py is the part without vLLM, weights_trainer.py drives instances from the side of the trainers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from crossrail.errors import UsageError
from crossrail.integrations.ports import port_of_rank
from crossrail.integrations.vllm.plugin import PLAIN_VARIABLE
from crossrail.integrations.vllm.weights_worker import Link, WeightsWorker
from crossrail.weights.inventory.families import names_of
from crossrail.weights.inventory.mapping import Ranks
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.inventory.torch_tensors import add_tensor


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

    Updates are in place: parameters must lie in memory as vLLM loaded them (CROSSRAIL_VLLM_PLAIN_WEIGHTS=1 on CPU), in
    a type that needs no work after loading. What does not is refused by name in init_transfer_engine().
    """

    init_info_cls = CrossrailInitInfo
    update_info_cls = CrossrailUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config
        if parallel.pipeline_parallel_size != 1 or parallel.enable_expert_parallel:
            raise UsageError(
                "weight transfer by crossrail knows tensor parallelism, not pipelines or expert parallelism"
            )
        if vllm_config.quant_config is not None:
            raise UsageError(
                "weight transfer by crossrail does not update quantised models: their layout is a backend's"
            )
        if getattr(vllm_config.model_config, "enable_sleep_mode", False):
            raise UsageError(
                "enable_sleep_mode: weight transfer by crossrail needs parameters that stay where they are in memory"
            )
        self._worker: WeightsWorker | None = None
        self._is_torn = False  # as the last worker has left them

    def init_transfer_engine(self, init_info: CrossrailInitInfo) -> None:
        """Joins the controller. Called again: leaves, and joins anew."""
        self.shutdown()
        parallel = self.vllm_config.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        link = Link(
            controller=bytes.fromhex(init_info.controller),
            rank=init_info.first_rank + rank,
            transport=init_info.transport,
            rails=init_info.rails,
            port=port_of_rank(init_info.port, rank, init_info.rails),
            secret_file=init_info.secret_file,
            join_s=init_info.join_s,
        )
        ranks = Ranks(get_tensor_model_parallel_rank(), parallel.tensor_parallel_size)
        config = self.model_config.hf_text_config.to_dict()
        self._worker = WeightsWorker(
            link, lambda memory: add_model(memory, self.model, config, ranks), is_torn=self._is_torn
        )

    def start_weight_update(self) -> None:
        """Comes before the controller is asked for the update."""
        self._opened().start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Returns when the version is complete in this worker, whose next kernels see it. Nothing is to be
        synchronised: on a GPU writers are let in when the kernels that were launched before have ended.

        Raises UpdateFailed: the weights may be torn then, it says so, and must be updated before they are used.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: CrossrailUpdateInfo) -> None:
        self._opened().receive(update_info.version, update_info.timeout_s)

    def finish_weight_update(self) -> None:
        self._opened()

    def shutdown(self) -> None:
        """Nothing is written into the model any more when it returns. Idempotent.

        Raises WaitTimeout while a writer stands still in the model, whose memory must stay: call it again.
        """
        if self._worker is not None:
            self._worker.close()
            self._is_torn = self._worker.is_torn
            self._worker = None

    def _opened(self) -> WeightsWorker:
        if self._worker is None:
            raise UsageError("init_weight_transfer_engine comes first")
        return self._worker


def add_model(memory: WeightMemory, model: torch.nn.Module, config: dict[str, Any], ranks: Ranks) -> None:
    """All parameters of one worker's model. config: the model's config.json. UsageError, naming the parameter."""
    names = names_of(config)
    shared: set[int] = set()
    for module_name, module in model.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            name = f"{module_name}.{own_name}"
            tensor = parameter.detach().as_subclass(torch.Tensor)
            if not tensor.numel():
                raise UsageError(
                    f"{name} is empty: vLLM has repacked it for its kernels, and it cannot be updated in place; on CPU "
                    f"{PLAIN_VARIABLE}=1 keeps it as it is"
                )
            if ".experts." in name:
                raise UsageError(f"{name}: experts are laid out by the kernel that vLLM chose, not as they were loaded")
            # What is added is an alias, which stays where it is when the parameter gets other memory, or another one
            # takes its place.
            memory.watch(name, partial(_address_of, module, own_name))
            if tensor.data_ptr() in shared:  # tied: written once
                continue
            shared.add(tensor.data_ptr())
            if isinstance(module, VocabParallelEmbedding) and own_name == "weight":
                _add_vocabulary(memory, name, tensor, module)
            else:
                add_tensor(memory, names, name, tensor, ranks=ranks)


def _address_of(module: torch.nn.Module, own_name: str) -> int:
    """Where this parameter of the module's lies now; 0: it has none."""
    parameter = module._parameters.get(own_name)
    return 0 if parameter is None else parameter.data_ptr()


def _add_vocabulary(memory: WeightMemory, name: str, tensor: torch.Tensor, module: Any) -> None:
    """vLLM pads the vocabulary before it divides it: of a worker's rows the first are real."""
    rows = module.shard_indices
    first, last = rows.org_vocab_start_index, rows.org_vocab_end_index
    shape = module.org_vocab_size, tensor.shape[1]
    memory.add(name, tensor[: last - first], shape=shape, box=((first, last), (0, shape[1])))
