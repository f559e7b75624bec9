"""Which prompts are the same on both sides, as far as that can be said."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crossrail.integrations.vllm.adapters import Adapters
from crossrail.integrations.vllm.prompts import differ, hasher_of, prompt_of

TOKENS = list(range(100))


def image(name: str, offset: int = 5) -> Any:
    return SimpleNamespace(mm_hash=name, identifier="", mm_position=SimpleNamespace(offset=offset, length=16))


def request(
    tokens: list[int] | None = TOKENS, images: list[Any] | None = None, adapter: str = "", salt: str | None = None
) -> Any:
    lora = SimpleNamespace(lora_name=adapter) if adapter else None
    return SimpleNamespace(prompt_token_ids=tokens, lora_request=lora, cache_salt=salt, mm_features=images)


def config(model: str = "/models/llava", cache_gb: float = 4.0, caches_prefixes: bool = False, **media: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model, multimodal_config=SimpleNamespace(mm_processor_cache_gb=cache_gb, **media)
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=caches_prefixes),
    )


HASHER = hasher_of(config())


def test_equal_prompts_do_not_differ() -> None:
    for made in (request(), request(adapter="one", salt="one"), request(images=[image("a"), image("b", 40)])):
        for hasher in (HASHER, b""):
            assert differ(prompt_of(made, hasher), prompt_of(made, hasher)) == ""


@pytest.mark.parametrize(
    "images", [[], [image("b")], [image("a", 6)], [image("a"), image("a", 40)], [image("a" * 1000)]]
)
def test_the_same_words_with_other_images_are_another_prompt(images: list[Any]) -> None:
    told = differ(prompt_of(request(images=images), HASHER), prompt_of(request(images=[image("a")]), HASHER))
    assert told == "the decoder's prompt has other images, audio or video than the one prefilled here"


@pytest.mark.parametrize(
    "other",
    [request(TOKENS[1:]), request(TOKENS[:-1]), request(adapter="one"), request(salt="one"), request(salt="")],
)
def test_other_words_adapters_or_salts_are_another_prompt(other: Any) -> None:
    for hasher in (HASHER, b""):
        told = differ(prompt_of(other, hasher), prompt_of(request(), HASHER))
        assert told == "the decoder's prompt, its LoRA adapter or its cache_salt is another than the one prefilled here"


def test_media_are_compared_where_both_sides_hash_them_alike() -> None:
    one, another = request(images=[image("a")]), request(images=[image("b")])
    for other in (hasher_of(config(model="/elsewhere/llava")), b""):
        assert differ(prompt_of(one, HASHER), prompt_of(another, other)) == ""
        assert differ(prompt_of(one, other), prompt_of(another, HASHER)) == ""


def adapter_at(folder: Path, weights: bytes, alpha: int = 8) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(f'{{"lora_alpha": {alpha}}}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return SimpleNamespace(lora_name="one", lora_int_id=1, lora_path=str(folder), load_inplace=False)


def test_adapters_of_one_name_with_other_weights_are_told_apart(tmp_path: Path) -> None:
    """As while a fleet is given the next one, one instance after the other."""
    old, new = b"old" * 200_000, b"new" * 200_000
    ours = adapter_at(tmp_path / "ours", old)
    for theirs, words in (
        (adapter_at(tmp_path / "copy", old), ""),
        (
            adapter_at(tmp_path / "new", new),
            "the decoder's LoRA adapter has other weights than the one of that name here",
        ),
        (adapter_at(tmp_path / "alpha", old, alpha=16), "other weights"),
        (SimpleNamespace(lora_name="one", lora_int_id=1, lora_path="in/a-hub", load_inplace=False), ""),
    ):
        there, here = (
            prompt_of(request(adapter="one"), hasher, Adapters().digest_of(lora))
            for lora, hasher in ((theirs, HASHER), (ours, b""))
        )
        assert (words in differ(there, here)) and bool(words) == bool(differ(there, here))


def test_an_adapter_that_is_loaded_in_place_is_looked_at_again(tmp_path: Path) -> None:
    adapters, folder = Adapters(), tmp_path / "adapter"
    lora = adapter_at(folder, b"old")
    before = adapters.digest_of(lora)
    adapter_at(folder, b"new")
    os.utime(folder / "adapter_model.safetensors", ns=(1, 1))
    assert adapters.digest_of(lora) == before != b"", "vLLM has it still"
    lora.load_inplace = True
    assert before != adapters.digest_of(lora) != b""


def test_prompts_that_are_not_tokens_are_not_compared() -> None:
    assert prompt_of(request(None), HASHER) == b""
    assert differ(b"", prompt_of(request(), HASHER)) == differ(prompt_of(request(), HASHER), b"") == ""


def test_an_instance_that_numbers_its_images_cannot_compare_them() -> None:
    assert hasher_of(config(cache_gb=0.0)) == b""
    assert hasher_of(config(cache_gb=0.0, caches_prefixes=True)) == HASHER
    assert hasher_of(SimpleNamespace(model_config=SimpleNamespace(multimodal_config=None))) == b""
