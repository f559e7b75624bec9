"""What lies in a directory: models and tokenizers as transformers saves them."""

import asyncio
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM as CausalLM
from transformers import (
    FalconMambaConfig,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

import crossrail as xr
from crossrail.cli.kv import common
from crossrail.kv.http.front import Front
from crossrail.kv.messages import Sampling
from crossrail.kv.model import generate
from crossrail.kv.models.tokenizer import TextTokenizer
from crossrail.kv.nodes.decoder import Decoder
from crossrail.kv.nodes.prefiller import Prefiller
from tests.kv.caches import cache_of
from tests.kv.models.conftest import OpenModel, alone
from tests.kv.models.test_transformers_model import GREEDY, by_transformers
from tests.support.kv_cluster import SECRET, Cluster, prompt_of
from tests.support.limits import WAIT_S

TEXT = "Grüße, 世界! 🙂"
SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "bos_token_id": None,
}


def save(directory: Path, config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> str:
    torch.manual_seed(5)
    model = CausalLM.from_config(config, dtype=dtype)
    model.generation_config = GenerationConfig(eos_token_id=[290, 291])
    model.save_pretrained(directory)
    return str(directory)


def save_tokenizer(directory: Path) -> None:
    """Each byte is a token, so most characters of TEXT are several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


async def test_text_in_and_text_out(cluster: Cluster, open_model: OpenModel, tmp_path: Path) -> None:
    directory = save(tmp_path / "tiny", LlamaConfig(**SHAPE), torch.bfloat16)
    save_tokenizer(tmp_path / "tiny")
    cluster.host(Prefiller, "p0", open_model(directory))
    cluster.host(Decoder, "d0", open_model(directory, page_tokens=4))
    await asyncio.wait_for(cluster.joined(), WAIT_S)
    tokenizer = TextTokenizer(tmp_path / "tiny")
    front = Front(cluster.router, tokenizer, SECRET)
    url = f"http://127.0.0.1:{await front.start('127.0.0.1', 0)}/v1/completions"
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as client:
            body = {"prompt": TEXT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            async with client.post(url, json=body) as response:
                answer = await response.json()
    finally:
        await front.close()
    one = open_model(directory)
    assert one.layout.dtype == "bfloat16" and one.name.startswith("tiny-")
    expected = await alone(one, tokenizer.encode(TEXT), Sampling(12, ignore_end=True))
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["choices"][0]["text"] == tokenizer.decode(expected)
    assert answer["usage"]["prompt_tokens"] == len(TEXT.encode())


async def test_any_end_token_ends_it(open_model: OpenModel, tmp_path: Path) -> None:
    model = open_model(save(tmp_path / "tiny", LlamaConfig(**SHAPE)))
    assert model.end_tokens == {290, 291}
    whole = await alone(model, prompt_of(20), GREEDY)
    model.end_tokens = frozenset({whole[3], 299})
    assert await alone(model, prompt_of(20), Sampling(10)) == whole[: whole.index(whole[3]) + 1]


async def test_window_of_attention(open_model: OpenModel, tmp_path: Path) -> None:
    model = open_model(save(tmp_path / "window", MistralConfig(**SHAPE, sliding_window=16)))
    for length in (5, 60):
        assert await alone(model, prompt_of(length), GREEDY) == by_transformers(model, prompt_of(length))


async def test_window_of_attention_with_requests_of_several_lengths(open_model: OpenModel, tmp_path: Path) -> None:
    model = open_model(save(tmp_path / "window", MistralConfig(**SHAPE, sliding_window=16)))
    prompts = [prompt_of(length) for length in (5, 24, 60)]
    expected = [await alone(model, prompt, GREEDY) for prompt in prompts]
    cache = cache_of(model)

    async def together(index: int) -> list[int]:
        pages = np.arange(8 * index, 8 * index + 8)
        return [token async for token in generate(model, cache, prompts[index], pages, GREEDY)]

    assert await asyncio.gather(*(together(index) for index in range(3))) == expected


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nothing", "not one of qwen3, llama, deepseek, nor a directory"),
        ("empty", "no model can be loaded from"),
        ("mamba", "keeps keys and values of equal layers, not LinearAttentionLayer"),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(
    open_model: OpenModel, tmp_path: Path, what: str, words: str
) -> None:
    directory = tmp_path / what
    if what != "nothing":
        directory.mkdir()
    if what == "mamba":
        save(directory, FalconMambaConfig(vocab_size=300, hidden_size=64, state_size=4, num_hidden_layers=2))
    with pytest.raises(xr.UsageError, match=words):
        open_model(str(directory))


def test_commands_find_model_and_tokenizer_by_directory(open_model: OpenModel, tmp_path: Path) -> None:
    directory = save(tmp_path / "tiny", LlamaConfig(**SHAPE))
    assert common.open_model(directory, {"pages": "8"}).name == open_model(directory).name
    assert common.tokenizer_of(directory) == "none" and common.open_tokenizer("none") is None
    with pytest.raises(xr.UsageError, match="no tokenizer can be loaded from"):
        common.open_tokenizer(directory)
    save_tokenizer(tmp_path / "tiny")
    assert common.tokenizer_of(directory) == directory
    tokenizer = common.open_tokenizer(directory)
    assert tokenizer is not None and tokenizer.decode(tokenizer.encode(TEXT).tolist()) == TEXT
    assert common.tokenizer_of("qwen3") == "toy"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"page_token": 4}, "has no option 'page_token'; there are pages, page_tokens"),
        ({"pages": "many"}, "Expected `int`"),
        ({"dtype": "int8"}, "models run in float64, float32, bfloat16 or float16"),
        ({"hidden": 100}, "must be a multiple of 64"),
        ({"tp": 3}, "one must be a multiple of the other"),
        ({"seed": 1 << 64}, r"must be in 0\.\.2\*\*64-1"),
        ({"batch": 0}, "batch is 0, must be 1 or more"),  # nothing would ever be decoded
        ({"threads": -1}, "threads is -1, must be 0 or more"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_make_no_sense(open_model: OpenModel, options: dict[str, object], words: str) -> None:
    with pytest.raises(xr.UsageError, match=words):
        open_model("qwen3", **options)
