"""What every implementation of GraphKernels does: one set of cases, run by the test module of each.

A rank of three, with another one whose memory of rows it reaches, and one that it does not. Rows are random bytes, sums
of whole numbers; oracles are loops over definitions. Imports torch, so it is for test_torch_*.py and test_triton_*.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from crossrail.moe.config import Config
from crossrail.moe.graph.board import GraphBoard
from crossrail.moe.graph.kernels import GraphKernels, Own, Routes
from crossrail.moe.graph.memory import GraphMemory, Rows
from crossrail.moe.links.far_memory import FarMemory
from crossrail.moe.meeting import make_layout
from crossrail.moe.nodes import nodes_of
from tests.moe.batches import ranks_of, split_at_random
from tests.support.seeds import Seed

Bytes = npt.NDArray[np.uint8]

WORLD, RANK, REACHED = 3, 1, 2
EXPERTS, TOP_K, TOKENS = 7, 2, 6
INDEX_MAX = (1 << 31) - 1
_MARK = 0xEE  # what nobody has written


class GraphSubject(NamedTuple):
    """An implementation, and the device that its tensors are on."""

    kernels: GraphKernels
    device: str


class Stage:
    """One rank's memory and board, in which nothing is written yet. number: of the round; -1: the rounds have ended."""

    def __init__(
        self, subject: GraphSubject, number: int, hidden: int = 24, block: int | None = 8,
        split: tuple[int, ...] | None = None, dp_size: int = 1,
    ) -> None:  # fmt: skip
        self.subject, self.number, self.parity = subject, number, number % 2
        self.config = config = Config(
            world=WORLD if dp_size == 1 else 2 * dp_size, experts=EXPERTS, experts_per_rank=split, hidden=hidden,
            top_k=TOP_K, max_tokens=TOKENS, dtype="float8_e4m3fn", scale_block=block, out_dtype="float32",
            private_tokens=2, padding=1, layout="grouped", node_size=1, dp_size=dp_size, capacity_factor=None,
            on_lost="raise",
        )  # fmt: skip
        layout = make_layout(config, nodes_of(config.world, 1))
        count = layout.expert_count(RANK)
        self.own = Own.of(config.split, RANK, dp_size, subject.device)
        memory = FarMemory.of(config, layout)
        reached = [REACHED] if dp_size == 1 else [REACHED, RANK + dp_size]

        def marked() -> Any:
            return torch.full((memory.rows.nbytes,), _MARK, dtype=torch.uint8, device=subject.device)

        far: Any = SimpleNamespace(
            memory=memory, rows_bytes=marked(), reached={other: marked() for other in reached},
            private_rows=memory.bounds.private_rows,
            slot_at=lambda other: layout.far_index(RANK // dp_size, other) * memory.bounds.private_rows,
        )  # fmt: skip
        self.memory = GraphMemory(config, far, RANK, torch.device(subject.device))
        for rows in (self.memory.own_rows, self.memory.own_results):
            rows.first.fill_(_MARK)
        self.board = GraphBoard(config, count, torch.device(subject.device))

    @property
    def counter(self) -> Any:
        """What kernels read of the round's number, on the device."""
        return self.put(np.array([self.number], np.int64))

    def put(self, array: Any) -> Any:
        return torch.from_numpy(np.array(array)).to(self.subject.device)

    def bytes_of(self, rows: Rows, parity: int | None = None) -> Bytes:
        found: Bytes = rows.typed(self.parity if parity is None else parity, "uint8").cpu().numpy()
        return found

    def routes(self, kept: Any) -> Routes:
        tokens = len(kept)
        shapes: list[tuple[int, ...]] = [(tokens, TOP_K, 2), (EXPERTS,), (tokens, TOP_K)]
        return Routes(self.put(kept), *(self.put(np.full(shape, -7, np.int32)) for shape in shapes))

    def tell(self, name: str, values: Any) -> None:
        """As the thread that posts does."""
        begin = self.parity * self.board.stride
        flat = np.asarray(values, np.int32).ravel()
        getattr(self.board.tables, name)[begin : begin + len(flat)] = torch.from_numpy(flat.copy())


def _rows(rng: np.random.Generator, config: Config, count: int) -> tuple[Bytes, Any]:
    x = rng.integers(0, 256, (count, config.hidden), np.uint8)
    scales = rng.integers(1, 99, (count, config.blocks)).astype(np.float32) if config.blocks else None
    return x, scales


def _packed(x: Bytes, scales: Any, token: int) -> bytes:
    return x[token].tobytes() + (b"" if scales is None else scales[token].tobytes())


ROUNDS = [5, 6]  # one of each parity


class GraphKernelsContract:
    # ---- share

    @pytest.mark.parametrize("number", ROUNDS)
    @pytest.mark.parametrize("dtype", [np.int32, np.int64])
    @pytest.mark.parametrize("given", [None, -3, 0, 2, 4, 99])
    def test_routes_are_shared_as_far_as_there_are_tokens(
        self, graph_subject: GraphSubject, number: int, dtype: type, given: int | None, seed: Seed
    ) -> None:
        stage = Stage(graph_subject, number)
        stage.board.routes.fill_(-9)
        indices = seed.rng().integers(-1, EXPERTS, (4, TOP_K)).astype(dtype)
        kept = stage.put(np.full((4, TOP_K), -7, np.int32))
        tokens = None if given is None else stage.put(np.array([given], np.int64))
        graph_subject.kernels.share(stage.board, kept, stage.put(indices), tokens, stage.counter)
        wanted = indices.astype(np.int32)
        wanted[4 if given is None else max(given, 0) :] = -1
        assert np.array_equal(kept.cpu().numpy(), wanted)
        begin = stage.parity * stage.board.stride
        shared = stage.board.routes[begin : begin + stage.board.routes_max].cpu().numpy()
        assert shared.tolist() == [*wanted.ravel(), *[-1] * (stage.board.routes_max - wanted.size)]
        other = (1 - stage.parity) * stage.board.stride
        assert set(stage.board.routes[other : other + stage.board.routes_max].tolist()) == {-9}

    def test_an_index_beyond_32_bits_is_told_as_the_largest(self, graph_subject: GraphSubject) -> None:
        stage = Stage(graph_subject, 2)
        indices = np.array([[1, (1 << 32) + 3], [-1, -(1 << 32) - 1], [EXPERTS, -5]])
        kept = stage.put(np.zeros((3, TOP_K), np.int32))
        graph_subject.kernels.share(stage.board, kept, stage.put(indices), None, stage.counter)
        assert kept.tolist() == [[1, INDEX_MAX], [-1, INDEX_MAX], [EXPERTS, -5]]

    # ---- send

    @pytest.mark.parametrize(("hidden", "block"), [(24, 8), (13, 5), (16, None)])
    @pytest.mark.parametrize("number", ROUNDS)
    @pytest.mark.parametrize("routing", ["any", "one expert", "own", "none", "out of range"])
    @pytest.mark.parametrize("split", [None, (1, 4, 2), (0, 2, 5), (7, 0, 0)], ids=str)
    def test_rows_go_where_their_experts_are(
        self, graph_subject: GraphSubject, split: tuple[int, ...] | None, routing: str, number: int, hidden: int,
        block: int | None, seed: Seed,
    ) -> None:  # fmt: skip
        rng, stage = seed.rng(), Stage(graph_subject, number, hidden, block, split)
        assert (stage.own.per_rank is None) == (split is not None)
        kept = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).astype(np.int32)
        if routing == "any":
            kept[rng.random(kept.shape) < 0.2] = -1
        elif routing == "out of range":
            kept[::2, 0], kept[1::2, 1] = EXPERTS, INDEX_MAX
        elif routing != "none":
            own = stage.own.first if stage.own.end > stage.own.first else -1
            kept[:, 0], kept[:, 1] = (EXPERTS - 1, -1) if routing == "one expert" else (own, -1)
        else:
            kept[:] = -1
        x, scales = _rows(rng, stage.config, TOKENS)
        routes = stage.routes(kept)
        given = None if scales is None else stage.put(scales)
        graph_subject.kernels.send(stage.memory, stage.own, stage.put(x), given, routes, stage.counter)

        order = sorted((expert, token, k) for (token, k), expert in np.ndenumerate(kept) if 0 <= expert < EXPERTS)
        wanted = np.full((TOKENS, TOP_K, 2), -1)
        sent: dict[tuple[int, int], bytes] = {}  # by target, WORLD for rows_out, and row
        of_rank = dict.fromkeys(range(WORLD), 0)
        packed = 0
        for position, (expert, token, k) in enumerate(order):
            rank = int(ranks_of(split or (3, 3, 1), np.array(expert)))
            row, of_rank[rank] = of_rank[rank], of_rank[rank] + 1
            target = stage.memory.row_targets.rows[rank]
            fits = target is not None and row < target.count
            sent[(rank, row) if fits else (WORLD, packed)] = _packed(x, scales, token)
            packed += rank != RANK
            wanted[token, k] = (2 * stage.parity, row) if rank == RANK else (2 * stage.parity + 1, position)
        assert np.array_equal(routes.where.cpu().numpy(), wanted)
        _check_written(stage, [*stage.memory.row_targets.rows, stage.memory.rows_out], sent, stage.config.x_row_bytes)

    @pytest.mark.parametrize("number", ROUNDS)
    @pytest.mark.parametrize("dp_size", [2, 3])
    @pytest.mark.parametrize("is_even", [True, False])
    def test_rows_go_to_ranks_of_the_same_index_alone(
        self, graph_subject: GraphSubject, is_even: bool, dp_size: int, number: int, seed: Seed
    ) -> None:
        rng, world = seed.rng(), 2 * dp_size
        split = None if is_even else tuple(split_at_random(rng, EXPERTS, world))
        stage = Stage(graph_subject, number, split=split, dp_size=dp_size)
        kept = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).astype(np.int32)
        kept[rng.random(kept.shape) < 0.1] = -1
        x, scales = _rows(rng, stage.config, TOKENS)
        routes = stage.routes(kept)
        graph_subject.kernels.send(stage.memory, stage.own, stage.put(x), stage.put(scales), routes, stage.counter)

        wanted = np.full((TOKENS, TOP_K, 2), -1)
        sent: dict[tuple[int, int], bytes] = {}  # by target, `world` for rows_out, and row
        of_rank = dict.fromkeys(range(world), 0)
        packed = 0
        order = sorted((expert, token, k) for (token, k), expert in np.ndenumerate(kept) if expert >= 0)
        for position, (expert, token, k) in enumerate(order):
            rank = int(ranks_of(stage.config.experts_per_rank or (), np.array(expert)))
            row, of_rank[rank] = of_rank[rank], of_rank[rank] + 1
            wanted[token, k] = (2 * stage.parity, row) if rank == RANK else (2 * stage.parity + 1, position)
            if rank % dp_size != RANK % dp_size:
                assert stage.memory.row_targets.rows[rank] is None
                continue
            target = stage.memory.row_targets.rows[rank]
            fits = target is not None and row < target.count
            sent[(rank, row) if fits else (world, packed)] = _packed(x, scales, token)
            packed += rank != RANK
        assert np.array_equal(routes.where.cpu().numpy(), wanted)
        _check_written(stage, [*stage.memory.row_targets.rows, stage.memory.rows_out], sent, stage.config.x_row_bytes)

    def test_nothing_is_sent_once_the_rounds_have_ended(self, graph_subject: GraphSubject, seed: Seed) -> None:
        stage = Stage(graph_subject, -1)
        x, scales = _rows(seed.rng(), stage.config, TOKENS)
        routes = stage.routes(np.tile(np.array([0, EXPERTS - 1], np.int32), (TOKENS, 1)))
        graph_subject.kernels.send(stage.memory, stage.own, stage.put(x), stage.put(scales), routes, stage.counter)
        assert set(routes.where.flatten().tolist()) == {-1}
        _check_written(stage, [*stage.memory.row_targets.rows, stage.memory.rows_out], {}, stage.config.x_row_bytes)

    def test_a_dispatch_of_no_tokens_sends_nothing(self, graph_subject: GraphSubject) -> None:
        stage = Stage(graph_subject, 5)
        x, scales = _rows(np.random.default_rng(0), stage.config, 0)
        routes = stage.routes(np.zeros((0, TOP_K), np.int32))
        graph_subject.kernels.send(stage.memory, stage.own, stage.put(x), stage.put(scales), routes, stage.counter)
        _check_written(stage, [*stage.memory.row_targets.rows, stage.memory.rows_out], {}, stage.config.x_row_bytes)

    # ---- take and give

    @pytest.mark.parametrize(("hidden", "block"), [(24, 8), (13, 5), (16, None)])
    @pytest.mark.parametrize("number", ROUNDS)
    def test_rows_are_taken_and_results_given_as_the_tables_say(
        self, graph_subject: GraphSubject, number: int, hidden: int, block: int | None, seed: Seed
    ) -> None:
        rng, stage = seed.rng(), Stage(graph_subject, number, hidden, block)
        config, memory, own = stage.config, stage.memory, stage.own
        for rows in (memory.rows_in, memory.own_rows):
            values = stage.put(rng.integers(0, 256, (rows.count, rows.width), np.uint8))
            rows.typed(stage.parity, "uint8")[:] = values
        room = 20
        places = rng.permutation(room)[:9]
        far, near = rng.permutation(memory.rows_in.count)[:5], rng.permutation(memory.own_rows.count)[:4]
        sources = [*far, *(-1 - row for row in near)]
        moves = list(zip(sources, places, strict=True))
        # The last one is to a rank that is not reached: nowhere.
        returns = [(places[0], RANK, 0), (places[1], REACHED, 1), (places[2], WORLD, 2), (places[3], 0, 1)]
        count = own.end - own.first
        stage.tell("numbers", [len(moves), len(returns)])
        stage.tell("moves", moves)
        stage.tell("returns", returns)
        stage.tell("expert_rows", range(1, count + 1))
        stage.tell("expert_offsets", range(10, 11 + count))
        x, scales = stage.put(np.full((room, hidden), _MARK, np.uint8)), None
        if block is not None:
            scales = stage.put(np.full((room, config.blocks), -1, np.float32))
        counts, offsets = stage.put(np.full(count, -7, np.int32)), stage.put(np.full(count + 1, -7, np.int32))
        graph_subject.kernels.take(memory, stage.board, x, scales, counts, offsets, stage.counter)

        came = {int(to): stage.bytes_of(memory.rows_in)[row] for row, to in zip(far, places[:5], strict=True)}
        came |= {int(to): stage.bytes_of(memory.own_rows)[row] for row, to in zip(near, places[5:], strict=True)}
        for to in range(room):
            row = came.get(to)
            wanted_x = np.full(hidden, _MARK) if row is None else row[:hidden]
            assert np.array_equal(x[to].cpu().numpy(), wanted_x)
            if scales is not None:
                unset = np.full(config.blocks, -1, np.float32).tobytes()
                wanted = unset if row is None else row[hidden : config.x_row_bytes].tobytes()
                assert scales[to].cpu().numpy().tobytes() == wanted
        assert counts.tolist() == list(range(1, count + 1)) and offsets.tolist() == list(range(10, 11 + count))

        y = rng.integers(-99, 99, (room, hidden)).astype(np.float32)
        graph_subject.kernels.give(memory, stage.board, stage.put(y), stage.counter)
        given = {(target, row): y[place].tobytes() for place, target, row in returns if target != 0}
        _check_written(stage, memory.result_targets.rows, given, config.y_bytes)

    def test_nothing_is_taken_or_given_once_the_rounds_have_ended(self, graph_subject: GraphSubject) -> None:
        stage = Stage(graph_subject, -1)
        stage.tell("numbers", [1, 1])
        stage.tell("moves", [0, 0])
        stage.tell("returns", [0, RANK, 0])
        x, scales = stage.put(np.full((3, 24), _MARK, np.uint8)), stage.put(np.full((3, 3), -1, np.float32))
        count = stage.own.end - stage.own.first
        counts, offsets = stage.put(np.full(count, -7, np.int32)), stage.put(np.full(count + 1, -7, np.int32))
        graph_subject.kernels.take(stage.memory, stage.board, x, scales, counts, offsets, stage.counter)
        graph_subject.kernels.give(stage.memory, stage.board, stage.put(np.ones((3, 24), np.float32)), stage.counter)
        assert bool((x == _MARK).all()) and bool((scales == -1).all())
        assert counts.tolist() == [0] * count and offsets.tolist() == [0] * (count + 1)
        _check_written(stage, stage.memory.result_targets.rows, {}, stage.config.y_bytes)

    # ---- sum

    @pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("accumulate", [False, True])
    def test_sums_are_exact_and_nan_once_the_rounds_have_ended(
        self, graph_subject: GraphSubject, accumulate: bool, out_dtype: str, seed: Seed
    ) -> None:
        rng, stage = seed.rng(), Stage(graph_subject, 5)
        sources = stage.memory.sources
        for source in sources:
            source[:] = stage.put(rng.integers(0, 8, tuple(source.shape)).astype(np.float32))
        where = np.stack(
            [rng.integers(0, len(sources), (TOKENS, TOP_K)), rng.integers(-1, 4, (TOKENS, TOP_K))], axis=-1
        ).astype(np.int32)
        weights = rng.integers(0, 4, (TOKENS, TOP_K)).astype(np.float32)
        before = rng.integers(0, 8, (TOKENS, 24)).astype(np.float32)
        out = stage.put(before).to(getattr(torch, out_dtype))
        graph_subject.kernels.sum(stage.memory, out, stage.put(where), stage.put(weights), accumulate, stage.counter)
        wanted = before if accumulate else np.zeros_like(before)
        for token, k in np.ndindex(TOKENS, TOP_K):
            source, row = where[token, k]
            if row >= 0:
                wanted[token] += weights[token, k] * sources[source][row].cpu().numpy()
        assert np.array_equal(out.float().cpu().numpy(), wanted)
        ended = stage.put(np.array([-1]))
        graph_subject.kernels.sum(stage.memory, out, stage.put(where), stage.put(weights), accumulate, ended)
        assert bool(out.isnan().all())


def _check_written(stage: Stage, targets: Any, rows: dict[tuple[int, int], bytes], nbytes: int) -> None:
    """These rows, by target and row, begin with these bytes; no other one was touched, nor any of the other parity."""
    for number, target in enumerate(targets):
        if target is None:
            continue
        found = stage.bytes_of(target)
        for row in range(target.count):
            wanted = rows.get((number, row))
            if wanted is None:
                assert (found[row] == _MARK).all(), f"row {row} of target {number} was written"
            else:
                assert found[row][:nbytes].tobytes() == wanted, f"row {row} of target {number}"
        assert (stage.bytes_of(target, 1 - stage.parity) == _MARK).all(), "the other parity was written"
    assert {target for target, _ in rows} <= {number for number, one in enumerate(targets) if one is not None}
