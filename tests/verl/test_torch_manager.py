"""verl's own controller and workers, over Ray on CPUs: an update as verl makes it, by its configuration alone."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

from tests.support.limits import WAIT_S
from tests.verl.conftest import SECRET

CONFIG = CheckpointEngineConfig(
    backend="crossrail",
    update_weights_bucket_megabytes=1,
    engine_kwargs={"crossrail": {"transport": "shm", "device": "cpu", "timeout_s": WAIT_S}},
    custom_backend_module="crossrail.integrations.verl",
)


def weights_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"layers.{i}": torch.randn(64 + i, 1024, generator=generator) for i in range(20)}


class Trainer(Worker):
    """What verl's actor worker does about checkpoint engines."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        import_external_libs(config.custom_backend_module)
        bucket_bytes = config.update_weights_bucket_megabytes << 20
        options = config.engine_kwargs[config.backend]
        self.checkpoint_engine = CheckpointEngineRegistry.new(config.backend, bucket_size=bucket_bytes, **options)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str = "auto") -> Any:
        return await self.checkpoint_engine.send_weights(iter(weights_of(global_steps).items()), global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Adapter:
    """In the place of vLLM's or SGLang's."""

    def __init__(self) -> None:
        self.came: dict[str, torch.Tensor] = {}

    async def update_weights(self, weights: Any, **_: Any) -> None:
        self.came = {name: weight.clone() async for name, weight in weights}


class Rollout(CheckpointEngineWorker):
    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config, None, Adapter())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def came(self) -> dict[str, torch.Tensor]:
        return dict(self.server_adapter.came)


class Replica:
    """Of the rollout; what the manager asks of it before and after."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    def __getattr__(self, name: str) -> Any:
        async def nothing(**_: Any) -> None: ...

        return nothing


@pytest.fixture
def nothing_leaks() -> None:
    """Ray keeps what it opened in this process; ours is in its workers."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    paths = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    environment = {"CROSSRAIL_SECRET": SECRET, "PYTHONPATH": paths}
    # verl asks for ten processors for each worker.
    ray.init(num_cpus=128, include_dashboard=False, runtime_env={"env_vars": environment})
    yield
    ray.shutdown()


def group(cls: type, count: int, **arguments: Any) -> Any:
    pool = RayResourcePool([count], use_gpu=False)
    return RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(cls), **arguments), device_name="cpu")


@pytest.mark.parametrize(("trainers", "rollouts"), [(2, 2), (2, 1), (1, 2)])
def test_update_by_configuration(cluster: None, trainers: int, rollouts: int) -> None:
    rollout_config = RolloutConfig(name="vllm", checkpoint_engine=CONFIG)
    actors = group(Trainer, trainers, config=CONFIG)
    rollout = group(Rollout, rollouts, config=rollout_config)
    manager = CheckpointEngineManager(CONFIG, actors, [Replica([worker]) for worker in rollout.workers])
    for step in (1, 2):
        metrics = manager.update_weights(global_steps=step)
        assert metrics["crossrail/sent_bytes"] > 0
        for came in rollout.came():
            assert list(came) == list(weights_of(step))
            for name, weight in weights_of(step).items():
                assert torch.equal(came[name], weight.to(torch.bfloat16)), name
