"""KV of one model, and in one form: what differs is refused before anything is written, what cannot matter is not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from crossrail.errors import UsageError
from tests.sglang.conftest import Open
from tests.sglang.side import FAILED, LAYERS, PAGE, ROW, Side, ask, failure, hand_over, model_config, until


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_cache_dtype_str": "fp8_e4m3"}, "cache dtype: producer float32, decoder fp8_e4m3"),
        ({"dtype": "torch.float16"}, "cache dtype: producer float32, decoder float16"),
        ({"model": {"rope_theta": 1e6}}, "model: producer "),
        ({"model": {"rope_parameters": {"rope_type": "yarn"}}}, "model: producer "),
        ({"kv_layer_ids": [5, 6]}, "layer ids: producer"),
        ({"page_size": 2 * PAGE}, f"--page-size is {2 * PAGE} at this decoder and {PAGE} at its prefiller"),
        ({"kv_item_lens": [PAGE * ROW] * 2 * LAYERS}, "use the same model and KV cache dtype"),
    ],
)
def test_caches_that_do_not_match_are_never_written(
    open_side: Open, p: Side, changes: dict[str, Any], words: str
) -> None:
    d = open_side("decode", **changes)
    sender, receiver = p.sender(1), d.receiver(1)
    ask(receiver)
    until(FAILED, receiver)
    assert words in failure(receiver).failure_reason
    d.assert_untouched([], [])
    until(FAILED, sender)  # at once: a router waits for both servers' answers
    assert f"the decoder gave it up: {failure(receiver).failure_reason}" == failure(sender).failure_reason


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_dtype_str": "bf16"},
        {"model": {"_name_or_path": "/elsewhere", "quantization_config": {"quant_method": "fp8"}}},
        {"model": {"context_len": 4096, "max_position_embeddings": 4096, "language_only": True}},
    ],
)
def test_what_says_the_same_in_other_words_matches(open_side: Open, changes: dict[str, Any]) -> None:
    p, d = open_side("prefill", dtype="torch.bfloat16"), open_side("decode", dtype="torch.bfloat16", **changes)
    hand_over(p, d, "the same")


def test_scales_that_differ_do_not_match(open_side: Open, p: Side, tmp_path: Path) -> None:
    """Numbers of fp8 that mean something else on each side."""
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    d = open_side("decode", server_args={"quantization_param_path": str(scales)})
    receiver = d.receiver(1)
    ask(receiver)
    until(FAILED, receiver)
    assert "cache scales: producer none, decoder " in failure(receiver).failure_reason
    with pytest.raises(UsageError, match="--quantization-param-path="):
        open_side("decode", server_args={"quantization_param_path": str(tmp_path / "none")})


@pytest.mark.parametrize(
    ("quantized", "dtype", "is_refused"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "dynamic": False}}, "fp8_e4m3", True),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8_e4m3", True),
        ({"kv_cache_scheme": None, "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, "fp8_e4m3", False),
        ({"kv_cache_scheme": {"num_bits": 8, "dynamic": False}}, "bf16", False),
    ],
)
def test_scales_that_only_one_sides_weights_have_do_not_match(
    open_side: Open, quantized: dict[str, Any], dtype: str, is_refused: bool
) -> None:
    """A quantized checkpoint on one side: only those with scales of the KV cache make another one of float8."""
    p = open_side("prefill", kv_cache_dtype_str=dtype, model={"quantization_config": quantized})
    d = open_side("decode", kv_cache_dtype_str=dtype)
    if not is_refused:
        hand_over(p, d, "the same")
        return
    receiver = d.receiver(1)
    ask(receiver)
    until(FAILED, receiver)
    assert "decoder of the weights, which have none" in failure(receiver).failure_reason


def test_scales_that_a_file_beside_the_config_tells_of_do_not_match(open_side: Open, tmp_path: Path) -> None:
    p = open_side("prefill", kv_cache_dtype_str="fp8_e4m3")
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text('{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}')
    d = open_side("decode", kv_cache_dtype_str="fp8_e4m3", model_path=str(tmp_path))
    receiver = d.receiver(1)
    ask(receiver)
    until(FAILED, receiver)
    assert "cache scales: producer of the weights, which have none, decoder" in failure(receiver).failure_reason
    beside.write_text('{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": null}}')
    hand_over(p, open_side("decode", kv_cache_dtype_str="fp8_e4m3", model_path=str(tmp_path)), "the same", 2)
    beside.write_text("no JSON")
    with pytest.raises(UsageError, match=r"hf_quant_config\.json: JSON is malformed"):
        open_side("decode", model_path=str(tmp_path))


def test_scales_that_a_checkpoint_of_a_hub_tells_of_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from crossrail.integrations.sglang import conn

    beside = tmp_path / "hf_quant_config.json"
    beside.write_text('{"quantization": {"kv_cache_quant_algo": "FP8"}}')
    hub = ModuleType("huggingface_hub")
    hub.try_to_load_from_cache = lambda *asked, **_: str(beside) if asked == ("a/b", beside.name) else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, hub.__name__, hub)
    for name, scheme in (("a/b", True), ("a/c", False)):
        monkeypatch.setattr(conn, "process_model_config", lambda name=name: model_config({}, "torch.bfloat16", name))
        assert bool(conn._model(None).scheme) == scheme


@pytest.mark.parametrize("dtype", ["nvfp4", "fp4_mx_block16"])
def test_caches_whose_scales_are_elsewhere_are_refused(open_side: Open, dtype: str) -> None:
    with pytest.raises(UsageError, match=f"--kv-cache-dtype={dtype}: SGLang keeps the scales"):
        open_side("prefill", kv_cache_dtype_str=dtype)
