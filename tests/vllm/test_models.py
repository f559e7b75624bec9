"""Models whose KV caches are others than a Llama's: an instance fetches from itself, and has each block twice then."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.tiny_llama import make_mla_model, make_model, make_shared_cache_model, prompt
from tests.vllm.conftest import QUICK, Start
from tests.vllm.test_tokens import handed_over

TOKENS = 150
AMX = {"attention_backend": "AMX_MLA", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("make", "block", "caches", "is_exact", "more"),
    [
        # vLLM's CPU_MLA computes a token alone otherwise than among others, without a connector too: only bytes count.
        pytest.param(make_mla_model, 16, 3, False, {}, id="MLA"),
        *([pytest.param(make_mla_model, 32, 3, False, AMX, id="AMX")] if torch.cpu._is_amx_tile_supported() else []),
        pytest.param(make_shared_cache_model, 32, 4, True, {}, id="layers that share"),
    ],
)
def test_an_instance_that_fetches_from_itself(
    folder: Path,
    start: Start,
    make: Callable[[Path], Path],
    block: int,
    caches: int,
    is_exact: bool,
    more: dict[str, str],
) -> None:
    engine = {"block_size": block, "enable_prefix_caching": False, "max_num_batched_tokens": 512, **more}
    name = f"{make.__name__}-{block}"
    both = start(
        name,
        "kv_both",
        model=make(folder / name),
        options=QUICK,
        worker_extension_cls="tests.vllm.copies.Copies",
        **engine,
    ).wait_ready()
    tokens = prompt(4000, TOKENS)

    handed = handed_over(both, both, tokens)

    both.call("looks", "expect_copies", blocks=TOKENS // block, caches=caches)
    assert handed["finish"] == "length" and len(handed["tokens"]) == 12
    assert not is_exact or handed["tokens"] == both.ask("alone", tokens)["tokens"]


def test_a_draft_models_kv_comes_too(folder: Path, model: Path, start: Start) -> None:
    """Without it tokens would be right all the same, and drafts worse: so bytes are looked at as well."""
    draft = make_model(folder / "draft", seed=3)
    both = start(
        "drafts",
        "kv_both",
        options=QUICK,
        speculative_config={"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3},
        worker_extension_cls="tests.vllm.copies.Copies",
        enable_prefix_caching=False,
    ).wait_ready()
    tokens = prompt(4001, TOKENS)

    handed = handed_over(both, both, tokens)

    both.call("looks", "expect_copies", blocks=TOKENS // 32, caches=6)
    assert handed["finish"] == "length"
    assert handed["tokens"] == both.ask("alone", tokens)["tokens"]
