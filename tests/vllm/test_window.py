"""Models whose layers all look back a window only: vLLM frees, or never allocates, the blocks behind it."""

from pathlib import Path

from tests.support.tiny_llama import make_window_model, prompt
from tests.vllm.conftest import Start
from tests.vllm.test_tokens import DECODE

WINDOW = 64


def test_a_window_that_slides(folder: Path, start: Start) -> None:
    """The producer has few blocks, so those that a window has left are others' at once."""
    model = make_window_model(folder / "window", WINDOW)
    p = start("window-p", "kv_producer", model=model, num_gpu_blocks_override=40)
    d = start("window-d", "kv_consumer", model=model, num_gpu_blocks_override=160)
    p.wait_ready()
    d.wait_ready()
    prompts = {f"window-{i}": prompt(3000 + i, 300) for i in range(10)}
    for count in (1, 100):  # what the producer generates itself
        names = {f"{name}-{count}": tokens for name, tokens in prompts.items()}
        for name, tokens in names.items():
            p.add(name, tokens, count, DECODE)
        params = {name: p.answer(name)["params"] for name in names}
        assert all((params[name] is not None) == (count == 1) for name in names)
        answers = {name: d.ask(name, tokens, params=params[name])["tokens"] for name, tokens in names.items()}
        for name, tokens in names.items():
            assert answers[name] == p.ask(f"{name} alone", tokens)["tokens"], name
    assert "sliding window of 64 tokens, and max_tokens is 100" in p.text()


def test_windows_that_begin_at_the_end_of_a_block(folder: Path, start: Start) -> None:
    """vLLM computes the last token again, and it looks at a block that is given away by then."""
    model = make_window_model(folder / "window", WINDOW)
    p = start("window-end-p", "kv_producer", model=model)
    d = start("window-end-d", "kv_consumer", model=model)
    p.wait_ready()
    d.wait_ready()
    for length in (318, 319, 320):  # 319 - 64 + 1 is 8 blocks
        for i in range(8):
            tokens = prompt(3200 + i, length)
            params = p.ask(f"{length}-{i}", tokens, 1, DECODE)["params"]
            answer = d.ask(f"{length}-{i}", tokens, params=params)
            assert answer["tokens"] == p.ask(f"{length}-{i} alone", tokens)["tokens"], (length, i)


def test_a_load_that_fails_is_computed_with_all_of_its_window(folder: Path, start: Start) -> None:
    model = make_window_model(folder / "window", WINDOW)
    both = start("window-recomputes", "kv_both", model=model, policy="recompute").wait_ready()
    for i in range(8):
        tokens = prompt(3300 + i, 200)
        computed = both.ask(f"{i}", tokens, params={"do_remote_prefill": True})
        both.reset_prefix_cache(f"{i} reset")
        assert computed["tokens"] == both.ask(f"{i} alone", tokens)["tokens"], i
    assert both.text().count("could not be loaded") == 8


def test_a_load_that_fails_does_not_fail_others_that_have_left_blocks_behind(folder: Path, start: Start) -> None:
    model = make_window_model(folder / "window", WINDOW)
    both = start("window-both", "kv_both", model=model).wait_ready()
    both.add("runs", prompt(3100, 200), 300)

    malformed = both.ask("fails", prompt(3101, 200), params={"do_remote_prefill": True})

    assert malformed["finish"] == "error" and not both.has_answered("runs")
    assert both.answer("runs")["finish"] == "length"
