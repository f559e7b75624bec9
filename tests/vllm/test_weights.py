"""A live vLLM is updated in place by trainers: then it generates what an instance started with those weights does."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tomllib
import torch

import crossrail as xr
from crossrail.control.wire import EngineWire
from crossrail.integrations.vllm.plugin import PLAIN_VARIABLE
from crossrail.integrations.vllm.weights_trainer import VllmInstance, VllmUpdates
from crossrail.weights import WeightController, WeightMemory, WeightTrainer, messages
from crossrail.weights.toy import rows
from tests.support.tiny_llama import make_model, prompt
from tests.vllm.conftest import Start
from tests.vllm.support import ROOT, SECRET, Instance

TRAINERS = 2
PATIENCE_S = 120.0
CONFIG = {"weight_transfer_config": {"backend": "crossrail"}}
PROMPTS = [prompt(seed, length) for seed, length in ((1, 5), (2, 70), (3, 200))]
_names = (f"weights-{i}" for i in itertools.count())


@pytest.fixture(scope="session")
def installed(folder: Path) -> dict[str, str]:
    """The environment of an instance that sees our entry points, as if the wheel was installed there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in named.items()) for group, named in
               project["entry-points"].items()]  # fmt: skip
    info = folder / "site" / f"crossrail-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: crossrail\nVersion: {project['version']}\n")
    (info / "entry_points.txt").write_text("\n".join(entries))
    return {"PYTHONPATH": f"{ROOT / 'src'}:{info.parent}", PLAIN_VARIABLE: "1"}


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


@dataclass
class Trainers:
    """Each with rows of every parameter, as FSDP has them; float32."""

    controller: WeightController
    trainers: list[WeightTrainer]
    shards: list[dict[str, torch.Tensor]]
    closes: list[Any]

    @classmethod
    async def start(cls, model: Path) -> Trainers:
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
            memory = WeightMemory(engine, "trainer", rank)
            shards = {}
            for name, tensor in weights.items():
                box_of = rows(tuple(tensor.shape), rank, TRAINERS)
                shards[name] = torch.empty([b - a for a, b in box_of])
                memory.add(name, shards[name], shape=tuple(tensor.shape), box=box_of, mesh="fsdp")
            trainer = WeightTrainer(box, memory, 16 << 20)
            await trainer.join(controller.address, PATIENCE_S)
            made.trainers.append(trainer)
            made.shards.append(shards)
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


@pytest.fixture(scope="session")
def other(folder: Path) -> Path:
    """The same model with other weights."""
    return make_model(folder / "other", seed=2)


@pytest.fixture
async def trainers(model: Path) -> AsyncIterator[Trainers]:
    started = await Trainers.start(model)
    yield started
    await started.close()


def tokens_of(instance: Instance) -> list[list[int]]:
    return [instance.ask(next(_names), tokens)["tokens"] for tokens in PROMPTS]


@pytest.mark.parametrize("ranks", [1, 2])
async def test_updated_instance_generates_as_one_started_with_these_weights(
    start: Start, model: Path, other: Path, trainers: Trainers, installed: dict[str, str], ranks: int
) -> None:
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"} if ranks == 2 else {}
    live = start(f"live-{ranks}", None, environment=installed, **CONFIG, **parallel)
    reference = start(f"reference-{ranks}", None, environment=installed, model=other, **parallel)
    live.wait_ready()
    reference.wait_ready()
    first, wanted = await asyncio.to_thread(tokens_of, live), await asyncio.to_thread(tokens_of, reference)
    assert all(one != two for one, two in zip(first, wanted, strict=True))
    updates = VllmUpdates(trainers.controller, [VllmInstance(Client(live), ranks)])
    await updates.join()
    for version, source, expected in ((1, other, wanted), (2, model, first)):
        trainers.load(source)
        await trainers.update(updates, version)
        live.reset_prefix_cache(next(_names))
        assert await asyncio.to_thread(tokens_of, live) == expected


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


def test_weights_that_are_repacked_are_refused_by_name(start: Start, installed: dict[str, str]) -> None:
    packed = start("packed", None, environment=installed | {PLAIN_VARIABLE: "0"}, **CONFIG).wait_ready()
    with pytest.raises(RuntimeError, match=rf"proj\.weight is empty.*{PLAIN_VARIABLE}=1"):
        packed.call(next(_names), "init_weight_transfer_engine", init_info={"controller": "00"})
