"""The toy model: what makes it a witness. A wrong byte must show; all that may differ between nodes must not."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from crossrail.errors import CrossrailError
from crossrail.kv import sampling as sampling_module
from crossrail.kv.messages import Sampling
from crossrail.kv.model import generate
from crossrail.kv.sampling import sample
from crossrail.kv.toy import ToyModel
from crossrail.kv.transfer.layout import KvLayout
from tests.kv.caches import cache_of
from tests.support.seeds import Seed

PROMPT = np.arange(40, dtype=np.int32) * 5 % 256


def layout(**changes: object) -> KvLayout:
    given = {"layers": 3, "pages": 16, "page_tokens": 8, "kv_heads": 4, "head_dim": 6, "dtype": "float16"}
    return KvLayout(**(given | changes))


def pages_of(model: ToyModel, order: int = 0) -> np.ndarray:
    return np.random.default_rng(order).permutation(model.layout.pages)


async def tokens_of(model: ToyModel, sampling: Sampling, order: int = 0) -> list[int]:
    pages = pages_of(model, order)
    return [token async for token in generate(model, cache_of(model), PROMPT, pages, sampling)]


GREEDY = Sampling(max_tokens=12, ignore_end=True)


@pytest.mark.parametrize(
    "changes",
    [{"order": "NHD"}, {"tp": 2}, {"tp": 8}, {"page_tokens": 16}, {"separate_kv": False}, {"pages": 40}],
    ids=str,
)
async def test_where_kv_lies_does_not_matter(changes: dict[str, object]) -> None:
    expected = await tokens_of(ToyModel(layout()), GREEDY)
    assert await tokens_of(ToyModel(layout(**changes)), GREEDY, order=1) == expected


async def test_seed_and_prompt_matter() -> None:
    expected = await tokens_of(ToyModel(layout()), GREEDY)
    assert await tokens_of(ToyModel(layout(), seed=2), GREEDY) != expected
    assert len(set(expected)) > 3


async def test_chunks_give_the_same_kv() -> None:
    model = ToyModel(layout())
    whole, chunked = cache_of(model), cache_of(model)
    tail = await model.prefill(whole, PROMPT, 0, pages_of(model), lambda: None)
    for end in (7, 16, 33, 40):
        start = {7: 0, 16: 7, 33: 16, 40: 33}[end]
        last = await model.prefill(chunked, PROMPT[:end], start, pages_of(model), lambda: None)
    assert last == tail
    assert [layer.tobytes() for layer in whole[0]] == [layer.tobytes() for layer in chunked[0]]


async def test_prefill_gives_the_kv_that_steps_give() -> None:
    model = ToyModel(layout())
    expected = await tokens_of(model, GREEDY)
    for known in range(1, GREEDY.max_tokens):
        context = np.concatenate([PROMPT, np.array(expected[:known], np.int32)])
        rest = Sampling(max_tokens=GREEDY.max_tokens - known, ignore_end=True)
        pages = pages_of(model)
        assert [t async for t in generate(model, cache_of(model), context, pages, rest)] == expected[known:]


@pytest.mark.parametrize("tp", [1, 2, 8])
async def test_any_wrong_byte_changes_what_follows(tp: int, seed: Seed) -> None:
    model = ToyModel(layout(tp=tp))
    cache, pages = cache_of(model), pages_of(model)
    tail = await model.prefill(cache, PROMPT, 0, pages, lambda: None)
    right, _ = await model.step(cache, 1, len(PROMPT), pages, tail)
    draw = np.random.default_rng(seed.number())
    for _ in range(60):
        rank, layer = draw.integers(tp), draw.integers(model.layout.layers)
        token = int(draw.integers(len(PROMPT)))
        view = cache[rank][layer].view(np.uint8)
        at = (draw.integers(2), pages[token // 8], draw.integers(view.shape[2]), token % 8, draw.integers(12))
        before = view[at]
        view[at] ^= np.uint8(1 << draw.integers(8))
        wrong, _ = await model.step(cache, 1, len(PROMPT), pages, tail)
        assert (wrong != right).any()
        view[at] = before
    again, _ = await model.step(cache, 1, len(PROMPT), pages, tail)
    assert (again == right).all()


async def test_tail_matters() -> None:
    model = ToyModel(layout())
    cache, pages = cache_of(model), pages_of(model)
    tail = await model.prefill(cache, PROMPT, 0, pages, lambda: None)
    right, _ = await model.step(cache, 1, len(PROMPT), pages, tail)
    for at in range(model.tail_bytes):
        wrong_tail = bytearray(tail)
        wrong_tail[at] ^= 1
        wrong, _ = await model.step(cache, 1, len(PROMPT), pages, bytes(wrong_tail))
        assert (wrong != right).any()


# --- sampling ---


def test_sampling_draws_each_token_as_often_as_it_should() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    drawn = [sample(logits, Sampling(temperature=1.0, seed=3), position) for position in range(4000)]
    share = np.bincount(drawn, minlength=4) / len(drawn)
    assert np.abs(share - [0.5, 0.3, 0.15, 0.05]).max() < 0.04
    top = {sample(logits, Sampling(temperature=1.0, top_p=0.75, seed=3), position) for position in range(200)}
    assert top == {0, 1}


def test_sampling_depends_on_seed_and_position_alone() -> None:
    logits = np.random.default_rng(1).random(300).astype(np.float32)
    first = [sample(logits, Sampling(temperature=1.0, seed=5), position) for position in range(50)]
    assert first == [sample(logits, Sampling(temperature=1.0, seed=5), position) for position in range(50)]
    assert first != [sample(logits, Sampling(temperature=1.0, seed=6), position) for position in range(50)]
    assert sample(logits, Sampling(), 0) == int(logits.argmax())


def test_draws_are_those_of_a_generator_of_their_own_in_any_order_and_thread() -> None:
    logits = np.zeros(1 << 16, np.float32)
    keys = [(seed, position) for seed in (0, 5, (1 << 63) - 1) for position in (0, 7, 1 << 20)]
    right = [int(np.random.Generator(np.random.Philox(key=key)).random() * len(logits)) for key in keys]

    def drawn(_: int) -> list[int]:
        return [sample(logits, Sampling(temperature=1.0, seed=seed), position) for seed, position in keys]

    with ThreadPoolExecutor(4) as threads:
        assert all(tokens == right for tokens in threads.map(drawn, range(40)))


def test_top_p_keeps_the_fewest_tokens_that_hold_it() -> None:
    logits = np.random.default_rng(2).standard_normal(500).astype(np.float32) * 2
    chances = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum()
    by_chance = np.argsort(-chances)
    for top_p in (0.01, 0.3, 0.9):
        fewest = int(np.searchsorted(np.cumsum(chances[by_chance]), top_p)) + 1
        sampling = Sampling(temperature=1.0, top_p=top_p, seed=3)
        drawn = {sample(logits, sampling, position) for position in range(20 * fewest)}
        assert drawn <= set(by_chance[:fewest].tolist())
        assert int(by_chance[0]) in drawn


def test_equally_likely_tokens_are_kept_from_the_smallest_on() -> None:
    drawn = {
        sample(np.zeros(100, np.float32), Sampling(temperature=1.0, top_p=0.045, seed=3), position)
        for position in range(200)
    }
    assert drawn == {0, 1, 2, 3, 4}


def test_sampling_does_not_depend_on_which_of_two_tokens_rounding_makes_likelier() -> None:
    logits = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    rounded = (logits + np.random.default_rng(4).uniform(-1e-5, 1e-5, 1000)).astype(np.float32)
    sampling = Sampling(temperature=1.0, seed=3)
    assert (np.argsort(-logits) != np.argsort(-rounded)).any()
    same = [sample(logits, sampling, position) == sample(rounded, sampling, position) for position in range(200)]
    assert sum(same) >= 198


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_an_error(wrong: float, temperature: float) -> None:
    logits = np.array([0.0, wrong, 1.0], np.float32)
    with pytest.raises(CrossrailError, match="logits for position 7 are not numbers"):
        sample(logits, Sampling(temperature=temperature, seed=3), 7)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(), (0,), (1, 9), (9, 1)])
def test_logits_of_another_shape_are_refused(shape: tuple[int, ...], temperature: float) -> None:
    with pytest.raises(CrossrailError, match=r"logits for position 7 have the shape \(.*\), not \(vocabulary,\)"):
        sample(np.ones(shape, np.float32), Sampling(1, temperature=temperature), 7)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_sampling_sorts_no_vocabulary(top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.random.default_rng(1).standard_normal(151_936).astype(np.float32) * 3
    sorted_counts: list[int] = []
    sort = np.sort

    def counted(values: np.ndarray) -> np.ndarray:
        sorted_counts.append(len(values))
        return sort(values)

    monkeypatch.setattr(np, "sort", counted)
    sample(logits, Sampling(temperature=0.7, top_p=top_p, seed=3), 0)

    assert len(sorted_counts) == (top_p < 1.0) and sum(sorted_counts) < len(logits) // 10


def sampled_plainly(logits: np.ndarray, sampling: Sampling, position: int) -> int:
    """As sample() defines it, one token after the other."""
    weights = np.exp(((logits - logits.max()).astype(np.float64) / sampling.temperature).astype(np.float32))
    order = np.argsort(-weights, kind="stable")
    share = np.cumsum(weights[order], dtype=np.float64)
    kept = order if sampling.top_p == 1.0 else order[: int(np.searchsorted(share, sampling.top_p * share[-1])) + 1]
    kept = np.sort(kept)
    share = np.cumsum(weights[kept], dtype=np.float64)
    draw = np.random.Generator(np.random.Philox(key=[sampling.seed, position])).random()
    return int(kept[np.searchsorted(share, draw * share[-1], side="right")])


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("vocabulary", [1, 2, 511, 512, 513, 1024, 30_000])
def test_sampling_by_blocks_is_sampling(vocabulary: int, temperature: float, top_p: float) -> None:
    draw = np.random.default_rng(vocabulary)
    for position in range(60):
        logits = (draw.standard_normal(vocabulary) * draw.choice([0.0, 1.0, 9.0])).astype(np.float32)
        if position % 2:
            logits = np.round(logits)  # many are equally likely
        if position % 3:
            logits[draw.random(vocabulary) < 0.5] = -np.inf
            logits[draw.integers(vocabulary)] = 0.0
        sampling = Sampling(temperature=temperature, top_p=top_p, seed=position)
        assert sample(logits, sampling, position) == sampled_plainly(logits, sampling, position)


def test_no_token_of_no_weight_is_drawn_at_the_end_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw so close to 1 that rounding makes it the sum of all."""
    monkeypatch.setattr(sampling_module._Draws, "draw", lambda *_: 1.0)
    for vocabulary in (8, 2000):
        logits = np.full(vocabulary, -np.inf, np.float32)
        logits[[1, 5]] = 0.0
        for top_p in (1.0, 0.9):
            assert sample(logits, Sampling(temperature=1.0, top_p=top_p, seed=1), 0) == 5


def test_temperature_of_almost_nothing_is_greedy() -> None:
    logits = np.array([0.0, -3.0, 2.0, 2.0 + 1e-6], np.float32)
    for temperature in (5e-324, 1e-300):
        assert sample(logits, Sampling(temperature=temperature, seed=5), 0) == int(logits.argmax())
