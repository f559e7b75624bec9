"""Tensor parallelism that differs: each rank of the decoder gets its heads from the ranks that have them."""

import pytest

from tests.support.tiny_llama import prompt
from tests.vllm.conftest import Start
from tests.vllm.support import Instance
from tests.vllm.test_tokens import DECODE, both_at_once

TP2 = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_two_ranks_and_one(alone: Instance, p: Instance, d: Instance, start: Start, role: str) -> None:
    two = start(f"two-{role}", role, **TP2).wait_ready()
    producer, decoder = (two, d) if role == "kv_producer" else (p, two)

    for seed, length in ((2000, 33), (2001, 200)):
        after, during, tokens = f"{role}-{seed}-after", f"{role}-{seed}-during", prompt(seed, length)
        params = producer.ask(after, tokens, 1, DECODE)["params"]
        answers = [decoder.ask(after, tokens, params=params)]
        others = prompt(seed + 10, length)
        both_at_once(producer, decoder, during, others)
        answers.append(decoder.answer(during))
        assert [answer["tokens"] for answer in answers] == [
            alone.ask(after, tokens)["tokens"],
            alone.ask(during, others)["tokens"],
        ]
