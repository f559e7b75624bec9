"""Ranks of this process: an engine, a group and an AllToAll each, run on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import crossrail as xr
from crossrail.moe import AllToAll, EngineGroup
from tests.support.limits import WAIT_S

T = TypeVar("T")


def run_ranks(size: int, run: Callable[[int], T]) -> list[T]:
    """run(rank) on a thread for each; their results, or the first error of all."""
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def call(rank: int) -> None:
        try:
            results[rank] = run(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * WAIT_S)
        assert not thread.is_alive(), f"{thread.name} hangs"
    if errors:
        raise errors[0]
    return results


class Ranks:
    """Some ranks and their AllToAll, or what `make` makes. engine: options of all, or of each. Owner: close() ends all,
    engines too.
    """

    def __init__(
        self,
        size: int,
        engine: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        make: Callable[..., Any] = AllToAll,
        **config: Any,
    ) -> None:
        options_of = [engine or {}] * size if engine is None or isinstance(engine, dict) else engine
        self.engines = [xr.Engine(f"rank-{rank}", **options_of[rank]) for rank in range(size)]
        self.groups: list[EngineGroup] = []
        self.parts: list[Any] = []
        try:
            addresses = [engine.address for engine in self.engines]
            self.groups = [EngineGroup(engine, addresses) for engine in self.engines]
            options = {"timeout_s": WAIT_S} | config
            self.parts = run_ranks(size, lambda r: make(self.engines[r], self.groups[r], **options))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self.engines)

    def each(self, run: Callable[[Any, int], T]) -> list[T]:
        """run(a2a, rank) for all ranks at once."""
        return run_ranks(len(self), lambda rank: run(self.parts[rank], rank))

    def close(self) -> None:
        for part in self.parts:
            part.close()
        for group in self.groups:
            group.close()
        for engine in self.engines:
            engine.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def errors_of(ranks: Ranks, run: Callable[[AllToAll, int], object], kind: type[Exception]) -> Sequence[Exception]:
    """What run raises on each rank, which has to be of that kind on all."""

    def caught(part: AllToAll, rank: int) -> Exception:
        try:
            run(part, rank)
        except kind as error:
            return error
        raise AssertionError(f"rank {rank} raised no {kind.__name__}")

    return ranks.each(caught)
