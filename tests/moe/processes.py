"""Ranks in processes of their own, which can die without us."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.moe.rank import Rank
from tests.support.process import PeerProcess

Others = list[PeerProcess]
Meet = Callable[..., tuple[Rank, Others]]


@contextmanager
def meeting() -> Iterator[Meet]:
    """start(size, engine={}, **config): rank 0, of this process, and the others, which have met; config: AllToAll's."""
    here = Rank()
    others: Others = []

    def start(size: int, engine: dict[str, Any] | None = None, **config: object) -> tuple[Rank, Others]:
        others.extend(PeerProcess(module="tests.moe.rank") for _ in range(size - 1))
        options = engine or {}
        addresses = [here.open_rank("rank-0", options)]
        addresses += [other.call("open_rank", name=f"rank-{i}", engine=options) for i, other in enumerate(others, 1)]
        for other in others:
            other.start("meet", addresses=addresses, **config)
        here.meet(addresses, **config)
        for other in others:
            other.answer()
        return here, others

    yield start
    for other in others:
        other.close()
    here.close_all()


def kill(process: PeerProcess) -> None:
    process.kill()
    process.wait_dead()
