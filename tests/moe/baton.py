"""Ranks of one simulated world that meet one after another: only one thread runs at a time, so a seed replays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_PATIENCE_S = 60.0


class Baton:
    """Who has it runs: rank 0 until it waits for the others, then rank 1, and so on, and round again."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._turn = 0
        self._passed = threading.Condition()
        self._ended = [False] * size

    def pass_on(self, rank: int) -> None:
        """To the next rank that has not ended."""
        with self._passed:
            others = [(rank + step) % self.size for step in range(1, self.size + 1)]
            self._turn = next((one for one in others if not self._ended[one]), -1)
            self._passed.notify_all()

    def wait(self, rank: int) -> None:
        """Until it comes."""
        with self._passed:
            assert self._passed.wait_for(lambda: self._turn == rank, _PATIENCE_S), f"rank {rank} never got its turn"

    def end(self, rank: int) -> None:
        """It runs no more."""
        self._ended[rank] = True
        self.pass_on(rank)


class BatonGroup:
    """A crossrail.moe.Group of threads of this process."""

    def __init__(self, rank: int, baton: Baton, given: dict[tuple[int, int], bytes]) -> None:
        self.rank = rank
        self.size = baton.size
        self._baton = baton
        self._given = given
        self._exchange = 0

    def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        """As of Group."""
        del timeout_s
        exchange, self._exchange = self._exchange, self._exchange + 1
        self._given[exchange, self.rank] = data
        self._baton.pass_on(self.rank)
        self._baton.wait(self.rank)
        return [self._given[exchange, rank] for rank in range(self.size)]


def meet(size: int, make: Callable[[BatonGroup], T]) -> list[T]:
    """make(group) of each rank; their results, or the first error."""
    baton, given = Baton(size), {}
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        baton.wait(rank)
        try:
            results[rank] = make(BatonGroup(rank, baton, given))
        except BaseException as error:
            errors.append(error)
        finally:
            baton.end(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _PATIENCE_S)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
