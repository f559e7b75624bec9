"""Expert parallelism whose steps are kernels on a stream: see GraphAllToAll."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

import crossrail as xr
from crossrail._options import check_seconds
from crossrail._torch import is_tensor, uncompiled, wait_for_kernels
from crossrail.errors import CrossrailError, TransportError, UsageError
from crossrail.moe.arrays import INDEX_TYPES
from crossrail.moe.config import Config, check_proxy, name_of_dtype
from crossrail.moe.countdown import Countdown
from crossrail.moe.errors import PeerFailed, to_go_on_with
from crossrail.moe.farewell import is_told
from crossrail.moe.graph.explain import explained
from crossrail.moe.graph.failures import check_peers, found_failure
from crossrail.moe.graph.kernels import GraphKernels
from crossrail.moe.graph.posting import PostingThread
from crossrail.moe.graph.rounds import GraphDispatched, GraphRound
from crossrail.moe.graph.steps import Steps
from crossrail.moe.graph.tensors import Tensors
from crossrail.moe.group import Group, check_ranks, refusing_for_all
from crossrail.moe.leaving import Leaving
from crossrail.moe.links.board import Board, BoardLayout
from crossrail.moe.peers import Peers
from crossrail.moe.rounds import Stage, check_usable
from crossrail.moe.rows.device import DeviceRows
from crossrail.moe.rows.factory import row_memory
from crossrail.moe.tokens import check_count, scales_given, sums_given

_OPEN_MAX = 2


class GraphAllToAll(Leaving):
    """An AllToAll whose halves only launch kernels on the current stream: a CUDA graph can capture all four.

    No half waits for the GPU, or reads a tensor on the host. A thread does a round's work with other ranks: it reads
    from pinned memory how far the GPU is, posts writes, and lets kernels continue. The rounds are those of AllToAll, so
    ranks of both kinds may be in one group. The AllToAlls then set node_size=1, on_lost="raise" and the same arguments,
    private_tokens included.

    Each replay of a graph runs the rounds that were captured, under new numbers. All ranks begin rounds in the same
    order. If a rank has two open at once, on two streams, the caller orders their dispatch_sends by events. A round
    that is captured must end in the same graph, or in one that is replayed with it.

    The arguments are those of AllToAll, except for these. device: of the tensors of all arguments and results, such as
    "cuda:0". None: host memory, where each half waits in its call; this is for tests and trials. layout: "masked" by
    default. private_tokens: rows for which each rank has room before counts are known. None: all that can come, so that
    nothing has to be sent later, behind kernels that wait.
    peer_access: kernels write rows and results directly to other ranks on this host whose memory can be mapped;
    explain() names them. False: the engine sends all. Each rank decides for what it sends.
    proxy_cpu: the core of the thread, which then never sleeps. None: any core, with short sleeps.
    kernels: None: Triton's on a GPU, torch's own operations in host memory.
    Not supported: on_lost="mask", node_sums. Refused: engines with polling="manual".

    A call that has failed on another rank, and may be made again there, is told by check(), and in host memory by the
    half that waits. Other failures of ranks are raised late: kernels then do nothing, all sums are NaN, and the next
    call, check() or close() raises. This object is of no use after that. A wait for another rank fails after timeout_s.
    So does a wait for our own older round whose place a new one takes.

    Threads: one at a time. Owner: engine and group are the caller's. Lifecycle: 1. Made, by all ranks at once; this
    compiles the kernels. Some are compiled later, at their first use with other types or alignments (tensors that do
    not begin at 16 bytes); so run one round before a capture. 2. Rounds. 3. Drop the graphs that have rounds, then
    close(), before the engine. One that is garbage-collected while open is closed as AllToAll is.

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
        dtype: torch.dtype | str = "float8_e4m3fn",
        scale_block: int | None = 128,
        out_dtype: torch.dtype | str = "bfloat16",
        private_tokens: int | None = None,
        padding: int = 1,
        layout: str = "masked",
        capacity_factor: float | None = None,
        timeout_s: float = 30.0,
        peer_access: bool = True,
        proxy_cpu: int | None = None,
        kernels: GraphKernels | None = None,
        experts_per_rank: Sequence[int] | None = None,
        dp_size: int = 1,
    ) -> None:
        check_seconds(timeout_s=timeout_s)
        check_ranks(engine, group)
        with refusing_for_all(group):
            check_proxy("thread", proxy_cpu)
            self.config = config = Config(
                world=group.size, experts=experts, experts_per_rank=experts_per_rank, hidden=hidden, top_k=top_k,
                max_tokens=max_tokens, dtype=name_of_dtype(dtype), scale_block=scale_block,
                out_dtype=name_of_dtype(out_dtype),
                private_tokens=private_tokens, padding=padding, layout=layout, node_size=1, dp_size=dp_size,
                capacity_factor=capacity_factor, on_lost="raise",
            )  # fmt: skip
        if private_tokens is None:  # costs no memory: a larger slot leaves a smaller remainder
            self.config = config = dataclasses.replace(config, private_tokens=config.routes_to_rank_max)
        self.rank = group.rank
        self._engine = engine
        self._timeout_s = timeout_s
        self._recent: deque[weakref.ref[GraphRound]] = deque(maxlen=_OPEN_MAX)
        self._kept: GraphRound | None = None  # of a dispatch() that waits, or was cut short
        self._turn = threading.RLock()
        self._is_told = False  # the failure that ended the rounds was raised
        self._unseen: CrossrailError | None = None  # a failure that close() is to raise
        with contextlib.ExitStack() as undo:
            with Peers.expected(group, config, timeout_s):
                rows = row_memory(engine, device, None, config)
                self.device = rows.device if isinstance(rows, DeviceRows) else torch.device("cpu")
                self._tensors = Tensors(self.device)
                self._board = Board(engine, BoardLayout(config, group.rank, holds_rows=False), None)
            undo.callback(self._board.close, timeout_s)
            self._peers = peers = Peers(engine, group, config, self._board, rows, timeout_s, kernels_wait=True)
            undo.callback(peers.close, timeout_s)
            self._parting, far = peers.parting, peers.far
            assert far is not None  # since kernels wait
            with peers.readying(group, timeout_s):
                if peer_access:
                    far.reach(timeout_s)
                self._steps = Steps(config, peers.layout, far, self.rank, kernels, self._tensors)
                undo.callback(self._drop_steps)
                far.try_ways(timeout_s)
            self._thread = PostingThread(
                config, peers.layout, far, self.rank, self._steps, self._tensors, timeout_s, proxy_cpu
            )
            undo.callback(self._thread.stop)
            self._explanation = explained(
                config, far, self._steps, self._thread, rows.name, self._tensors.is_gpu, peer_access
            )
            undo.pop_all()
        self._closed = False

    def __repr__(self) -> str:
        config = self.config
        state = ", closed" if self._closed else ""
        return f"<GraphAllToAll, rank {self.rank} of {config.world}, {config.experts} experts, on {self.device}{state}>"

    # ---- dispatch

    @is_told
    def dispatch(
        self, x: Any, scales: Any | None, indices: Any, weights: Any | None = None, *, num_tokens: Any | None = None
    ) -> GraphDispatched:
        """dispatch_send and dispatch_recv.

        If a PeerFailed says that the round is open, continue it with dispatch_recv(open_rounds[-1]): another dispatch()
        would be another round.
        """
        self._kept = opened = self.dispatch_send(x, scales, indices, weights, num_tokens=num_tokens)
        try:
            return self.dispatch_recv(opened)
        except PeerFailed as error:
            go_on = f"{opened} is open: go on with it by dispatch_recv(open_rounds[-1]), not by dispatch()"
            raise to_go_on_with(error, go_on) from None

    @is_told
    def dispatch_send(
        self, x: Any, scales: Any | None, indices: Any, weights: Any | None = None, *, num_tokens: Any | None = None
    ) -> GraphRound:
        """Opens a round: offers our tokens to the ranks of their experts.

        x: [T, hidden] of dtype. scales: float32 [T, blocks], or None without scale_block. indices: int32 or int64 [T,
            top_k], experts of each token, all different; -1: none. The thread finds an index outside of [-1, experts),
            which ends all rounds. weights: float32 [T, top_k], for combine, which may be given others.
        num_tokens: use only this many of the T; a number, or a tensor of the device that holds one, read by kernels.
        What is launched on this stream afterwards may write to the tensors. If a launch fails half way, the rounds have
        ended.
        """
        self._check_rounds()
        # A round that nobody holds any more may belong to a capture that was dropped. If it was real and has not ended,
        # the thread finds that.
        before = self._recent[0]() if len(self._recent) == _OPEN_MAX else None
        if before is not None and before.stage is not Stage.ENDED:
            raise UsageError(f"this round takes the place of {before}, which is open: combine that one first")
        config = self.config
        tensors, steps, thread = self._tensors, self._steps, self._thread
        values = tensors.given(x, "x", (config.dtype,), (None, config.hidden))
        tokens = len(values)
        check_count(config, tokens)
        factors = scales_given(config, tensors, scales, tokens)
        chosen = tensors.given(indices, "indices", INDEX_TYPES, (tokens, config.top_k))
        count = tensors.count_given(num_tokens, tokens)
        kept_weights = None if weights is None else self._weights_given(weights, tokens)
        with tensors.launching() as stream:
            number = torch.empty(1, dtype=torch.int64, device=self.device)
            routes = steps.new_routes(tokens)
            if count is not None and not is_tensor(count):
                chosen = torch.cat([chosen[:count], torch.full_like(chosen[count:], -1)])
                count = None
            opened = GraphRound(number, tokens, routes, None if kept_weights is None else kept_weights.clone(), self)
            opened.stream = stream
            is_begun = False
            try:
                thread.open(number, stream)
                is_begun = True
                steps.share(routes, chosen, count, number)
                thread.publish("routes", number, stream)
                steps.send(values, factors, routes, number)
                thread.publish("packed", number, stream, "rows")
            except BaseException as error:
                if is_begun or not isinstance(error, TransportError | UsageError):  # of open(): nothing was launched
                    self._give_up(error)
                raise
        self._recent.append(weakref.ref(opened))
        return opened

    @uncompiled
    def arriving(self, opened: GraphRound) -> tuple[Any, Any | None]:
        """(x, scales) as dispatch_recv will fill them, before it is called: for callers that pass them on first."""
        self._require(opened, Stage.SENT, "arriving")
        with self._tensors.launching():
            opened.outputs = opened.outputs or self._steps.new_outputs()
        return opened.outputs.x, opened.outputs.scales

    @is_told
    def dispatch_recv(self, opened: GraphRound) -> GraphDispatched:
        """Waits, on the GPU, until all ranks have sent, and takes the rows of our experts into new tensors. In host
        memory it may be called again after a PeerFailed that has_left=False.
        """
        self._require(opened, Stage.SENT, "dispatch_recv")
        with self._tensors.launching(opened) as stream:
            opened.outputs = outputs = opened.outputs or self._steps.new_outputs()
            self._thread.wait("rows", opened.number, stream, self._check_peers)
            self._steps.take(outputs, opened.number)
        opened.stage = Stage.RECEIVED
        self._kept = None
        return GraphDispatched(*outputs, self._steps.room, opened)

    # ---- combine

    @is_told
    def combine(
        self, y: Any, dispatched: GraphDispatched, weights: Any | None = None, *, out: Any | None = None,
        accumulate: bool = False,
    ) -> Any:  # fmt: skip
        """combine_send and combine_recv. After a PeerFailed that has_left=False, continue with
        combine_recv(dispatched).
        """
        self._sums_given(_round_of(dispatched, "combine"), weights, out, accumulate)
        self.combine_send(y, dispatched)
        try:
            return self.combine_recv(dispatched, weights, out=out, accumulate=accumulate)
        except PeerFailed as error:
            go_on = "Our part is sent: go on by combine_recv(), not by combine()"
            raise to_go_on_with(error, go_on) from None

    @uncompiled
    def check_combine(
        self, dispatched: GraphDispatched, weights: Any | None = None, *, out: Any | None = None,
        accumulate: bool = False,
    ) -> None:  # fmt: skip
        """UsageError for what combine_recv would refuse. Call it before combine_send: after that the round must end."""
        self._sums_given(_round_of(dispatched, "check_combine"), weights, out, accumulate)

    @is_told
    def combine_send(self, y: Any, dispatched: GraphDispatched) -> None:
        """Offers our experts' outputs to the ranks that the rows came from.

        y: [rows, hidden] of out_dtype, in the order of dispatched.x. What is launched afterwards may write to it.
        """
        opened = _round_of(dispatched, "combine_send")
        self._require(opened, Stage.RECEIVED, "combine_send")
        given = self._tensors.given(y, "y", (self.config.out_dtype,), (dispatched.rows, self.config.hidden))
        with self._tensors.launching(opened) as stream:
            self._steps.give(given, opened.number)
            self._thread.publish("returned", opened.number, stream, "results")
        opened.stage = Stage.RETURNED

    @is_told
    def combine_recv(
        self, answered: GraphDispatched | GraphRound, weights: Any | None = None, *, out: Any | None = None,
        accumulate: bool = False,
    ) -> Any:  # fmt: skip
        """Waits, on the GPU, until all ranks have returned, and sums: see AllToAll.combine_recv. Ends the round. In
        host memory it may be called again as dispatch_recv.
        """
        opened = answered if isinstance(answered, GraphRound) else _round_of(answered, "combine_recv")
        self._require(opened, Stage.RETURNED, "combine_recv")
        sums, factors = self._sums_given(opened, weights, out, accumulate)
        with self._tensors.launching(opened) as stream:
            self._thread.wait("results", opened.number, stream, self._check_peers)
            self._steps.sum(sums, opened.routes, factors, bool(accumulate), opened.number)
            self._thread.publish("ended", opened.number, stream)
        opened.stage = Stage.ENDED
        return sums if out is None else out

    # ---- life

    @uncompiled
    def check(self) -> None:
        """Raises the failure that has ended the rounds, if any: replays of graphs do not tell it. Cheap.

        PeerFailed with has_left=False, once, if a call has failed on a rank that kernels have waited for since, and was
        not made again for 0.2 s: the rounds go on if it is. So call it now and then while you wait for the device.
        """
        self._check_rounds()
        self._check_peers()

    def _check_rounds(self) -> None:
        check_usable("GraphAllToAll", self._closed, self._engine)
        failure = self._found_failure()
        if failure is not None:
            if not self._is_told:
                self._is_told = True
                self._thread.stop()
                self._parting.leave("round", failure)
            try:
                raise failure
            finally:
                del failure  # otherwise its traceback would keep itself and this object alive

    @property
    def open_rounds(self) -> tuple[GraphRound, ...]:
        """Rounds that this rank has begun and not ended, and that somebody holds, the latest last."""
        known = [one() for one in self._recent]
        return tuple(one for one in known if one is not None and one.stage is not Stage.ENDED)

    @property
    def timeout_s(self) -> float:
        """Timeout of each later wait for other ranks."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        check_seconds(timeout_s=timeout_s)
        self._timeout_s = timeout_s
        if not self._closed:
            self._thread.proxy.set_timeout(timeout_s)

    def explain(self) -> str:
        """Where rows are, what touches them, and how much memory this takes: print it."""
        return self._explanation

    def close(self) -> None:
        """Waits for what was launched on the device, ends what others may write to, and tells ranks that wait for us.

        All its memory but that of tensors which it returned is released. Idempotent. Raises WaitTimeout if a rank is
        still in the middle of a write to this one: call it again. A failure that has ended the rounds is raised after
        everything else is done, unless a call has raised it before.
        """
        patience: Countdown | None = None
        if not self._closed:
            with contextlib.suppress(CrossrailError):
                wait_for_kernels([str(self.device)] if self._tensors.is_gpu else [])
            try:
                if not self._engine.closed and not self._is_told:
                    self._unseen = self._found_failure()
            finally:
                self._closed = True
                self._thread.stop()
                with contextlib.suppress(CrossrailError):  # rounds that were launched meanwhile
                    wait_for_kernels([str(self.device)] if self._tensors.is_gpu else [])
                self._thread.close()
                self._drop_steps()
                del self._thread
                patience = Countdown(self._engine, self._timeout_s)
                self._parting.farewell(patience.left_s)
        if patience is None:
            patience = Countdown(self._engine, self._timeout_s)
        self._peers.close(patience.left_s)
        self._board.close(patience.left_s)
        unseen, self._unseen = self._unseen, None
        if unseen is not None:
            try:
                raise unseen
            finally:
                del unseen  # as in check()

    # ---- parts

    def _check_peers(self) -> None:
        check_peers(self._thread.proxy, self._peers)

    def _require(self, opened: GraphRound, stage: Stage, call: str) -> None:
        self._check_rounds()
        if not isinstance(opened, GraphRound):
            raise UsageError(f"{call} was given {type(opened).__name__}, must be of a GraphRound")
        if opened.owner is not self:
            raise UsageError(f"{call} was given {opened} of another GraphAllToAll")
        if opened.stage is not stage:
            raise UsageError(f"{call} of a round that has had {opened.stage.value}: it comes after {stage.value}")

    def _weights_given(self, weights: Any, tokens: int) -> Any:
        return self._tensors.given(weights, "weights", ("float32",), (tokens, self.config.top_k))

    def _sums_given(
        self, opened: GraphRound, weights: Any | None, out: Any | None, accumulate: bool
    ) -> tuple[Any, Any]:
        """Where sums go, and their weights. UsageError."""
        factors = opened.weights if weights is None else self._weights_given(weights, opened.tokens)
        return sums_given(self.config, self._tensors, opened.tokens, factors, out, accumulate), factors

    def _give_up(self, error: BaseException) -> None:
        """A dispatch was interrupted by this error: its round has a number, but will never be announced. So no round
        continues.

        Not in a capture, where nothing has run yet. If what was captured is replayed all the same, the thread notices.
        """
        if self._tensors.is_capturing:
            return
        self._thread.stop()
        self._is_told = True
        self._parting.give_up("dispatch_send", error)

    def _found_failure(self) -> CrossrailError | None:
        given_up = self._parting.given_up
        return (
            given_up
            if given_up is not None
            else found_failure(self._thread.proxy, self._peers, self.config, self.rank, self._timeout_s)
        )

    def _drop_steps(self) -> None:
        """With what they map of other ranks. Nothing is launched any more."""
        del self._steps


def _round_of(given: object, call: str) -> GraphRound:
    if not isinstance(given, GraphDispatched):
        raise UsageError(f"{call} was given {type(given).__name__}, must be GraphDispatched")
    return given.round
