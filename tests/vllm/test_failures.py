"""What goes wrong costs the request that it happens to, or time; never tokens, and never another request."""

import contextlib
import itertools
import time
from typing import Any

from tests.support.tiny_llama import prompt
from tests.vllm.conftest import LEASE_S, QUICK, Start
from tests.vllm.support import Instance
from tests.vllm.test_tokens import DECODE, both_at_once

_names = (f"failure-{i}" for i in itertools.count())


def from_elsewhere(p: Instance, transfer_id: str) -> dict[str, Any]:
    return {"do_remote_prefill": True, "transfer_id": transfer_id, "crossrail_instance": p.line}


def expect(alone: Instance, d: Instance, p: Instance, seed: int) -> None:
    """A hand-over that works, now."""
    name, tokens = next(_names), prompt(seed, 100)
    both_at_once(p, d, name, tokens)
    assert d.answer(name)["tokens"] == alone.ask(name, tokens)["tokens"]


def test_nobody_comes_within_the_lease(alone: Instance, p: Instance, d: Instance, r: Instance) -> None:
    """The producer has its blocks back. By the policy the request fails, or is computed where it is."""
    tokens = prompt(1000, 140)
    params = p.ask(next(_names), tokens, 1, DECODE)["params"]
    time.sleep(LEASE_S + 2)

    failed = d.ask(next(_names), tokens, params=params)
    computed = r.ask(next(_names), tokens, params=params)

    assert failed["finish"] == "error" and not failed["tokens"]
    assert computed["finish"] == "length"
    assert computed["tokens"] == alone.ask(next(_names), tokens)["tokens"]
    assert "its lease has run out" in d.text()


def test_aborted_at_the_decoder_while_it_waits(alone: Instance, p: Instance, d: Instance) -> None:
    name = next(_names)
    d.add(name, prompt(1010, 140), params=from_elsewhere(p, "nobody prefills this"))
    expect(alone, d, p, 1011)
    assert not d.has_answered(name)

    d.abort(name)

    assert d.answer(name)["finish"] == "aborted"
    expect(alone, d, p, 1012)


def test_aborted_at_the_producer(alone: Instance, p: Instance, d: Instance, r: Instance) -> None:
    """The decoders wait for it; one fails, the other computes."""
    for decoder in (d, r):
        name, tokens = next(_names), prompt(1020, 400)
        decoder.add(name, tokens, params=from_elsewhere(p, name))
        p.add(name, tokens, 1, DECODE | {"transfer_id": name})
        p.abort(name)
        answer = decoder.answer(name)
        # It may have been too late to abort it.
        assert answer["finish"] == "error" or answer["tokens"] == alone.ask(name, tokens)["tokens"]
        assert decoder is d or answer["finish"] == "length"
    expect(alone, d, p, 1021)


def test_malformed_parameters(alone: Instance, d: Instance, r: Instance) -> None:
    tokens = prompt(1030, 80)
    for params in (
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "transfer_id": 5, "crossrail_instance": ""},
    ):
        assert d.ask(next(_names), tokens, params=params)["finish"] == "error"
        assert r.ask(next(_names), tokens, params=params)["tokens"] == alone.ask(next(_names), tokens)["tokens"]


def test_another_prompt_than_was_prefilled(alone: Instance, p: Instance, d: Instance, r: Instance) -> None:
    for decoder in (d, r):
        params = p.ask(next(_names), prompt(1040, 90), 1, DECODE)["params"]
        tokens = prompt(1041, 90)
        answer = decoder.ask(next(_names), tokens, params=params)
        assert answer["finish"] == ("error" if decoder is d else "length")
        assert decoder is d or answer["tokens"] == alone.ask(next(_names), tokens)["tokens"]


def test_killed_in_the_middle(alone: Instance, p: Instance, d: Instance, r: Instance, start: Start) -> None:
    """A producer, with prompts computed, half computed and waiting; and a decoder, that waits for some."""
    doomed_p = start("doomed-p", "kv_producer", options=QUICK, max_num_batched_tokens=32)
    doomed_d = start("doomed-d", "kv_consumer", options=QUICK)
    doomed_p.wait_ready()
    doomed_d.wait_ready()
    prompts = {f"doomed-{i}": prompt(1100 + i, 300) for i in range(8)}
    for name, tokens in prompts.items():
        decoder = (d, r)[name[-1] in "1357"]
        both_at_once(doomed_p, decoder, name, tokens)
        both_at_once(p, doomed_d, f"other {name}", tokens)
    doomed_p.answer("doomed-0")  # the first is through, the others are not
    doomed_p.kill()
    doomed_d.kill()

    for name, tokens in prompts.items():
        recomputes = name[-1] in "1357"
        answer = (r if recomputes else d).answer(name)
        assert answer["finish"] == "length" or (answer["finish"] == "error" and not recomputes)
        if answer["finish"] == "length":
            assert answer["tokens"] == alone.ask(name, tokens)["tokens"]
        assert p.answer(f"other {name}")["finish"] == "length"
    assert sum(d.text().count(f"request {name}") > 0 for name in prompts) > 0, "it was killed too late"
    for seed in range(1120, 1136):  # more than there are blocks: all of those have come back
        expect(alone, d, p, seed)


def test_preempted_at_the_producer(alone: Instance, d: Instance, start: Start) -> None:
    """It generates as well, and has too few blocks for that: it takes some back, and computes those prompts again."""
    tight = start("tight", "kv_producer", options=QUICK, num_gpu_blocks_override=17).wait_ready()
    prompts = {f"tight-{i}": prompt(1300 + i, 130) for i in range(6)}
    for name, tokens in prompts.items():
        d.add(name, tokens, params=from_elsewhere(tight, name))
        tight.add(name, tokens, 90, DECODE | {"transfer_id": name})

    answers = {name: d.answer(name) for name in prompts}

    for name, tokens in prompts.items():
        assert answers[name]["tokens"] == alone.ask(name, tokens)["tokens"]
        assert tight.answer(name)["finish"] == "length"
    assert "was preempted" in tight.text()


def test_a_cache_that_is_reset_in_the_middle_of_a_prompt(alone: Instance, p: Instance, r: Instance) -> None:
    """Weights may be others from then on: what came before is not mixed with what comes after."""
    prompts = (prompt(1400 + i, 500) for i in range(60))
    for i, tokens in enumerate(prompts):
        name = next(_names)
        both_at_once(p, r, name, tokens)
        time.sleep(0.01 * (i % 12))
        with contextlib.suppress(RuntimeError):  # it holds the prompt already
            p.reset_prefix_cache(f"{name} reset", running=True)
        assert r.answer(name)["tokens"] == alone.ask(name, tokens)["tokens"]
        assert p.answer(name)["finish"] == "length"
        if "cache was reset at the producer when a part of the prompt had been sent" in r.text():
            return
    raise AssertionError("it was never reset in the middle of one")


def test_other_block_size_is_refused_not_decoded(alone: Instance, p: Instance, start: Start) -> None:
    """CPU_ATTN's blocks of 64 tokens are as long as two of 32, and something else: K is transposed in each."""
    d64 = start("d64", "kv_both", policy="recompute", options=QUICK, block_size=64).wait_ready()
    tokens = prompt(1200, 150)
    params = p.ask(next(_names), tokens, 1, DECODE)["params"]

    answer = d64.ask(next(_names), tokens, params=params)

    assert answer["tokens"] == alone.ask(next(_names), tokens)["tokens"]
    said = d64.text()
    assert "page_tokens: producer 32, decoder 64" in said
    assert "pages of 32 tokens" in said and "pages of 64 tokens" in said


def test_other_secret_is_refused(alone: Instance, p: Instance, start: Start) -> None:
    stranger = start("stranger", "kv_consumer", secret="another", options=QUICK).wait_ready()
    params = p.ask(next(_names), prompt(1210, 90), 1, DECODE)["params"]

    assert stranger.ask(next(_names), prompt(1210, 90), params=params)["finish"] == "error"
    assert "not sealed with our secret" in stranger.text()
