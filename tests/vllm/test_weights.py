"""A live vLLM is updated in place by trainers: then it generates what an instance started with those weights does."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import crossrail as xr
from crossrail.control.wire import EngineWire
from crossrail.integrations.vllm.plugin import PLAIN_VARIABLE
from crossrail.integrations.vllm.weights_trainer import VllmInstance, VllmUpdates
from crossrail.weights import WeightController, WeightMemory, WeightTrainer, messages
from crossrail.weights.inventory.checkpoint import Checkpoint
from crossrail.weights.toy import rows
from tests.support.tiny_llama import prompt
from tests.support.tiny_models import make, quantise
from tests.vllm.conftest import Start
from tests.vllm.support import ROOT, SECRET, Instance, install

TRAINERS = 2
PATIENCE_S = 120.0
CONFIG = {"weight_transfer_config": {"backend": "crossrail"}}
PROMPTS = [prompt(seed, length) for seed, length in ((1, 5), (2, 70), (3, 200))]
_names = (f"weights-{i}" for i in itertools.count())


def with_plugin(installed: dict[str, str], folder: Path, name: str) -> dict[str, str]:
    """A function of tests.vllm.plugins runs in each of the instance's processes too."""
    group = {"vllm.general_plugins": {name: f"tests.vllm.plugins:{name}"}}
    site = install(folder / f"site-{name}", f"tests-{name}", "1", group)
    return installed | {"PYTHONPATH": f"{installed['PYTHONPATH']}:{ROOT}:{site}"}


class Client:
    """VllmClient of an instance in another process."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self.errors: list[str] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._instance.call(next(_names), "init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        self._instance.call(next(_names), "start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            self._instance.call(next(_names), "update_weights", update_info=update_info)
        except RuntimeError as error:
            self.errors.append(str(error))
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._instance.call(next(_names), "finish_weight_update")


def of_expert(name: str) -> tuple[str, int | None]:
    """The stack in which a checkpoint's tensor is one expert, and which; of others the name."""
    found = re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)", name)
    return (found[1] + found[3], int(found[2])) if found else (name, None)


@dataclass
class Trainers:
    """Each with rows of every parameter, as FSDP has them."""

    controller: WeightController
    trainers: list[WeightTrainer]
    shards: list[dict[str, torch.Tensor]]
    closes: list[Any]

    @classmethod
    async def start(
        cls, model: Path, dtype: torch.dtype = torch.float32, checkpoint: Checkpoint | None = None
    ) -> Trainers:
        """checkpoint: they hold its tensors instead, as they lie in its files."""
        closes: list[Any] = []

        def open_box(name: str) -> tuple[xr.Engine, Any]:
            engine = xr.Engine(name, transport="shm")
            wire = EngineWire(engine)
            box = messages.mailbox(wire, SECRET.encode())
            box.start()
            closes.append((box, wire, engine))
            return engine, box

        controller = WeightController(open_box("controller")[1])
        made = cls(controller, [], [], closes)
        weights = safetensors.torch.load_file(model / "model.safetensors")
        for rank in range(TRAINERS):
            engine, box = open_box(f"trainer-{rank}")
            if checkpoint is None:
                memory, shards = rows_of(weights, engine, rank, dtype)
                made.shards.append(shards)
            else:
                memory = checkpoint.memory(engine, rank, TRAINERS)
            trainer = WeightTrainer(box, memory, 16 << 20)
            await trainer.join(controller.address, PATIENCE_S)
            made.trainers.append(trainer)
        return made

    def load(self, model: Path) -> None:
        weights = safetensors.torch.load_file(model / "model.safetensors")
        for rank, shards in enumerate(self.shards):
            for name, tensor in weights.items():
                begin, end = rows(tuple(tensor.shape), rank, TRAINERS)[0]
                shards[name].copy_(tensor[begin:end])

    async def update(self, updates: VllmUpdates, version: int) -> None:
        offered = asyncio.gather(*(trainer.publish(version, PATIENCE_S) for trainer in self.trainers))
        await updates.update(version, PATIENCE_S)
        await offered

    async def close(self) -> None:
        for trainer in self.trainers:
            await trainer.close()
            trainer.memory.close()
        for box, wire, engine in reversed(self.closes):
            await box.close()
            wire.close()
            engine.close()


def rows_of(
    weights: dict[str, torch.Tensor], engine: xr.Engine, rank: int, dtype: torch.dtype
) -> tuple[WeightMemory, dict[str, torch.Tensor]]:
    memory = WeightMemory(engine, "trainer", rank)
    shards = {}
    stacked = Counter(of_expert(name)[0] for name in weights)
    for name, tensor in weights.items():
        box = rows(tuple(tensor.shape), rank, TRAINERS)
        shards[name] = torch.empty([b - a for a, b in box], dtype=dtype)
        full, expert = of_expert(name)
        if expert is None:
            memory.add(full, shards[name], shape=tuple(tensor.shape), box=box, mesh="fsdp")
        else:
            shape = (stacked[full], *tensor.shape)
            memory.add(full, shards[name][None], shape=shape, box=((expert, expert + 1), *box), mesh="fsdp")
    return memory, shards


@pytest.fixture
async def trainers(model: Path) -> AsyncIterator[Trainers]:
    started = await Trainers.start(model)
    yield started
    await started.close()


def tokens_of(instance: Instance) -> list[list[int]]:
    return [instance.ask(next(_names), tokens)["tokens"] for tokens in PROMPTS]


# vLLM's latent attention for AMX, which it prefers, takes no float32, and weight transfer refuses it.
ATTENTION = {"deepseek_v3": {"attention_backend": "CPU_MLA"}}
TENSOR_PARALLEL = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


async def check_updates(
    live: Instance, reference: Instance, ranks: int, one: Path, two: Path, dtype: torch.dtype = torch.float32
) -> None:
    """live was started with the weights of one, reference with those of two. dtype: of trainers."""
    live.wait_ready()
    reference.wait_ready()
    first, wanted = await asyncio.to_thread(tokens_of, live), await asyncio.to_thread(tokens_of, reference)
    assert all(one != two for one, two in zip(first, wanted, strict=True))
    trainers = await Trainers.start(one, dtype)
    try:
        updates = VllmUpdates(trainers.controller, [VllmInstance(Client(live), ranks)])
        await updates.join()
        for version, source, expected in ((1, two, wanted), (2, one, first)):
            trainers.load(source)
            await trainers.update(updates, version)
            live.reset_prefix_cache(next(_names))
            assert await asyncio.to_thread(tokens_of, live) == expected
    finally:
        await trainers.close()


@pytest.mark.parametrize("is_plain", ["0", "1"], ids=["packed", "plain"])
@pytest.mark.parametrize("ranks", [1, 2])
async def test_updated_instance_generates_as_one_started_with_these_weights(
    start: Start, model: Path, other: Path, installed: dict[str, str], ranks: int, is_plain: str
) -> None:
    parallel = TENSOR_PARALLEL if ranks == 2 else {}
    environment = installed | {PLAIN_VARIABLE: is_plain}
    live = start(f"live-{ranks}", None, environment=environment, **CONFIG, **parallel)
    reference = start(f"reference-{ranks}", None, environment=environment, model=other, **parallel)
    await check_updates(live, reference, ranks, model, other)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "deepseek_v3"])
async def test_other_families(start: Start, folder: Path, installed: dict[str, str], family: str, ranks: int) -> None:
    one, two = (make(family, folder / f"{family}-{ranks}-{seed}", seed) for seed in (1, 2))
    engine = ATTENTION.get(family, {}) | (TENSOR_PARALLEL if ranks == 2 else {})
    live = start(f"{family}-live-{ranks}", None, environment=installed, model=one, **CONFIG, **engine)
    reference = start(f"{family}-reference-{ranks}", None, environment=installed, model=two, **engine)
    await check_updates(live, reference, ranks, one, two)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
async def test_experts_that_ranks_divide_between_them(
    start: Start, folder: Path, installed: dict[str, str], family: str
) -> None:
    name = f"{family}-expert-parallel"
    one, two = (make(family, folder / f"{name}-{seed}", seed) for seed in (1, 2))
    environment = with_plugin(installed, folder / name, "local_experts")
    engine = ATTENTION.get(family, {}) | TENSOR_PARALLEL | {"enable_expert_parallel": True}
    live = start(f"{name}-live", None, environment=environment, model=one, **CONFIG, **engine)
    reference = start(f"{name}-reference", None, environment=environment, model=two, **engine)
    await check_updates(live, reference, 2, one, two)


@pytest.mark.parametrize("is_published", [False, True], ids=["from_bfloat16", "from_float8"])
async def test_float8(start: Start, folder: Path, installed: dict[str, str], is_published: bool) -> None:
    name = f"float8-{is_published}"
    one, two = (make("qwen3_moe_blocks", folder / f"{name}-plain-{seed}", seed) for seed in (1, 2))
    of_one, of_two = (quantise(model, folder / f"{name}-{model.name[-1]}") for model in (one, two))
    engine = {"environment": with_plugin(installed, folder / name, "float8"), "dtype": "bfloat16"}
    live = start(f"{name}-live", None, model=of_one, **CONFIG, **engine)
    reference = start(f"{name}-reference", None, model=of_two, **engine)
    if not is_published:
        await check_updates(live, reference, 1, one, two, torch.bfloat16)
        return
    live.wait_ready()
    reference.wait_ready()
    first, wanted = await asyncio.to_thread(tokens_of, live), await asyncio.to_thread(tokens_of, reference)
    assert all(one != two for one, two in zip(first, wanted, strict=True))
    for source, expected in ((of_two, wanted), (of_one, first)):
        checkpoint = Checkpoint(source)
        trainers = await Trainers.start(source, checkpoint=checkpoint)
        updates = VllmUpdates(trainers.controller, [VllmInstance(Client(live))])
        await updates.join()  # the second time it leaves the first controller
        await trainers.update(updates, 1)
        live.reset_prefix_cache(next(_names))
        assert await asyncio.to_thread(tokens_of, live) == expected
        updates.close()
        await trainers.close()
        checkpoint.close()


async def test_failed_update_is_told_and_the_next_heals(
    start: Start, model: Path, trainers: Trainers, installed: dict[str, str]
) -> None:
    live = start("live-failing", None, environment=installed, **CONFIG).wait_ready()
    first = await asyncio.to_thread(tokens_of, live)
    client = Client(live)
    updates = VllmUpdates(trainers.controller, [VllmInstance(client)])
    await updates.join()
    opened = asyncio.Event()
    update = updates.update(1, PATIENCE_S, lambda stage, *_: opened.set() if stage == "write" else None)
    updating = asyncio.ensure_future(update)  # nobody publishes
    await asyncio.wait_for(opened.wait(), PATIENCE_S)
    await trainers.trainers[1].leave()
    with pytest.raises(xr.CrossrailError, match="it left"):
        await updating
    assert re.search("UpdateFailed.*the weights are torn", client.errors[0])
    await trainers.trainers[1].join(trainers.controller.address, PATIENCE_S)
    trainers.load(model)
    await trainers.update(updates, 1)
    live.reset_prefix_cache(next(_names))
    assert await asyncio.to_thread(tokens_of, live) == first
