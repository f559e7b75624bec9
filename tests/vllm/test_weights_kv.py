"""Instances that hand KV over, and whose weights are updated meanwhile."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

from crossrail.integrations.vllm.weights_trainer import VllmInstance, VllmUpdates
from tests.support.limits import eventually
from tests.support.tiny_llama import prompt
from tests.vllm.conftest import QUICK, Start
from tests.vllm.support import Instance
from tests.vllm.test_weights import CONFIG, Client, Trainers

_names = (f"weights-kv-{i}" for i in count())


def handed_over(p: Instance, d: Instance, tokens: list[int]) -> dict[str, Any]:
    name = next(_names)
    params = p.ask(name, tokens, 1, {"do_remote_decode": True})["params"]
    answer: dict[str, Any] = d.ask(name, tokens, params=params)
    return answer


def is_reset(instance: Instance) -> bool:
    try:
        instance.reset_prefix_cache(next(_names))
    except RuntimeError:
        return False
    return True


async def test_requests_go_on_and_later_ones_are_of_the_new_weights(
    start: Start, model: Path, other: Path, installed: dict[str, str]
) -> None:
    kv: dict[str, Any] = {"environment": installed, "options": QUICK, **CONFIG}
    p, d = start("weights-p", "kv_producer", **kv), start("weights-d", "kv_consumer", **kv)
    reference = start("weights-reference", None, environment=installed, model=other)
    for instance in (p, d, reference):
        instance.wait_ready()
    trainers = await Trainers.start(model)
    try:
        updates = VllmUpdates(trainers.controller, [VllmInstance(Client(p), 1), VllmInstance(Client(d), 1)])
        await updates.join()
        trainers.load(other)
        p.ask(next(_names), prompt(40, 100), 1, {"do_remote_decode": True})  # held, for nobody
        under_way = [asyncio.to_thread(handed_over, p, d, prompt(i, 150)) for i in range(8)]
        handed, _ = await asyncio.gather(asyncio.gather(*under_way), trainers.update(updates, 1))
        assert [answer["finish"] for answer in handed] == ["length"] * 8

        for instance in (p, d):  # which a producer cannot while it holds prompts
            await asyncio.to_thread(eventually, lambda i=instance: is_reset(i), "its prefix cache is reset", 60.0, 0.2)
        for i in range(8):
            answer = await asyncio.to_thread(handed_over, p, d, prompt(i, 150))
            assert answer["tokens"] == reference.ask(next(_names), prompt(i, 150))["tokens"]
    finally:
        await trainers.close()
