"""A model of transformers in pages, by itself. What it has to equal is transformers with its own cache."""

import asyncio
import threading

import numpy as np
import pytest
import torch

import crossrail as xr
from crossrail.kv.messages import Sampling
from crossrail.kv.model import Tokens, generate
from crossrail.kv.models.hosted import HostedModel
from tests.kv.caches import cache_of
from tests.kv.models.conftest import OpenModel, alone
from tests.support.kv_cluster import prompt_of
from tests.support.limits import WAIT_S

EXAMPLES = ("qwen3", "llama", "deepseek")
GREEDY = Sampling(10, ignore_end=True)


def by_transformers(model: HostedModel, prompt: Tokens, count: int = 10) -> list[int]:
    """Greedy."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    generated = model._model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    return generated[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", EXAMPLES)
async def test_tokens_are_those_of_transformers(open_model: OpenModel, name: str) -> None:
    model = open_model(name)
    for length in (1, 2, 16, 17, 100):
        assert await alone(model, prompt_of(length), GREEDY) == by_transformers(model, prompt_of(length)), length


@pytest.mark.parametrize(
    "options",
    [{"page_tokens": 5}, {"order": "NHD"}, {"separate_kv": False}, {"tp": 2}, {"tp": 4, "order": "NHD"}],
    ids=str,
)
async def test_how_pages_are_kept_changes_nothing(open_model: OpenModel, options: dict[str, object]) -> None:
    for name in ("qwen3", "deepseek"):
        expected = await alone(open_model(name), prompt_of(90), GREEDY)
        assert await alone(open_model(name, **options), prompt_of(90), GREEDY) == expected, name


async def test_chunks_of_any_length(open_model: OpenModel) -> None:
    model = open_model("llama")
    expected = by_transformers(model, prompt_of(70))
    for chunk_tokens in (7, 16, 69, 70):
        assert await alone(model, prompt_of(70), GREEDY, chunk_tokens) == expected, chunk_tokens


@pytest.mark.parametrize("name", EXAMPLES)
async def test_requests_of_several_lengths_and_caches_at_once(open_model: OpenModel, name: str) -> None:
    model = open_model(name, batch=4)
    prompts = [prompt_of(length, seed=length) for length in (3, 24, 60, 24)]
    expected = [await alone(model, prompt, GREEDY) for prompt in prompts]
    batches: list[int] = []
    model._model.register_forward_hook(lambda _model, _given, output: batches.append(len(output.logits)))
    shared = cache_of(model)

    async def together(index: int) -> list[int]:
        if index == 3:
            return await alone(model, prompts[index], GREEDY)
        pages = np.arange(8 * index, 8 * index + 8)
        return [token async for token in generate(model, shared, prompts[index], pages, GREEDY, chunk_tokens=32)]

    assert await asyncio.gather(*(together(index) for index in range(4))) == expected
    assert max(batches) == 3 and sum(batches) == 40


@pytest.mark.parametrize("name", EXAMPLES)
async def test_one_wrong_element_shows(open_model: OpenModel, name: str) -> None:
    model = open_model(name)
    cache, pages, prompt = cache_of(model), np.arange(8), prompt_of(40)
    tail = await model.prefill(cache, prompt[:-1], 0, pages, lambda: None)
    logits, _ = await model.step(cache, int(prompt[-1]), 39, pages, tail)
    element = cache[0][1][-1, 1, 0, 3]
    element[0] += 8
    wrong, _ = await model.step(cache, int(prompt[-1]), 39, pages, tail)
    assert np.abs(wrong - logits).max() > 1e-3


async def test_word_goes_up_once_a_layer_when_its_pages_are_written(open_model: OpenModel) -> None:
    model = open_model("qwen3")
    cache = cache_of(model)
    written: list[list[bool]] = []
    await model.prefill(
        cache, prompt_of(20), 0, np.arange(2), lambda: written.append([bool(layer[:, 1].any()) for layer in cache[0]])
    )
    assert written == [[True, False, False], [True, True, False], [True, True, True]]


@pytest.mark.parametrize("name", EXAMPLES)
async def test_nothing_is_computed_in_prefill_behind_the_last_attention(open_model: OpenModel, name: str) -> None:
    model = open_model(name)
    run: list[int] = []
    for number, layer in enumerate(model._model.base_model.layers):
        layer.mlp.register_forward_hook(lambda *_, number=number: run.append(number))
    await model.prefill(cache_of(model), prompt_of(20), 0, np.arange(2), lambda: None)
    assert run == [0, 1]
    await model.step(cache_of(model), 1, 20, np.arange(2), b"")
    assert run == [0, 1, 0, 1, 2]


async def test_cancelled_prefill_ends_when_the_pages_are_let_go(open_model: OpenModel) -> None:
    model = open_model("llama")
    reached, may_go_on = threading.Event(), threading.Event()
    layers: list[int] = []

    def layer_done() -> None:
        layers.append(1)
        reached.set()
        assert may_go_on.wait(WAIT_S)

    task = asyncio.create_task(model.prefill(cache_of(model), prompt_of(50), 0, np.arange(8), layer_done))
    await asyncio.to_thread(reached.wait, WAIT_S)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, WAIT_S)
    assert layers == [1]  # it stopped at the next layer
    assert await alone(model, prompt_of(50), GREEDY) == by_transformers(model, prompt_of(50))


def test_name_tells_weights_apart(open_model: OpenModel) -> None:
    first, again, other = (open_model("qwen3", seed=seed) for seed in (1, 1, 2))
    assert first.name == again.name != other.name


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([257], "tokens must be in 0..256, and 257 is not"),
        ([1] * 32760, r"32760 \+ 10 tokens, .* has positions for 32768"),
    ],
    ids=["vocabulary", "positions"],
)
def test_prompt_that_it_cannot_run_is_refused(open_model: OpenModel, prompt: list[int], words: str) -> None:
    with pytest.raises(xr.UsageError, match=words):
        open_model("qwen3").check(np.array(prompt, np.int32), 10)
