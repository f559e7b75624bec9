"""vLLM's connector class: forwards each of vLLM's calls to SchedulerSide or WorkerSide. Tested with vLLM 0.32."""

from __future__ import annotations

import contextlib
import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from crossrail.errors import UsageError
from crossrail.integrations.instance import Instance, Worker
from crossrail.integrations.interface import VLLM
from crossrail.integrations.log_lines import log_as
from crossrail.integrations.vllm import stats
from crossrail.integrations.vllm.caches import form_of, kind_of, read_caches, window_of
from crossrail.integrations.vllm.kernels import record_on
from crossrail.integrations.vllm.options import VllmOptions
from crossrail.integrations.vllm.orders import Orders
from crossrail.integrations.vllm.prompts import hasher_of
from crossrail.integrations.vllm.scheduler import SchedulerSide
from crossrail.integrations.vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch

log = logging.getLogger("crossrail.vllm")


@dataclass
class CrossrailMetadata(KVConnectorMetadata):
    """A step's orders, from the scheduler to each worker."""

    orders: Orders


@dataclass
class CrossrailHandshake(KVConnectorHandshakeMetadata):
    """A worker's description of itself, for its scheduler."""

    worker: Worker


@dataclass
class CrossrailStats(KVConnectorStats):
    """stats.Data of an interval."""

    def reset(self) -> None:
        self.data = stats.empty()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return CrossrailStats(data=stats.added(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        return stats.reduced(self.data)

    def is_empty(self) -> bool:
        return stats.is_empty(self.data)


class CrossrailPromMetrics(KVConnectorPromMetrics):
    """stats.Data as Prometheus metrics, labelled by engine as vLLM's own are."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for name, what in stats.COUNTERS.items():
            self._metrics[name] = metric_types[Counter](
                name=f"vllm:crossrail_{name}", documentation=what, labelnames=labelnames
            )
        for name, what in stats.SERIES.items():
            self._metrics[name] = metric_types[Histogram](
                name=f"vllm:crossrail_{name}", documentation=what, labelnames=labelnames, buckets=stats.BUCKETS_S
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name in stats.COUNTERS:
            self._metrics[name].labels(*labels).inc(transfer_stats_data[name])
        for name in stats.SERIES:
            for value in transfer_stats_data[name]:
                self._metrics[name].labels(*labels).observe(value)


class CrossrailConnector(KVConnectorBase_V1):
    """Two of them live in an instance of vLLM: one with the scheduler, one with each worker.

    Their options are VllmOptions, in kv_connector_extra_config. UsageError at start-up for what cannot work.
    """

    _cache_hit_source = CacheHitSource.P2P  # in vLLM's metrics of cached prompt tokens

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_as("vllm")
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        before = (getattr(parallel, "data_parallel_rank_local", None) or 0) * parallel.tensor_parallel_size
        options = VllmOptions.of(transfer.kv_connector_extra_config)
        options = options.of_replica(getattr(parallel, "data_parallel_index", 0), before)
        secret = options.secret()
        _check_parallelism(parallel)
        _check_memory_stays(vllm_config.model_config)
        groups = len(kv_cache_config.kv_cache_groups)
        if groups != 1:
            raise UsageError(f"the model has {groups} groups of KV caches: CrossrailConnector supports models with one")
        window = window_of(kv_cache_config.kv_cache_groups[0].kv_cache_spec)
        self._options = options
        self._engine_id = str(transfer.engine_id)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                produces=transfer.is_kv_producer,
                consumes=transfer.is_kv_consumer,
                engine_id=self._engine_id,
                secret=secret,
                window=window,
                hasher=hasher_of(vllm_config),
                wait_s=options.load_s,
            )
        else:
            from vllm.distributed import get_tensor_model_parallel_rank

            rank = get_tensor_model_parallel_rank()
            self._worker = WorkerSide(f"vllm-{self._engine_id[:40]}-{rank}", rank, options, secret)

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config = self._vllm_config
        spec = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        form = form_of(config, spec, list(kv_caches))
        kind = kind_of(form["attention"], spec)
        caches = read_caches(
            kv_caches,
            kv_heads=1 if kind == "MLA" else config.model_config.get_total_num_kv_heads(),
            tp=config.parallel_config.tensor_parallel_size,
            kind=kind,
        )
        if spec.block_size != caches.layout.page_tokens:
            raise UsageError(
                f"vLLM counts in blocks of {spec.block_size} tokens, its kernel in {caches.layout.page_tokens}: set "
                "block_size to what the kernel has"
            )
        self._kv_caches = kv_caches  # they stay as long as we read and write them
        device = next(iter(kv_caches.values())).device
        record = record_on(device) if device.type == "cuda" else None
        self._on_worker.open(caches.layout, caches.buffers, form, caches.layers, record)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return CrossrailHandshake(self._on_worker.description)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._on_worker.preempted(kv_connector_metadata.orders)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._on_worker.begin_step(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._on_worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: vLLM runs a request only after its load was reported."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        self._on_worker.layer_saved(layer_name)

    def wait_for_save(self) -> None:
        # vLLM calls this from a `finally`: also when the forward pass raised, which is being handled then.
        self._on_worker.end_step(failed=sys.exc_info()[0] is not None)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Of what failed it names requests, not blocks: of a request with invalid blocks vLLM keeps those before them,
        and does not see that a sliding window has left some of these behind, which it would need to compute the rest.
        """
        return KVConnectorTransferResults(*self._on_worker.take_results())

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._worker is None:
            return None
        found = CrossrailStats(data=self._worker.take_stats())
        return None if found.is_empty() else found

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # ---- scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        if others := {type(one).__name__ for one in metadata.values() if not isinstance(one, CrossrailHandshake)}:
            raise UsageError(
                f"vLLM's MultiConnector hands {', '.join(sorted(others))} to CrossrailConnector: it passes on what the "
                "first of its connectors tells of itself; it can hold only one that other instances fetch from"
            )
        workers = [metadata[rank].worker for rank in sorted(metadata)]
        self._options.write_instance(self._in_scheduler.instance_known(Instance(self._engine_id[:128], workers)))

    def on_new_request(self, request: Any) -> None:
        self._in_scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._in_scheduler.matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All: it is the request's own blocks that are loaded, so vLLM must not zero them meanwhile."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._in_scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return CrossrailMetadata(self._in_scheduler.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        output = connector_output
        self._in_scheduler.reported(output.finished_sending or (), output.finished_recving or (), output.failed_recving)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._in_scheduler.finished(request)

    def reset_cache(self) -> bool | None:
        self._in_scheduler.reset_cache()
        return True

    def has_pending_push_work(self) -> bool:
        return self._in_scheduler.has_pending_work

    # ---- both

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return VllmOptions.of(extra_config).layerwise

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return CrossrailStats(data=data or stats.empty())

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics | None:
        return CrossrailPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _on_worker(self) -> WorkerSide:
        assert self._worker is not None, "vLLM asked its scheduler's connector what a worker's does"
        return self._worker

    @property
    def _in_scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None, "vLLM asked a worker's connector what its scheduler's does"
        return self._scheduler


def _check_parallelism(parallel: Any) -> None:
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise UsageError(f"{name}={getattr(parallel, name)}: CrossrailConnector supports only tensor parallelism")
    if getattr(parallel, "use_ubatching", False):
        # Each of its halves reports each layer, from a stream of its own.
        raise UsageError("enable_dbo: CrossrailConnector supports only steps of one batch")


def _check_memory_stays(model: Any) -> None:
    """vLLM 0.33 asks supports_sleep_mode() before, which says yes unless it is overridden; 0.32 has no such call."""
    if getattr(model, "enable_sleep_mode", False):
        raise UsageError("enable_sleep_mode: CrossrailConnector needs KV caches that stay where they are in memory")


def _register() -> None:
    """vLLM's MultiConnector takes its parts by their module path, but looks up by name what makes their statistics: its
    API server would end at the first hand-over.
    """
    with contextlib.suppress(ValueError):  # registered before
        KVConnectorFactory.register_connector(
            CrossrailConnector.__name__, CrossrailConnector.__module__, CrossrailConnector.__name__
        )


VLLM.check(CrossrailConnector, KVConnectorBase_V1, are_all_called=True)
_register()
