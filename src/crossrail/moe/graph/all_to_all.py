"""Expert parallelism whose steps are kernels on a stream: see GraphAllToAll."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import crossrail as xr
from crossrail import _core
from crossrail._extras import needs
from crossrail._options import check_seconds
from crossrail._torch import is_tensor, told, wait_for_kernels
from crossrail.errors import CrossrailError, EngineClosed, UsageError
from crossrail.moe.arrays import check_tensor, tensor_on, to_count
from crossrail.moe.board import BoardLayout
from crossrail.moe.config import OUT_DTYPES, Config
from crossrail.moe.device_rows import DeviceRows
from crossrail.moe.far import Far
from crossrail.moe.graph.board import GraphBoard
from crossrail.moe.graph.failures import found_failure
from crossrail.moe.graph.kernels import GraphKernels, Own, Routes
from crossrail.moe.graph.memory import GraphMemory
from crossrail.moe.graph.reference import ReferenceGraphKernels
from crossrail.moe.graph.rounds import GraphDispatched, GraphRound
from crossrail.moe.graph.signals import Signals
from crossrail.moe.group import Group
from crossrail.moe.peers import Peers
from crossrail.moe.rounds import Stage
from crossrail.moe.row_memory import INDEX_TYPES, is_gpu, row_memory
from crossrail.moe.tokens import scales_given

with needs(__name__, "'crossrail[torch]'"):
    import torch

_OPEN_MAX = 2


class GraphAllToAll:
    """An AllToAll whose halves only launch kernels on the current stream: a CUDA graph can capture all four.

    No half waits for the GPU, or needs to know what is in a tensor. What other ranks have to do with a round is seen to
    by a thread, which reads from pinned memory how far the GPU is, posts, and lets kernels go on. Its rounds are those
    of AllToAll: ranks of both may be in one group, if those set node_size=1, on_lost="raise" and the same arguments,
    private_tokens among them.

    A replay of a graph is the rounds that were captured, each with a number of its own. All ranks begin rounds in the
    same order; where a rank has two open at once, on two streams, the caller orders their dispatch_sends by events.
    Of what is captured, every round is to end in the same graph, or in one that is replayed with it.

    Arguments are those of AllToAll, but for these. device: whose tensors all arguments and results are, as "cuda:0";
    None: the host, where each half waits in its call: to try it, and for tests. layout: "masked" by default.
    private_tokens: rows for which each rank has room before counts are known; None: all that can come, so that nothing
    is sent later, behind kernels that wait.
    peer_access: kernels write rows and results to other ranks on this host by themselves, where their memory can be
    mapped: explain() says whose. False: all go by the engine; each rank decides for what it sends.
    proxy_cpu: the core of the thread, which it then keeps busy; None: wherever this process may run, with short sleeps.
    kernels: None: Triton's on a GPU, torch's own operations in host memory.
    Not there: on_lost="mask", node_sums, dp_size above 1. Refused: engines with polling="manual".

    Errors of other ranks come late: kernels then do nothing, sums are NaN throughout, and the next call, check() or
    close() raises. After that this object is of no more use. Waits for other ranks end after timeout_s, as an error; so
    does one for the end of a round of our own, whose place a later one takes.

    Threads: one at a time. Owner: engine and group are the caller's. Lifecycle: 1. made, by all ranks at once; kernels
    are compiled then, but for types and alignments that are used first later, of tensors that do not begin at 16 bytes,
    say: one round before a capture. 2. rounds. 3. graphs that have rounds are dropped, then close(), before the engine.

    Raises UsageError if an argument is invalid, or not the same on all ranks; WaitTimeout, PeerLost, EngineClosed.
    """

    def __init__(
        self,
        engine: xr.Engine,
        group: Group,
        *,
        experts: int,
        hidden: int,
        top_k: int,
        max_tokens: int,
        device: Any | None = None,
        dtype: str = "float8_e4m3fn",
        scale_block: int | None = 128,
        out_dtype: str = "bfloat16",
        private_tokens: int | None = None,
        padding: int = 1,
        layout: str = "masked",
        capacity_factor: float | None = None,
        timeout_s: float = 30.0,
        peer_access: bool = True,
        proxy_cpu: int | None = None,
        kernels: GraphKernels | None = None,
    ) -> None:
        self.config = config = Config(
            world=group.size, experts=experts, hidden=hidden, top_k=top_k, max_tokens=max_tokens, dtype=dtype,
            scale_block=scale_block, out_dtype=out_dtype, private_tokens=private_tokens, padding=padding, layout=layout,
            node_size=1, dp_size=1, capacity_factor=capacity_factor, on_lost="raise",
        )  # fmt: skip
        if private_tokens is None:  # room for all costs no memory: what one slot has more, the remainder has less
            self.config = config = dataclasses.replace(config, private_tokens=config.routes_to_rank_max)
        check_seconds(timeout_s=timeout_s)
        self.rank = group.rank
        self._engine = engine
        self._peer_access = peer_access
        self._timeout_s = timeout_s
        self._is_gpu = is_gpu(device)
        self._rows = row_memory(engine, device, None, config)
        self.device = self._rows.device if isinstance(self._rows, DeviceRows) else torch.device("cpu")
        self._kernels = _kernels(self._is_gpu) if kernels is None else kernels
        self._closed = False
        self._recent: deque[weakref.ref[GraphRound]] = deque(maxlen=_OPEN_MAX)
        self._is_told = False  # what has ended the rounds was raised
        self._unseen: CrossrailError | None = None  # for close() to raise
        self._proxy: Any = None
        board_layout = BoardLayout(config, holds_rows=False)
        self._words = engine.alloc(board_layout.nbytes)
        board_layout.begin(self._words.view())
        self._peers: Peers | None = None
        self._far: Far | None = None
        try:
            self._peers = Peers(
                engine, group, config, self._words, board_layout, self._rows, None, (False, None), timeout_s,
                self._prepare,
            )  # fmt: skip
            if self._far is None:  # of one rank alone
                self._prepare(self._peers.layout, Far(engine, config, self._peers.layout, group.rank, self._rows))
            self._begin(proxy_cpu)
            self._explanation = self._explained()
        except BaseException:
            self._close_memory()
            raise

    def _prepare(self, layout: _core.moe.Layout, far: Far) -> None:
        """What takes time, or may wait for kernels that wait for other ranks, as loading a kernel or pinning memory:
        before any rank has a round.
        """
        config, rank = self.config, self.rank
        self._layout, self._far = layout, far
        first = min(rank * config.experts_per_rank, config.experts)
        self._own = Own(rank, first, first + self._layout.expert_count(rank), config.experts, config.experts_per_rank)
        if self._peer_access:
            far.reach(self._timeout_s)
        masked = config.layout == "masked"
        self._room = (self._own.end - first) * config.rows_per_expert if masked else config.rows_max
        with told(f"memory for rounds on {self.device}"):
            self._board = GraphBoard(config, self._own.end - first, self.device)
            self._memory = GraphMemory(config, far, rank, self.device)
            self._rounds = torch.zeros(1, dtype=torch.int64, device=self.device)
        if self._is_gpu:
            self._prepare_kernels()
        far.try_ways(self._timeout_s)

    def _begin(self, proxy_cpu: int | None) -> None:
        config = self.config
        assert self._far is not None
        with told(f"memory for rounds on {self.device}"):
            self._signals = Signals(config, self._far, self.rank, self.device)
        room = config.rows_per_expert if config.layout == "masked" else config.rows_max
        self._proxy = _core.moe.StreamProxy(
            self._far.proxy, self._layout, self.rank, self._board.memory, self._board.parts, room,
            config.routes_to_rank_max, self._timeout_s, proxy_cpu, self.device.index if self._is_gpu else -1,
        )  # fmt: skip
        if self._is_gpu:  # to load these too, before one waits
            with self._launching() as stream:
                number = torch.zeros(1, dtype=torch.int64, device=self.device)
                self._proxy.publish("ended", number.data_ptr(), stream)
                self._proxy.wait("rows", number.data_ptr(), stream)
            wait_for_kernels([str(self.device)])

    def _prepare_kernels(self) -> None:
        """Compiles and loads them, by a round without rows that nobody else hears of. Others begin after it."""
        config = self.config
        with self._launching():
            number = torch.zeros(1, dtype=torch.int64, device=self.device)
            x, scales, counts, offsets = self._outputs()
            tokens = config.max_tokens
            given = torch.empty((tokens, config.hidden), dtype=x.dtype, device=self.device)
            factors = None if scales is None else torch.empty((tokens, config.blocks), device=self.device)
            for kind in (torch.int32, torch.int64):
                indices = torch.full((tokens, config.top_k), -1, dtype=kind, device=self.device)
                routes = self._new_routes(tokens)
                self._kernels.share(self._board, routes.kept, indices, None, number)
                self._kernels.share(self._board, routes.kept, indices, number, number)
            self._kernels.send(self._memory, self._own, given, factors, routes, number)
            self._kernels.take(self._memory, self._board, x, scales, counts, offsets, number)
            y = torch.empty((self._room, config.hidden), dtype=getattr(torch, config.out_dtype), device=self.device)
            self._kernels.give(self._memory, self._board, y, number)
            sums = torch.empty((tokens, config.hidden), dtype=y.dtype, device=self.device)
            weights = torch.ones((tokens, config.top_k), device=self.device)
            for accumulate in (False, True):
                self._kernels.sum(self._memory, sums, routes.where, weights, accumulate, number)
        wait_for_kernels([str(self.device)])

    def __repr__(self) -> str:
        config = self.config
        state = ", closed" if self._closed else ""
        return f"<GraphAllToAll, rank {self.rank} of {config.world}, {config.experts} experts, on {self.device}{state}>"

    # ---- dispatch

    def dispatch(
        self, x: Any, scales: Any | None, indices: Any, weights: Any | None = None, *, num_tokens: Any | None = None
    ) -> GraphDispatched:
        """dispatch_send and dispatch_recv."""
        return self.dispatch_recv(self.dispatch_send(x, scales, indices, weights, num_tokens=num_tokens))

    def dispatch_send(
        self, x: Any, scales: Any | None, indices: Any, weights: Any | None = None, *, num_tokens: Any | None = None
    ) -> GraphRound:
        """Opens a round: offers our tokens to the ranks of their experts.

        x: [T, hidden] of dtype. scales: float32 [T, blocks], or None without scale_block. indices: int32 or int64 [T,
            top_k], experts of each token, all different; -1: none. An index outside of [-1, experts) is found by the
            thread, and ends all rounds. weights: float32 [T, top_k], for combine, which may be given others.
        num_tokens: use only this many of the T; a number, or a tensor of the device that holds one, read by kernels.
        The tensors may be written to by what is launched on this stream after.
        """
        self.check()
        # One that is nobody's any more was captured into a graph that came to nothing; else the thread finds it.
        before = self._recent[0]() if len(self._recent) == _OPEN_MAX else None
        if before is not None and before.stage is not Stage.ENDED:
            raise UsageError(f"this round takes the place of {before}, which is open: combine that one first")
        config = self.config
        values = self._given(x, "x", (config.dtype,), (None, config.hidden))
        tokens = len(values)
        if tokens > config.max_tokens:
            raise UsageError(f"x has {tokens} tokens, max_tokens is {config.max_tokens}")
        factors = scales_given(config, self._given, scales, tokens)
        chosen = self._given(indices, "indices", INDEX_TYPES, (tokens, config.top_k))
        count = self._count_given(num_tokens, tokens)
        kept_weights = None if weights is None else self._weights_given(weights, tokens)
        with self._launching() as stream:
            number = torch.empty(1, dtype=torch.int64, device=self.device)
            routes = self._new_routes(tokens)
            if count is not None and not is_tensor(count):
                chosen = torch.cat([chosen[:count], torch.full_like(chosen[count:], -1)])
                count = None
            opened = GraphRound(number, tokens, routes, None if kept_weights is None else kept_weights.clone(), self)
            opened.stream = stream
            self._proxy.open(self._rounds.data_ptr(), number.data_ptr(), stream)
            self._kernels.share(self._board, routes.kept, chosen, count, number)
            self._publish("routes", number, stream)
            self._kernels.send(self._memory, self._own, values, factors, routes, number)
            self._publish("packed", number, stream, "rows")
        self._recent.append(weakref.ref(opened))
        return opened

    def arriving(self, opened: GraphRound) -> tuple[Any, Any | None]:
        """(x, scales) as dispatch_recv will fill them, before it is called: for callers that pass them on first."""
        self._require(opened, Stage.SENT, "arriving")
        with self._launching():
            opened.outputs = opened.outputs or self._outputs()
        return opened.outputs[:2]

    def dispatch_recv(self, opened: GraphRound) -> GraphDispatched:
        """Waits, on the GPU, until all ranks have sent, and takes the rows of our experts into new tensors."""
        self._require(opened, Stage.SENT, "dispatch_recv")
        with self._launching(opened) as stream:
            x, scales, counts, offsets = opened.outputs = opened.outputs or self._outputs()
            self._wait("rows", opened.number, stream)
            self._kernels.take(self._memory, self._board, x, scales, counts, offsets, opened.number)
        opened.stage = Stage.RECEIVED
        return GraphDispatched(x, scales, counts, offsets, self._room, opened)

    # ---- combine

    def combine(
        self, y: Any, dispatched: GraphDispatched, weights: Any | None = None, *, out: Any | None = None,
        accumulate: bool = False,
    ) -> Any:  # fmt: skip
        """combine_send and combine_recv."""
        self.check_combine(dispatched, weights, out=out, accumulate=accumulate)
        self.combine_send(y, dispatched)
        return self.combine_recv(dispatched, weights, out=out, accumulate=accumulate)

    def check_combine(
        self, dispatched: GraphDispatched, weights: Any | None = None, *, out: Any | None = None,
        accumulate: bool = False,
    ) -> None:  # fmt: skip
        """UsageError for what combine_recv would refuse. Call it before combine_send: after that the round must end."""
        self._sums_given(dispatched.round, weights, out, accumulate)

    def combine_send(self, y: Any, dispatched: GraphDispatched) -> None:
        """Offers our experts' outputs to the ranks that the rows came from.

        y: [rows, hidden] of out_dtype, in the order of dispatched.x. May be written to by what is launched after.
        """
        opened = dispatched.round
        self._require(opened, Stage.RECEIVED, "combine_send")
        given = self._given(y, "y", (self.config.out_dtype,), (dispatched.rows, self.config.hidden))
        with self._launching(opened) as stream:
            self._kernels.give(self._memory, self._board, given, opened.number)
            self._publish("returned", opened.number, stream, "results")
        opened.stage = Stage.RETURNED

    def combine_recv(
        self, answered: GraphDispatched | GraphRound, weights: Any | None = None, *, out: Any | None = None,
        accumulate: bool = False,
    ) -> Any:  # fmt: skip
        """Waits, on the GPU, until all ranks have returned, and sums: see AllToAll.combine_recv. Ends the round."""
        opened = answered if isinstance(answered, GraphRound) else answered.round
        self._require(opened, Stage.RETURNED, "combine_recv")
        sums, factors = self._sums_given(opened, weights, out, accumulate)
        with self._launching(opened) as stream:
            self._wait("results", opened.number, stream)
            self._kernels.sum(self._memory, sums, opened.routes.where, factors, accumulate, opened.number)
            self._publish("ended", opened.number, stream)
        opened.stage = Stage.ENDED
        return sums if out is None else out

    # ---- life

    def check(self) -> None:
        """Raises what has ended the rounds, if anything has: of graphs that are replayed nothing else tells. Cheap."""
        if self._closed:
            raise UsageError("this GraphAllToAll is closed")
        if self._engine.closed:
            raise EngineClosed(f"engine {self._engine.name!r} was closed")
        failure = self._found_failure()
        if failure is not None:
            self._is_told = True
            try:
                raise failure
            finally:
                del failure  # by its traceback it would keep itself, and all of this

    @property
    def timeout_s(self) -> float:
        """Of each wait for other ranks, from now on."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        check_seconds(timeout_s=timeout_s)
        self._timeout_s = timeout_s
        self._proxy.set_timeout(timeout_s)

    def explain(self) -> str:
        """Where rows are, what touches them, and how much memory this takes: print it."""
        return self._explanation

    def close(self) -> None:
        """Waits for what was launched on the device, gives the memory back, and tells ranks that wait for this one.

        Idempotent. Raises WaitTimeout if a rank is still in the middle of a write to this one: call it again. What has
        ended the rounds is raised when everything else is done, unless a call has raised it.
        """
        if not self._closed:
            with contextlib.suppress(CrossrailError):
                wait_for_kernels([str(self.device)] if self._is_gpu else [])
            try:
                if not self._engine.closed and not self._is_told and self._proxy is not None:
                    self._unseen = self._found_failure()
            finally:
                self._closed = True
                if self._proxy is not None:
                    self._proxy.stop()
                if self._peers is not None:
                    self._peers.farewell(self._timeout_s)
        self._close_memory()
        unseen, self._unseen = self._unseen, None
        if unseen is not None:
            try:
                raise unseen
            finally:
                del unseen  # as in check()

    def __enter__(self) -> GraphAllToAll:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(CrossrailError):  # the first error is the one to see
            self.close()

    # ---- parts

    @contextlib.contextmanager
    def _launching(self, opened: GraphRound | None = None) -> Iterator[int]:
        """The stream that is current; 0 in host memory. opened: whose tensors are used there."""
        if not self._is_gpu:
            yield 0
            return
        with told(f"a kernel on {self.device}"), torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            if opened is not None and opened.stream != stream.cuda_stream:  # torch gives memory out by streams
                for tensor in (opened.number, opened.routes.where, opened.weights, *(opened.outputs or ())):
                    if tensor is not None:
                        tensor.record_stream(stream)
            yield stream.cuda_stream

    def _explained(self) -> str:
        config = self.config
        assert self._far is not None
        travels, output = self._far.memory.rows.nbytes, self._room * (config.x_row_bytes + config.y_bytes)
        return (
            f"rank {self.rank} of {config.world}: {self._own.end - self._own.first} of {config.experts} experts, "
            f"room for {self._room} rows\n"
            f"  rows: in {self._rows.name}\n"
            f"  kernels: {self._kernels.name}, {'launched on the current stream' if self._is_gpu else 'in each call'}\n"
            f"  board of rounds {self._board.nbytes / 1e6:.1f} MB{' of pinned memory' * self._is_gpu}, rows that "
            f"travel {travels / 1e6:.1f} MB, those that stay {self._memory.own_nbytes / 1e6:.1f} MB\n"
            f"  each dispatch makes tensors, and its experts as many results: {output / 1e6:.1f} MB"
            f"{self._explain_ways()}"
        )

    def _explain_ways(self) -> str:
        assert self._far is not None
        reached = sorted(self._far.reached)
        lines = [f"ranks {_listed(reached)}: kernels write to their memory"] if reached else []
        ranks_by_reason: dict[str, list[int]] = {}
        for rank, reason in sorted(self._far.unreached.items()):
            ranks_by_reason.setdefault(reason, []).append(rank)
        lines += [f"ranks {_listed(ranks)}: by the engine, {reason}" for reason, ranks in ranks_by_reason.items()]
        if not self._peer_access and self._far.ranks:
            lines.append("other ranks: by the engine, peer_access is False")
        if self._far.heard:
            lines.append(f"ranks {_listed(self._far.heard)}: their kernels write to our memory")
        return "".join(f"\n  {line}" for line in lines)

    def _publish(self, word: str, number: Any, stream: int, step: str | None = None) -> None:
        """To the thread; and, of a step, to ranks that we reach."""
        if step is None:
            self._proxy.publish(word, number.data_ptr(), stream)
        else:
            sent = self._signals.sent[step]
            self._proxy.publish(word, number.data_ptr(), stream, sent.at, sent.count)

    def _wait(self, step: str, number: Any, stream: int) -> None:
        awaited, needs_words = self._signals.awaited[step], self._signals.needs_words[step]
        self._proxy.wait(step, number.data_ptr(), stream, awaited.at, awaited.count, needs_words)

    def _new_routes(self, tokens: int) -> Routes:
        shape = (tokens, self.config.top_k)
        sizes = shape, (*shape, 2), (self.config.experts,), shape
        return Routes(*(torch.empty(size, dtype=torch.int32, device=self.device) for size in sizes))

    def _outputs(self) -> tuple[Any, Any | None, Any, Any]:
        """New ones of a dispatch: x, scales, counts, offsets."""
        config, experts = self.config, self._own.end - self._own.first
        x = torch.empty((self._room, config.hidden), dtype=getattr(torch, config.dtype), device=self.device)
        scales = None
        if config.blocks:
            scales = torch.empty((self._room, config.blocks), dtype=torch.float32, device=self.device)
        counts, offsets = (torch.empty(n, dtype=torch.int32, device=self.device) for n in (experts, experts + 1))
        return x, scales, counts, offsets

    def _require(self, opened: GraphRound, stage: Stage, call: str) -> None:
        self.check()
        if not isinstance(opened, GraphRound):
            raise UsageError(f"{call} was given {type(opened).__name__}, must be of a GraphRound")
        if opened.owner is not self:
            raise UsageError(f"{call} was given {opened} of another GraphAllToAll")
        if opened.stage is not stage:
            raise UsageError(f"{call} of a round that has had {opened.stage.value}: it comes after {stage.value}")

    def _given(self, tensor: Any, name: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...]) -> Any:
        return tensor_on(self.device, tensor, name, dtypes, shape)

    def _weights_given(self, weights: Any, tokens: int) -> Any:
        return self._given(weights, "weights", ("float32",), (tokens, self.config.top_k))

    def _count_given(self, count: Any | None, tokens: int) -> Any | None:
        """Of tokens: on the device, a number, or None for all."""
        if count is None:
            return None
        if is_tensor(count) and count.device == self.device and count.numel() == 1:
            check_tensor(count, "num_tokens", INDEX_TYPES)
            return count
        return to_count(count, tokens)

    def _sums_given(
        self, opened: GraphRound, weights: Any | None, out: Any | None, accumulate: bool
    ) -> tuple[Any, Any]:
        if accumulate and out is None:
            raise UsageError("accumulate is set and out is None: there is nothing to add to")
        factors = opened.weights if weights is None else self._weights_given(weights, opened.tokens)
        if factors is None:
            raise UsageError("weights is None, and dispatch was given none")
        shape = (opened.tokens, self.config.hidden)
        if out is not None:
            return self._given(out, "out", OUT_DTYPES, shape), factors
        with told(f"a result on {self.device}"):
            return torch.empty(shape, dtype=getattr(torch, self.config.out_dtype), device=self.device), factors

    def _found_failure(self) -> CrossrailError | None:
        assert self._peers is not None
        return found_failure(self._proxy, self._peers, self._layout, self.config, self.rank, self._timeout_s)

    def _close_memory(self) -> None:
        if self._proxy is not None:
            self._proxy.stop()
        for name in ("_memory", "_signals"):  # with what is mapped of others
            self.__dict__.pop(name, None)
        if self._peers is not None:
            self._peers.close(self._timeout_s)
        if self._engine.closed:
            return
        if self._far is not None and (self._peers is None or self._peers.far is None):
            self._far.close(self._timeout_s)
        self._words.close(self._timeout_s)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)


def _kernels(is_on_gpu: bool) -> GraphKernels:
    if not is_on_gpu:
        return ReferenceGraphKernels()
    try:
        from crossrail.moe.graph.triton import TritonGraphKernels
    except ModuleNotFoundError as error:
        raise UsageError(
            f"with a device the kernels are Triton's, and it is not installed ({error}): pip install triton"
        ) from None
    return TritonGraphKernels()
