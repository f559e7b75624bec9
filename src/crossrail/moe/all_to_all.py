"""Dispatches tokens to the ranks that have their experts, and combines what the experts computed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import crossrail as xr
from crossrail import _core
from crossrail._options import check_seconds
from crossrail._torch import is_tensor, uncompiled
from crossrail.errors import CrossrailError, UsageError, WaitTimeout
from crossrail.moe.config import Config, check_proxy, name_of_dtype
from crossrail.moe.countdown import Countdown
from crossrail.moe.errors import PeerFailed, to_go_on_with
from crossrail.moe.farewell import is_told
from crossrail.moe.group import Group, check_ranks, refusing_for_all
from crossrail.moe.kernels import Kernels
from crossrail.moe.leaving import Leaving
from crossrail.moe.links.board import PARITIES, RETURNED, SENT, Board, BoardLayout, output_arrays, output_bytes
from crossrail.moe.masking.routes import drop_results, drop_routes
from crossrail.moe.peers import Peers
from crossrail.moe.placing import Placing
from crossrail.moe.rounds import Dispatched, Round, Stage, check_usable, round_meant
from crossrail.moe.rows.factory import is_gpu, row_memory
from crossrail.moe.tokens import check_apart, outputs_given, sums_given, tokens_given, weights_given
from crossrail.observe.durations import Durations

if TYPE_CHECKING:
    import torch

_DURATION_BOUNDS_S = (25e-6, 50e-6, 1e-4, 25e-5, 5e-4, 1e-3, 25e-4, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 10.0)
_ROUNDS = 1 << 32  # words count them modulo this


class AllToAll(Leaving):
    """Expert parallelism: tokens go to the ranks of their experts, results come back and are summed. One per model.

    Every rank makes one with the same arguments, and then the same calls in the same order. A round is one dispatch and
    the combine that answers it. Two rounds may be open at once, with separate calls for the two halves of each, so that
    one micro-batch is in flight while another is computed.

    Ranks that share memory read from each other: a token is copied once, by the rank of its expert, and an expert's
    output is summed where it is. (The outline is that of arXiv 2510.27656, section 6, where such ranks write instead.)

    engine: its own, open as long as this. group: the ranks (EngineGroup, TorchGroup); only the constructor needs it.
    experts: of the model, numbered rank by rank. experts_per_rank: how many each rank has, one number for each, 0 or
        more, `experts` in all; None: ceil(experts / ranks), the last ranks fewer, or none.
    hidden: elements of a token. top_k: experts per token. max_tokens: most tokens per dispatch.
    dtype: of x, "float8_e4m3fn", "bfloat16", "float16" or "float32", or torch's type of that name. out_dtype: of
        experts' outputs and of combine's result.
    scale_block: how many elements share a scale, float32 [tokens, ceil(hidden / scale_block)]; None: no scales.
    padding: each expert's rows begin at a multiple of it. layout: of the rows of a rank's experts; "grouped", one
        expert's after the other's, or "masked", the same room for each.
    node_size: this many consecutive ranks share memory; where nodes differ, how many on each, [4, 2]; None: all that
        can, consecutive or not. dp_size: this many consecutive ranks hold the same tokens. private_tokens: room for
        tokens that are sent before routes are known, to ranks that share no memory.
    capacity_factor: room for this many times the mean number of rows, instead of for any routing; a round that needs
        more raises CapacityExceeded on every rank.
    timeout_s: of each wait of the constructor and of every call; an attribute, which may be changed between calls.
    on_lost: what happens when a rank dies. "raise": the others' calls raise PeerLost. "mask": the others continue
        without its tokens and experts, all from the same half of the same round on (see `masked`); if not all ranks
        share memory, only a majority does.
    proxy: who posts to ranks that share no memory with this one; "caller": the calling thread; "thread": a thread of
        its own, for spare cores. proxy_cpu: the core of that thread, UsageError if this process may not run there;
        None: any. Both may differ between ranks.
    device: where rows are: an NVIDIA GPU such as "cuda:0"; None: host memory. kernels: what touches rows; None:
        CpuKernels(), or with a device TritonKernels(checked=False).
    node_sums: ranks that share memory add up what they return to a token of other ranks, in float32, and send one row
        of it, rounded to out_dtype, instead of one per expert: fewer bytes in combine, but different rounding. Then
        dispatch takes the weights, and a rank's sums are sent in combine_recv or advance().

    With a device: x, scales, weights, y and out are its tensors, and so are all results; indices may be on the host.
    Each half launches its kernels on the current stream. dispatch_send, combine_send and, with on_lost="mask", the
    others wait for them; routes come to the host first. Therefore none of the four halves can be captured in a CUDA
    graph: crossrail.moe.graph is for that. Ranks then share no memory (node_size=1); ranks in host memory may be in the
    same group if they set node_size=1 too.

    Not supported yet, and refused: GPU memory shared by ranks of a host; where not all ranks share memory,
    on_lost="mask" with dp_size, node_sums or private_tokens.

    Threads: one at a time; a call while another thread is in one is a UsageError. Owner: engine and group are the
    caller's. Lifecycle: 1. made, by all ranks at once. 2. rounds. 3. close(), before the engine; a rank that waits for
    a closed one is told so, as is one that waits for a call that has failed elsewhere. One that is garbage-collected
    while it and its engine are open is closed with a ResourceWarning, so that nobody waits for it.

    Raises UsageError if an argument is invalid, or not the same on all ranks: it names the argument, both values and
    the ranks; WaitTimeout, PeerLost, EngineClosed.
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
        dtype: torch.dtype | str = "float8_e4m3fn",
        scale_block: int | None = 128,
        out_dtype: torch.dtype | str = "bfloat16",
        private_tokens: int | None = None,
        padding: int = 1,
        layout: str = "grouped",
        node_size: int | Sequence[int] | None = None,
        dp_size: int = 1,
        capacity_factor: float | None = None,
        timeout_s: float = 30.0,
        on_lost: str = "raise",
        proxy: Literal["caller", "thread"] = "caller",
        proxy_cpu: int | None = None,
        device: Any | None = None,
        kernels: Kernels | None = None,
        node_sums: bool = False,
        experts_per_rank: Sequence[int] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        check_ranks(engine, group)
        if is_gpu(device) and node_size is None:
            node_size = 1
        with refusing_for_all(group):
            check_proxy(proxy, proxy_cpu)
            self.config = Config(
                world=group.size, experts=experts, experts_per_rank=experts_per_rank, hidden=hidden, top_k=top_k,
                max_tokens=max_tokens, dtype=name_of_dtype(dtype), scale_block=scale_block,
                out_dtype=name_of_dtype(out_dtype),
                private_tokens=private_tokens, padding=padding, layout=layout, node_size=node_size, dp_size=dp_size,
                capacity_factor=capacity_factor, on_lost=on_lost, node_sums=node_sums,
            )  # fmt: skip
        self.rank = group.rank
        self._engine = engine
        self._masks = on_lost == "mask"
        layout_of_board = BoardLayout(self.config, group.rank, holds_rows=not is_gpu(device))
        with contextlib.ExitStack() as undo:
            with Peers.expected(group, self.config, timeout_s):
                self._memory = row_memory(engine, device, kernels, self.config)
                self._inbox = self._memory.block(output_bytes(self.config, group.rank))
                undo.callback(self._inbox.close, timeout_s)
                own_rows = self._memory.block(layout_of_board.rows_bytes) if layout_of_board.rows_bytes else None
                self._board = Board(engine, layout_of_board, own_rows)
                undo.callback(self._board.close, timeout_s)
            self._peers = Peers(engine, group, self.config, self._board, self._memory, timeout_s)
            undo.callback(self._peers.close, timeout_s)
            trouble = self._start_thread(proxy_cpu) if proxy == "thread" else None
            self._peers.ready(group, timeout_s, trouble)
            undo.pop_all()
        self._layout, self._near, self._far = self._peers.layout, self._peers.near, self._peers.far
        self._parting = self._peers.parting
        self.node_size = len(self._near.ranks)
        self._outputs = [output_arrays(self.config, group.rank, self._inbox, parity) for parity in range(PARITIES)]
        self._ordinal = 0  # of the last round that was opened
        self._open: dict[int, Round] = {}  # by parity
        self._placing = Placing(self.config, self._peers, self.rank, self._open)
        self._turn = threading.RLock()
        self._stats = {"rounds": 0, "tokens_sent": 0, "rows_received": 0, "bytes_received": 0, "bytes_summed": 0}
        self._durations = Durations(_DURATION_BOUNDS_S)
        self._explanation = self._explained()
        self._closed = False

    def __repr__(self) -> str:
        config = self.config
        state = ", closed" if self._closed else ""
        return f"<AllToAll, rank {self.rank} of {config.world}, {config.experts} experts{state}>"

    # ---- dispatch

    @is_told
    def dispatch(
        self, x: Any, scales: Any | None, indices: Any, weights: Any | None = None, *, num_tokens: Any | None = None
    ) -> Dispatched:
        """dispatch_send and dispatch_recv.

        If a WaitTimeout or PeerFailed says that the round is open, continue it with dispatch_recv(open_rounds[-1]):
        another dispatch() would be another round.
        """
        opened = self.dispatch_send(x, scales, indices, weights, num_tokens=num_tokens)
        try:
            return self.dispatch_recv(opened)
        except (WaitTimeout, PeerFailed) as error:
            go_on = f"{opened} is open: go on with it by dispatch_recv(open_rounds[-1]), not by dispatch()"
            raise to_go_on_with(error, go_on) from None

    @is_told
    def dispatch_send(
        self, x: Any, scales: Any | None, indices: Any, weights: Any | None = None, *, num_tokens: Any | None = None
    ) -> Round:
        """Opens a round: offers our tokens to the ranks of their experts. Does not wait.

        The arrays may be reused when it returns. After an error it may be called again, unless a part was sent already
        (an interrupt, memory that ran out): then all further calls raise CrossrailError, and the others are told.
        x: [T, hidden] of dtype. scales: float32 [T, blocks], or None without scale_block. indices: int32 or int64 [T,
            top_k], experts of each token, all different; -1: none. weights: float32 [T, top_k], kept for combine, or
            None. All are C-contiguous, of numpy or torch, in host memory or on the device.
        num_tokens: use only this many of the T; a number, or an array that holds one.
        A UsageError names token and value of an index outside of [-1, experts).
        """
        config = self.config
        self._check_usable()
        begun_s = time.perf_counter()
        ordinal = self._ordinal + 1
        number = ordinal % _ROUNDS
        parity = number % PARITIES
        if parity in self._open:
            raise UsageError(
                f"round {number} takes the place of {self._open[parity]}, which is open: combine that one first"
            )
        memory = self._memory
        given = tokens_given(config, memory, x, scales, indices, weights, num_tokens)
        tokens = given.count
        self._placing.settle(parity, self.timeout_s)
        self._peers.check_alive()
        memory.settle()  # of this parity's last round: far ranks write there once they have our routes
        half = self._near.own[parity]
        routes = drop_routes(config, given.routes, self._peers.silent_in(number))
        slots = np.empty((tokens, config.top_k), np.int32)
        counts = np.empty(config.experts, np.int32)
        _core.moe.count(routes, config.experts, counts, slots)
        order = np.asarray(_core.moe.sort_routes(routes, slots, counts))
        half.order[: len(order)] = order
        half.counts[:] = counts
        routes_hash = 0
        if self._far is not None:
            self._peers.wait_sent(number, self.timeout_s)
            routes_hash = _core.moe.hash_routes(routes) if config.dp_size > 1 else 0
        try:
            if self._far is not None:  # first, since it takes longest
                self._far.send_routes(number, counts, routes_hash)
                routes_for_far = self._placing.routes_for_far(counts, order)
                self._far.send_rows(number, given.x, given.scales, given.weights, routes_for_far)
            if tokens > 0:
                memory.pack(half.rows, given.x, given.scales, None)
            kept = None if given.weights is None else memory.copy_of(given.weights)
            self._open[parity] = opened = Round(
                number, ordinal, begun_s, tokens, len(order), routes.copy(), slots, kept, is_tensor(x), routes_hash
            )
            self._ordinal = ordinal
            self._near.publish(SENT, number)
            self._peers.opened(opened)
        except BaseException as error:
            if self._far is not None or parity in self._open:  # otherwise nobody was told
                self._parting.give_up(f"dispatch_send of round {number}", error)
            raise
        self._stats["rounds"] += 1
        self._stats["tokens_sent"] += tokens
        return opened

    @uncompiled
    def arriving(self, opened: Round) -> tuple[Any, Any | None]:
        """(x, scales) as dispatch_recv will fill them, before it is called: for callers that pass them on first.

        Only with layout "masked": in the other layout the number of rows is not known before.
        """
        config = self.config
        if config.layout != "masked":
            raise UsageError(f"layout is {config.layout!r}: what arrives is known before only with layout 'masked'")
        self._check_usable()
        self._round_of(opened, "arriving", Round).require(Stage.SENT, "arriving")
        rows = config.output_rows[self.rank]
        x, scales = self._outputs[opened.number % PARITIES]
        return (
            self._memory.shown(x[:rows], config.dtype, opened.is_tensor),
            None if scales is None else self._memory.shown(scales[:rows], "float32", opened.is_tensor),
        )

    @is_told
    def dispatch_recv(self, opened: Round) -> Dispatched:
        """Waits until all ranks have sent, and takes the rows of our experts.

        Rows of an expert are in the order of (source rank, token, k). The arrays are views of our memory, valid until
        the round after the next is received. After a WaitTimeout it may be called again. Raises CapacityExceeded,
        PeerLost, EngineClosed; PeerFailed if a rank has closed its AllToAll, or a call has failed there, after which
        this one may be called again, too.
        """
        self._check_usable()
        self._round_of(opened, "dispatch_recv", Round).require(Stage.SENT, "dispatch_recv")
        config, memory, rank, parity = self.config, self._memory, self.rank, opened.number % PARITIES
        if opened.placement is None:
            self._placing.place(opened, self.timeout_s)
        placement = opened.placement
        x, scales = self._outputs[parity]
        for group, source in enumerate(opened.sources):
            half = None if source is None else self._near.halves.get((source, parity))
            if half is None:
                continue
            try:
                moves = np.asarray(placement.pull_near(group, rank, half.order))
            except UsageError as error:  # what that rank wrote makes no sense, and will not by waiting
                self._parting.give_up(f"dispatch of round {opened.number}", error)
                raise
            if len(moves) > 0:
                memory.pull(x, scales, half.rows, moves)
        self._peers.wait_rows(opened.number, self.timeout_s)
        if self._far is not None:
            self._far.pull(opened.number, placement, x, scales, self._near.own[parity].tags)
        if self._masks:
            memory.settle()
            self._peers.check_not_masked(opened.number, self.timeout_s)
        offsets, of_expert = np.asarray(placement.expert_offsets(rank)), np.asarray(placement.expert_rows(rank))
        rows, received = placement.rows_needed(rank), placement.routes_to(rank)
        if self._peers.sums is None:
            opened.where = placement.places(rank, opened.indices, opened.slots)
        else:
            terms = _core.moe.terms_to_take(placement, rank, opened.indices, opened.slots, opened.weights)
            opened.where, opened.weights = terms
        opened.stage = Stage.RECEIVED
        self._stats["rows_received"] += received
        self._stats["bytes_received"] += received * config.x_row_bytes
        return Dispatched(
            x=memory.shown(x[:rows], config.dtype, opened.is_tensor),
            scales=None if scales is None else memory.shown(scales[:rows], "float32", opened.is_tensor),
            counts=memory.shown_numbers(of_expert, opened.is_tensor),
            offsets=memory.shown_numbers(offsets, opened.is_tensor),
            rows=rows,
            round=opened,
        )

    # ---- combine

    @is_told
    def combine(
        self, y: Any, dispatched: Dispatched, weights: Any | None = None, *, out: Any | None = None,
        accumulate: bool = False,
    ) -> Any:  # fmt: skip
        """combine_send and combine_recv. After a WaitTimeout or PeerFailed, continue with combine_recv(dispatched).

        After any other UsageError nothing was sent.
        """
        self._check_usable()
        opened = self._round_of(dispatched, "combine", Dispatched)
        opened.require(Stage.RECEIVED, "combine_send")
        sums, factors = self._sums_given(opened, weights, out, accumulate)
        self.combine_send(y, dispatched)
        try:
            return self._sum(opened, sums, factors, out, accumulate)
        except (WaitTimeout, PeerFailed) as error:
            go_on = "Our part is sent: go on by combine_recv(), not by combine()"
            raise to_go_on_with(error, go_on) from None

    @uncompiled
    def check_combine(
        self, dispatched: Dispatched, weights: Any | None = None, *, out: Any | None = None, accumulate: bool = False
    ) -> None:
        """UsageError for what combine_recv would refuse. Call it before combine_send: after that the round must end."""
        self._check_usable()
        self._sums_given(self._round_of(dispatched, "check_combine", Dispatched), weights, out, accumulate)

    @uncompiled
    def expert_output(self, dispatched: Dispatched) -> Any:
        """Where the experts may write their outputs, so that combine_send copies nothing: [rows, hidden] of
        out_dtype.

        Ranks that share memory read it in their combine_recv, which may be later than ours. So from combine_send on it
        must stay as it is until the round after the next is received, as `dispatched.x` does: by then all ranks have
        ended this round.
        """
        self._check_usable()
        opened = self._round_of(dispatched, "expert_output", Dispatched)
        opened.require(Stage.RECEIVED, "expert_output")
        y = self._near.own[opened.number % PARITIES].y
        opened.output = self._memory.shown(y[: dispatched.rows], self.config.out_dtype, opened.is_tensor)
        return opened.output

    @is_told
    def combine_send(self, y: Any, dispatched: Dispatched) -> None:
        """Offers our experts' outputs to the ranks that the rows came from. Does not wait.

        y: [rows, hidden] of out_dtype, C-contiguous, in the order of dispatched.x: either expert_output(), filled,
            which must stay as it is for a while yet, or any other array, which is copied. Rows of padding are ignored.
        """
        self._check_usable()
        opened = self._round_of(dispatched, "combine_send", Dispatched)
        opened.require(Stage.RECEIVED, "combine_send")
        kept = self._near.own[opened.number % PARITIES].y[: dispatched.rows]
        values = outputs_given(self.config, self._memory, y, dispatched.rows, opened.output)
        if values is not None:
            self._memory.copy(kept, values)
        far = self._far if self._peers.sums is None else None
        if far is not None:
            far.pack_results(opened.number, opened.placement, kept)
        try:
            if far is not None:
                far.send_results(opened.number, opened.placement)
            opened.stage, opened.output = Stage.RETURNED, None
            self._near.publish(RETURNED, opened.number)
        except BaseException as error:
            self._parting.give_up(f"combine_send of {opened}", error)
            raise

    @is_told
    def combine_recv(
        self, answered: Dispatched | Round, weights: Any | None = None, *, out: Any | None = None,
        accumulate: bool = False,
    ) -> Any:  # fmt: skip
        """Waits until all ranks have returned, and sums: out[t] = sum over k of weights[t, k] * y of route (t, k).

        In float32, from k = 0 on, rounded once: the same bits in every run. Masked routes are left out. Ends the round.
        weights: float32 [T, top_k]; None: those given to dispatch. out: [num_tokens, hidden] of bfloat16, float16 or
        float32, which is returned, and is no part of what expert_output() gave; None: a new one of out_dtype.
        accumulate: the sum begins with what out holds.
        After WaitTimeout and PeerFailed it may be called again.
        """
        self._check_usable()
        opened = self._round_of(answered, "combine_recv", Dispatched, Round)
        opened.require(Stage.RETURNED, "combine_recv")
        sums, factors = self._sums_given(opened, weights, out, accumulate)
        return self._sum(opened, sums, factors, out, accumulate)

    def _sums_given(self, opened: Round, weights: Any | None, out: Any | None, accumulate: bool) -> tuple[Any, Any]:
        """The array for sums, and their weights. UsageError."""
        config, memory = self.config, self._memory
        if weights is not None and config.node_sums:
            raise UsageError("weights are given to combine: with node_sums dispatch takes them")
        factors = opened.weights if weights is None else weights_given(config, memory, weights, opened.tokens)
        sums = sums_given(config, memory, opened.tokens, factors, out, accumulate)
        if out is not None:
            check_apart(sums, [half.y for half in self._near.own])
        return sums, factors

    def _sum(self, opened: Round, sums: Any, factors: Any, out: Any | None, accumulate: bool) -> Any:
        """Waits for all results. Ends the round."""
        config, memory, parity = self.config, self._memory, opened.number % PARITIES
        absent = self._peers.wait_results(opened, self.timeout_s)
        where = drop_results(config, opened.where, opened.indices, absent)
        if opened.tokens > 0:
            memory.reduce(sums, self._peers.results(opened.number), where, factors, bool(accumulate))
        if self._masks:
            memory.settle()
            self._peers.check_not_masked(opened.number, self.timeout_s)
        opened.stage = Stage.ENDED
        del self._open[parity]
        self._durations.add(time.perf_counter() - opened.begun_s)
        self._stats["bytes_summed"] += opened.routes * config.y_bytes
        return memory.shown(sums, config.out_dtype, opened.is_tensor) if out is None else out

    @is_told
    def advance(self, opened: Round) -> bool:
        """Does what can be done for a round without waiting; True when its next recv half will not wait.

        For callers that have other things to do meanwhile: rows that do not fit their slot elsewhere are sent here or
        in dispatch_recv, and sums here or in combine_recv. Raises what these do, except WaitTimeout.
        """
        self._check_usable()
        self._round_of(opened, "advance", Round)
        try:
            if opened.stage is Stage.SENT:
                if opened.placement is None:
                    self._placing.place(opened, 0)
                self._peers.wait_rows(opened.number, 0)
            elif opened.stage is Stage.RETURNED:
                self._peers.wait_results(opened, 0)
        except WaitTimeout:
            return False
        return opened.stage in (Stage.SENT, Stage.RETURNED)

    # ---- life

    @property
    def timeout_s(self) -> float:
        """Of each call from now on. UsageError for what is no time of 0 or more: None is not for ever."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        check_seconds(timeout_s=timeout_s)
        self._timeout_s = timeout_s

    @property
    def open_rounds(self) -> tuple[Round, ...]:
        """Rounds that this rank has begun and not ended, the latest last."""
        return tuple(sorted(self._open.values(), key=lambda opened: opened.ordinal))

    @property
    def masked(self) -> tuple[int, ...]:
        """The ranks that calls so far continued without (on_lost="mask"), ascending."""
        return self._peers.masked

    def stats(self) -> dict[str, float]:
        """Since it was made: rounds, tokens_sent, rows_received, bytes_received, bytes_summed, and seconds
        waited.
        """
        return {**self._stats, "waited_s": self._peers.waited_s}

    def durations(self) -> Durations:
        """Durations of completed rounds, from dispatch_send to the end of combine_recv, with the experts' time."""
        return self._durations

    def explain(self) -> str:
        """Which ranks share memory, and how much memory this takes: print it."""
        return self._explanation

    def close(self) -> None:
        """Ends what others may write to; ranks that still wait for this one are told. Idempotent.

        Returned arrays stay readable: what they are of is released with the last of them, and all other memory here.
        Raises WaitTimeout if writes of a rank to this one, or ours to a rank that is stopped, have not ended after
        timeout_s: call it again, or close the engine. The failure of a GPU kernel is raised when everything else is
        done. A `with` block that an error leaves raises that error alone.
        """
        try:
            self._memory.settle()  # torch reuses memory that is released here
        finally:
            self._closed = True
            patience = Countdown(self._engine, self.timeout_s)
            self._parting.farewell(patience.left_s)
            self._peers.close(patience.left_s)
            self._board.close(patience.left_s)
            self._inbox.close(patience.left_s)
            self._outputs.clear()
            self._open.clear()

    # ---- parts

    def _explained(self) -> str:
        config, board, output = self.config, self._board.region.nbytes / 1e6, self._inbox.nbytes / 1e6
        node = [rank for rank in self._near.ranks if rank != self.rank]
        far = ""
        if self._far is not None:
            rows, routes = self._far.rows.nbytes / 1e6, self._far.routes.nbytes / 1e6
            far = f"\n  for ranks that share no memory: rows {rows:.1f} MB, routes {routes:.1f} MB; RDMA NICs pin these"
        return (
            f"rank {self.rank} of {config.world}: {self._layout.expert_count(self.rank)} of {config.experts} experts, "
            f"room for {config.output_rows[self.rank]} rows\n"
            f"  mapped memory: ranks {node}\n"
            f"  rows: in {self._memory.name}\n"
            f"  kernels: {self._memory.kernels}\n"
            f"  board {board:.1f} MB, output of dispatch {output:.1f} MB, resident as far as used{far}"
        )

    def _start_thread(self, cpu: int | None) -> CrossrailError | None:
        """Starts the proxy's thread, if there is a proxy; returns why it cannot."""
        try:
            if self._peers.far is not None:
                self._peers.far.start_thread(cpu)
        except CrossrailError as error:
            return error
        return None

    def _check_usable(self) -> None:
        check_usable("AllToAll", self._closed, self._engine)
        if (given_up := self._parting.given_up) is not None:
            raise given_up

    def _round_of(self, given: Any, call: str, *kinds: type[Round | Dispatched]) -> Round:
        return round_meant(given, call, kinds, self._open.values())
