"""Prefilled by one instance of vLLM and decoded by another, prompts give the tokens that one instance gives."""

import itertools
import re
from typing import Any

import pytest

from tests.support.tiny_llama import prompt
from tests.vllm.support import Instance

DECODE: dict[str, Any] = {"do_remote_decode": True}
_names = (f"request-{i}" for i in itertools.count())


def handed_over(p: Instance, d: Instance, tokens: list[int]) -> dict[str, Any]:
    """As a router without ideas does it: first the one, then the other."""
    name = next(_names)
    params = p.ask(name, tokens, 1, DECODE)["params"]
    return d.ask(name, tokens, params=params)


def both_at_once(p: Instance, d: Instance, name: str, tokens: list[int]) -> None:
    d.add(name, tokens, params={"do_remote_prefill": True, "transfer_id": name, "crossrail_instance": p.line})
    p.add(name, tokens, 1, DECODE | {"transfer_id": name})


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 65, 150, 400])
def test_one_after_the_other(alone: Instance, p: Instance, d: Instance, length: int) -> None:
    """Of one block and several, filled and not, of one step of the producer's and of seven."""
    tokens = prompt(length, length)

    answer = handed_over(p, d, tokens)

    assert answer["finish"] == "length"
    assert answer["tokens"] == alone.ask(next(_names), tokens)["tokens"]


def test_many_side_by_side_layer_by_layer(alone: Instance, p: Instance, d: Instance) -> None:
    """Decoders ask first; twice as much as there are blocks on either side, so blocks must come back."""
    prompts = {next(_names): prompt(500 + i, 120 + 7 * i) for i in range(24)}
    for name, tokens in prompts.items():
        both_at_once(p, d, name, tokens)

    answers = {name: d.answer(name) for name in prompts}

    for name, tokens in prompts.items():
        assert answers[name]["tokens"] == alone.ask(name, tokens)["tokens"]
        assert p.answer(name)["finish"] == "length"


def test_known_prefix(alone: Instance, p: Instance, d: Instance) -> None:
    """On both sides: of the second prompt three blocks are known, of the third all but its end."""
    first = prompt(900, 200)
    for tokens in (first, first[:100] + prompt(901, 60), [*first[:199], 7]):
        answer = handed_over(p, d, tokens)
        assert answer["tokens"] == alone.ask(next(_names), tokens)["tokens"]


def test_choices_of_one_request(alone: Instance, p: Instance, d: Instance) -> None:
    """As vLLM makes them of n=3, each with the same parameters; and once more, as a router that tries again."""
    tokens, names = prompt(905, 150), [next(_names) for _ in range(4)]
    params = p.ask(next(_names), tokens, 1, DECODE)["params"]
    expected = alone.ask(next(_names), tokens)["tokens"]

    for name in names[:3]:
        d.add(name, tokens, params=params)
    answers = [d.answer(name)["tokens"] for name in names[:3]]
    answers.append(d.ask(names[3], tokens, params=params)["tokens"])

    assert answers == [expected] * 4
    shared = [name for name in names if re.search(rf"request {name}\S*: its KV was fetched for another", d.text())]
    assert shared == names[1:]


def test_producer_that_generates_too(alone: Instance, p: Instance, d: Instance) -> None:
    """The producer's own tokens land behind the prompt, in the same block."""
    tokens = prompt(910, 70)
    name = next(_names)
    made = p.ask(name, tokens, 5, DECODE)

    answer = d.ask(name, tokens, params=made["params"])

    assert answer["tokens"] == alone.ask(name, tokens)["tokens"]
    assert answer["tokens"][:5] == made["tokens"]


def test_both_roles_in_one_instance(alone: Instance, p: Instance, r: Instance) -> None:
    """One that produces and consumes: from the producer, for itself, and by itself."""
    tokens, other = prompt(920, 90), prompt(921, 130)

    assert handed_over(p, r, tokens)["tokens"] == alone.ask(next(_names), tokens)["tokens"]
    assert handed_over(r, r, other)["tokens"] == alone.ask(next(_names), other)["tokens"]
    assert r.ask(next(_names), tokens)["tokens"] == alone.ask(next(_names), tokens)["tokens"]
