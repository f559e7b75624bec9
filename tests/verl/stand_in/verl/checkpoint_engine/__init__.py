"""The base class, with the methods that verl calls, and the registry."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Any


class CheckpointEngine(ABC):
    @abstractmethod
    def prepare(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]: ...

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def finalize(self) -> None: ...

    @abstractmethod
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> Any: ...

    @abstractmethod
    def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[Any]: ...


class CheckpointEngineRegistry:
    _registry: dict[str, type[CheckpointEngine]] = {}

    @staticmethod
    def register(backend: str) -> Callable[[type[CheckpointEngine]], type[CheckpointEngine]]:
        def note(cls: type[CheckpointEngine]) -> type[CheckpointEngine]:
            CheckpointEngineRegistry._registry[backend] = cls
            return cls

        return note

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> CheckpointEngine:
        return cls._registry[backend](*args, **kwargs)
