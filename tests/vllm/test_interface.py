"""Our connector against vLLM's own classes: what an update of vLLM would break is named here first."""

import dataclasses
import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1 import kv_cache_interface
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request, RequestStatus

from crossrail.errors import UsageError
from crossrail.integrations.interface import VLLM
from crossrail.integrations.vllm import CrossrailConnector, stats
from crossrail.integrations.vllm.caches import SPECS, Window, lengths_of, window_of
from crossrail.integrations.vllm.connector import CrossrailMetadata, CrossrailStats
from crossrail.integrations.vllm.orders import Orders
from crossrail.integrations.vllm.prompts import differ, hasher_of, prompt_of
from crossrail.integrations.vllm.scheduler import COMPLETE

OURS = [
    name
    for name, value in vars(CrossrailConnector).items()
    if not name.startswith("_") and callable(getattr(CrossrailConnector, name))
]


def test_it_is_whole() -> None:
    assert issubclass(CrossrailConnector, KVConnectorBase_V1)
    assert not CrossrailConnector.__abstractmethods__
    assert issubclass(CrossrailMetadata, KVConnectorMetadata)
    assert CrossrailMetadata(Orders()).orders == Orders()


@pytest.mark.parametrize("name", OURS)
def test_every_call_is_vllms_and_takes_what_vllm_gives(name: str) -> None:
    theirs = inspect.signature(getattr(KVConnectorBase_V1, name)).parameters
    ours = inspect.signature(getattr(CrossrailConnector, name)).parameters

    assert [(p.name, p.kind) for p in ours.values()] == [(p.name, p.kind) for p in theirs.values()]


def test_a_vllm_that_never_makes_one_of_our_calls_is_refused() -> None:
    class Older(CrossrailConnector):
        def on_something_older(self) -> None: ...

    with pytest.raises(
        UsageError, match=r"written against 0\.32: KVConnectorBase_V1 has no on_something_older; install"
    ):
        VLLM.check(Older, KVConnectorBase_V1, are_all_called=True)
    VLLM.check(CrossrailConnector, KVConnectorBase_V1, are_all_called=True)


def test_a_vllm_that_lacks_what_we_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import crossrail.integrations.vllm as integration

    monkeypatch.delitem(sys.modules, "crossrail.integrations.vllm.connector")
    monkeypatch.setitem(sys.modules, "vllm.v1.metrics.cache_hit_source", None)
    with pytest.raises(ImportError, match=r"this vLLM is 0\..*, CrossrailConnector is written against 0\.32: "):
        _ = integration.CrossrailConnector


def test_it_is_found_by_its_module_path() -> None:
    from vllm.config import KVTransferConfig

    config = KVTransferConfig(
        kv_connector="CrossrailConnector",
        kv_connector_module_path="crossrail.integrations.vllm",
        kv_role="kv_both",
    )

    assert KVConnectorFactory.get_connector_class(config) is CrossrailConnector


def test_fetched_tokens_are_those_of_a_peer() -> None:
    connector = object.__new__(CrossrailConnector)
    assert connector.get_external_cache_hit_sources(None, 7) == {CacheHitSource.P2P: 7}


def test_all_of_a_request_is_loaded() -> None:
    connector = object.__new__(CrossrailConnector)
    connector._kv_cache_config = SimpleNamespace(transfer_group_ids=(0,), prefix_cacheable_group_ids=())
    assert connector.get_loaded_kv_cache_group_ids(None) == (0,)


def test_stats_add_up_and_come_out_as_metrics() -> None:
    one = stats.empty() | {"loaded": 2, "loaded_bytes": 100, "load_seconds": [0.002, 0.2]}
    both = CrossrailStats(data=one).aggregate(CrossrailConnector.build_kv_connector_stats(one))
    registry = CollectorRegistry()
    kinds: Any = {kind: _in(registry, kind) for kind in (Gauge, Counter, Histogram)}

    metrics = CrossrailConnector.build_prom_metrics(_Config(), kinds, ["engine"], {0: ["0"]})
    assert metrics is not None
    metrics.observe(both.to_dict())

    assert both.reduce() == {"loaded": 4, "loaded_bytes": 200, "median load (ms)": 200.0, "longest load (ms)": 200.0}
    text = generate_latest(registry).decode()
    assert 'vllm:crossrail_loaded_total{engine="0"} 4.0' in text
    assert 'vllm:crossrail_load_seconds_count{engine="0"} 4.0' in text
    assert CrossrailStats(data=stats.empty()).is_empty() and not both.is_empty()


def test_its_stats_come_through_a_multi_connector() -> None:
    """Which looks up by its name a connector that it knows by its module path."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    found = MultiConnector.build_kv_connector_stats({"CrossrailConnector": stats.empty() | {"loaded": 2}})

    assert found is not None and found.reduce() == {"CrossrailConnector": {"loaded": 2}}


def test_what_another_connector_tells_of_itself_is_refused() -> None:
    """MultiConnector passes the description of the first of its connectors that has one on to all of them."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    class Other(KVConnectorHandshakeMetadata):
        pass

    def child(own: KVConnectorHandshakeMetadata | None) -> Any:
        made = CrossrailConnector.__new__(CrossrailConnector)
        made.get_handshake_metadata = lambda: own  # type: ignore[method-assign]
        return made

    multi = MultiConnector.__new__(MultiConnector)
    multi._connectors = [child(Other()), child(None)]
    described = multi.get_handshake_metadata()
    assert described is not None
    with pytest.raises(UsageError, match="MultiConnector hands Other to CrossrailConnector"):
        multi.set_xfer_handshake_metadata({0: described})


def test_importing_the_integration_imports_no_vllm() -> None:
    code = "import sys, crossrail.integrations.vllm.worker; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_sleep_mode_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caches lose their memory, in which peers write, and get other memory when it wakes."""
    from vllm.config import KVTransferConfig, ModelConfig, ParallelConfig

    assert "enable_sleep_mode" in {field.name for field in dataclasses.fields(ModelConfig)}
    monkeypatch.setenv("CROSSRAIL_SECRET", "of these tests")
    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="CrossrailConnector",
            kv_connector_module_path="crossrail.integrations.vllm",
            kv_role="kv_both",
        ),
        parallel_config=ParallelConfig(),
        model_config=SimpleNamespace(enable_sleep_mode=True),
    )
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16)
    caches = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])

    with pytest.raises(UsageError, match="enable_sleep_mode: CrossrailConnector needs KV caches that stay"):
        CrossrailConnector(config, KVConnectorRole.SCHEDULER, caches)
    config.model_config.enable_sleep_mode = False
    CrossrailConnector(config, KVConnectorRole.SCHEDULER, caches)


def test_caches_of_other_kinds_are_refused_by_name() -> None:
    assert all(hasattr(kv_cache_interface, name) for name in SPECS)
    chunked = kv_cache_interface.ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16, attention_chunk_size=64
    )
    sliding = kv_cache_interface.SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16, sliding_window=64
    )

    assert window_of(sliding) == Window(64, 16)
    with pytest.raises(UsageError, match="KV caches of vLLM's ChunkedLocalAttentionSpec"):
        window_of(chunked)


@pytest.mark.parametrize("tokens_max", [128, 129])
def test_max_model_len_chooses_the_factors_of_longrope(monkeypatch: pytest.MonkeyPatch, tokens_max: int) -> None:
    """KV computed with the one is not KV for the other, though its prompt is as short."""
    from transformers import Phi3Config
    from vllm.model_executor.layers.rotary_embedding import phi3_long_rope_scaled_rope as longrope

    rope = {"rope_type": "longrope", "original_max_position_embeddings": 128, "factor": 8.0}
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    text = Phi3Config(
        hidden_size=64,
        num_attention_heads=4,
        pad_token_id=0,
        original_max_position_embeddings=128,
        rope_parameters=rope | factors,
    )
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=tokens_max))
    monkeypatch.setattr(longrope, "get_current_vllm_config", lambda: config)

    made = longrope.Phi3LongRoPEScaledRotaryEmbedding(16, 16, 1024, 128, 1e4, True, torch.float32, **factors)

    said = {"max_model_len": "above 128" if made.use_long_rope else "128 at most"}
    assert lengths_of(text.to_dict(), tokens_max) == said
    assert made.use_long_rope == (tokens_max > 128)


def test_every_status_of_a_request_that_went_well_is_known() -> None:
    ended = [status for status in RequestStatus if RequestStatus.is_finished(status)]
    failed = (FinishReason.ABORT, FinishReason.ERROR)

    well = {status.name for status in ended if RequestStatus.get_finished_reason(status) not in failed}

    assert well - {"FINISHED_IGNORED"} == set(COMPLETE)  # that one was too long for the model


def test_hashes_of_images_are_where_we_look_for_them() -> None:
    from vllm.config.multimodal import MultiModalConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    def told(mm_hash: str) -> bytes:
        place = PlaceholderRange(offset=1, length=2)
        image = MultiModalFeatureSpec(
            data=None, modality="image", identifier=mm_hash, mm_position=place, mm_hash=mm_hash
        )
        request = SimpleNamespace(prompt_token_ids=[1, 2, 3, 4], lora_request=None, mm_features=[image])
        return prompt_of(request, hasher_of(config))

    config = SimpleNamespace(
        model_config=SimpleNamespace(model="m", multimodal_config=MultiModalConfig()),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )
    assert "mm_features" in inspect.signature(Request).parameters
    assert {"mm_processor_cache_gb", "mm_hasher_algorithm"} <= MultiModalConfig.__dataclass_fields__.keys()
    assert differ(told("a"), told("a")) == "" and "other images" in differ(told("a"), told("b"))


class _Config:
    kv_transfer_config = None


def _in(registry: CollectorRegistry, kind: Any) -> Any:
    return lambda **options: kind(registry=registry, **options)
