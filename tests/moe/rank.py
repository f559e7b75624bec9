"""One rank in a process of its own: `python -m tests.moe.rank`, driven like tests.support.peer. See Rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

import crossrail as xr
from crossrail.moe import AllToAll, Dispatched, EngineGroup, Round
from crossrail.moe.rounds import Stage
from tests.moe.batches import Array, Batch, draw, expected_sums, expert_of_row, outputs, ranks_of
from tests.moe.test_rounds import check_dispatched, first_expert
from tests.support.limits import WAIT_S
from tests.support.node import Node
from tests.support.peer import serve

HIDDEN, EXPERTS, TOP_K, TOKENS, BLOCK = 32, 6, 2, 8, 16
CONFIG = {"experts": EXPERTS, "hidden": HIDDEN, "top_k": TOP_K, "max_tokens": TOKENS, "scale_block": BLOCK,
          "out_dtype": "float32"}  # fmt: skip
_FOLLOWS = {"dispatch_recv": Stage.SENT, "combine_send": Stage.RECEIVED, "combine_recv": Stage.RETURNED}


def batch_of(rank: int, number: int, tokens: int = TOKENS) -> Batch:
    """What that rank sends in that round, or its first tokens."""
    batch = draw(np.random.default_rng([rank, number]), TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK)
    return Batch(batch.x[:tokens], batch.scales[:tokens], batch.indices[:tokens], batch.weights[:tokens])


class Rank(Node):
    """An AllToAll whose halves are commands. What it sends follows from its rank and the number of the round."""

    _group: EngineGroup
    _part: AllToAll

    def __init__(self) -> None:
        super().__init__()
        self._batch: dict[int, Batch] = {}
        self._opened: dict[int, Round] = {}
        self._got: dict[int, Dispatched] = {}
        self._sums: dict[int, Array] = {}
        self._next_round = 1

    def open_rank(self, name: str, engine: dict[str, object]) -> str:
        self.engine = xr.Engine(name, **engine)
        return self.engine.address.to_bytes().hex()

    def meet(self, addresses: list[str], **config: object) -> None:
        self._group = EngineGroup(self.engine, [bytes.fromhex(address) for address in addresses])
        self._part = AllToAll(self.engine, self._group, **(CONFIG | {"timeout_s": WAIT_S} | config))

    def give_up_after(self, timeout_s: float) -> None:
        self._part.timeout_s = timeout_s

    def dispatch_send(self) -> int:
        number, self._next_round = self._next_round, self._next_round + 1
        batch = self._batch[number] = batch_of(self._part.rank, number)
        self._opened[number] = self._part.dispatch_send(batch.x, batch.scales, batch.indices, batch.weights)
        return number

    def dispatch_recv(self, number: int) -> None:
        self._got[number] = self._part.dispatch_recv(self._opened[number])

    def combine_send(self, number: int) -> None:
        got = self._got[number]
        experts = expert_of_row(got.counts, got.offsets, first_expert(self._part), got.rows)
        self._part.combine_send(outputs(got.x, experts), got)

    def combine_recv(self, number: int) -> bool:
        """Whether the sums are what they should be."""
        self._sums[number] = self._part.combine_recv(self._opened[number])
        return np.array_equal(self._sums[number], expected_sums(self._batch[number]))

    def whole_round(self) -> bool:
        number = self.dispatch_send()
        self.dispatch_recv(number)
        self.combine_send(number)
        return self.combine_recv(number)

    def finish_without(self, number: int, silent: list[int], masked: list[int]) -> None:
        """The rest of that round, from where it stands. It has to be as if the silent ranks had sent no token, and
        nobody a token to an expert of the masked ranks.
        """
        assert self.finish_agreed(number) == [sorted(silent), sorted(masked)]

    def finish_agreed(self, number: int) -> list[list[int]]:
        """The rest of that round, from where it stands; what this rank says of it: whose tokens are not in it, and
        whose experts' outputs are not. It has to be as if those had sent none, and nobody a token to these.
        """
        if number not in self._opened:
            self.dispatch_send()
        opened, config = self._opened[number], self._part.config
        if opened.stage is Stage.SENT:
            self.dispatch_recv(number)
            batches = [batch_of(rank, number, 0 if rank in opened.silent else TOKENS) for rank in range(config.world)]
            check_dispatched(self._got[number], batches, first_expert(self._part), config.padding)
        if opened.stage is Stage.RECEIVED:
            self.combine_send(number)
        if opened.stage is Stage.RETURNED:
            self.combine_recv(number)
        batch = self._batch[number]
        kept = np.where(np.isin(ranks_of(config.experts_per_rank, batch.indices), opened.absent), -1, batch.indices)
        assert np.array_equal(self._sums[number], expected_sums(replace(batch, indices=kept)))
        return [list(opened.silent), list(opened.absent)]

    def masked(self) -> list[int]:
        return list(self._part.masked)

    def go_on(self, number: int) -> None:
        """The rest of that round, from where it stands, and another one. After an error it may be called again."""
        for each in (number, number + 1):
            if each not in self._opened:
                self.dispatch_send()
            for half in (self.dispatch_recv, self.combine_send, self.combine_recv):
                if _FOLLOWS[half.__name__] is self._opened[each].stage:
                    half(each)

    def fail_in(self, half: str, number: int) -> str:
        """That round up to this half, which is called with arguments that are refused; how."""
        if half != "dispatch_send" and number not in self._opened:
            self.dispatch_send()
        for before in ("dispatch_recv", "combine_send"):
            if half not in ("dispatch_send", before) and _FOLLOWS[before] is self._opened[number].stage:
                getattr(self, before)(number)
        bad: dict[str, Callable[[], object]] = {
            "dispatch_send": lambda: self._part.dispatch_send(batch_of(0, 1).x[:, 1:], None, None),
            "dispatch_recv": lambda: self._part.dispatch_recv(None),  # type: ignore[arg-type]
            "combine_send": lambda: self._part.combine_send(np.zeros((99, HIDDEN), np.float32), self._got[number]),
            "combine_recv": lambda: self._part.combine_recv(self._got[number], np.ones((1, 1), np.float32)),
        }
        try:
            bad[half]()
        except xr.UsageError as error:
            return f"its {half} failed: UsageError: {error}"
        raise AssertionError("it was not refused")

    def close_part(self) -> None:
        self._part.close()

    def close_rank_engine(self) -> None:
        self.engine.close()

    def close_all(self) -> None:
        for name in ("_part", "_group", "engine"):
            if hasattr(self, name):
                getattr(self, name).close()


def main() -> None:
    serve(Rank())


if __name__ == "__main__":
    main()
