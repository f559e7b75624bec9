"""Launches the kernels of each half of a round, on one rank's memory."""

from __future__ import annotations

from typing import Any

import torch

from crossrail import _core
from crossrail._torch import told, wait_for_kernels
from crossrail.errors import UsageError
from crossrail.moe.config import Config
from crossrail.moe.graph.board import GraphBoard
from crossrail.moe.graph.kernels import GraphKernels, Own, Routes
from crossrail.moe.graph.memory import GraphMemory
from crossrail.moe.graph.reference import ReferenceGraphKernels
from crossrail.moe.graph.rounds import Outputs
from crossrail.moe.graph.tensors import Tensors
from crossrail.moe.links.far import Far


class Steps:
    """One rank's steps. Owner: of everything here. While it lives, the rows of ranks that far reaches stay mapped.

    kernels, board, memory: as GraphKernels takes them. own: which experts are ours. opened: int64 [1], rounds that
    kernels have opened. room: rows of an output.
    """

    def __init__(
        self,
        config: Config,
        layout: _core.moe.Layout,
        far: Far,
        rank: int,
        kernels: GraphKernels | None,
        tensors: Tensors,
    ) -> None:
        """kernels: None: Triton's on a GPU, else torch's own operations.

        Pins memory and loads kernels. This takes time, and may wait for kernels that are running. So it is made before
        any rank has a round, while no kernel waits for another rank.
        """
        device = tensors.device
        self._config = config
        self._tensors = tensors
        self.kernels = _kernels(tensors.is_gpu) if kernels is None else kernels
        experts = layout.expert_count(rank)
        self.own = Own.of(config.split, rank, config.dp_size, device)
        self.room = config.output_rows[rank]
        with told(f"memory for rounds on {device}"):
            self.board = GraphBoard(config, experts, device)
            self.memory = GraphMemory(config, far, rank, device)
            self.opened = torch.zeros(1, dtype=torch.int64, device=device)
        if tensors.is_gpu:
            self._load()

    def _load(self) -> None:
        """Compiles and loads the kernels, by launching a round without rows of which other ranks learn nothing."""
        config, device = self._config, self._tensors.device
        with self._tensors.launching():
            number = torch.zeros(1, dtype=torch.int64, device=device)
            outputs = self.new_outputs()
            tokens = config.max_tokens
            x = torch.empty((tokens, config.hidden), dtype=outputs.x.dtype, device=device)
            scales = None if outputs.scales is None else torch.empty((tokens, config.blocks), device=device)
            for kind in (torch.int32, torch.int64):
                indices = torch.full((tokens, config.top_k), -1, dtype=kind, device=device)
                routes = self.new_routes(tokens)
                self.share(routes, indices, None, number)
                self.share(routes, indices, number, number)
            self.send(x, scales, routes, number)
            self.take(outputs, number)
            y = torch.empty((self.room, config.hidden), dtype=getattr(torch, config.out_dtype), device=device)
            self.give(y, number)
            sums = torch.empty((tokens, config.hidden), dtype=y.dtype, device=device)
            weights = torch.ones((tokens, config.top_k), device=device)
            for accumulate in (False, True):
                self.sum(sums, routes, weights, accumulate, number)
        wait_for_kernels([str(device)])

    def new_routes(self, tokens: int) -> Routes:
        """New tables for a dispatch of so many tokens."""
        shape = (tokens, self._config.top_k)
        sizes = shape, (*shape, 2), (self._config.experts,), shape
        return Routes(*(torch.empty(size, dtype=torch.int32, device=self._tensors.device) for size in sizes))

    def new_outputs(self) -> Outputs:
        """New outputs of a dispatch."""
        config, experts, device = self._config, self.own.end - self.own.first, self._tensors.device
        x = torch.empty((self.room, config.hidden), dtype=getattr(torch, config.dtype), device=device)
        scales = None
        if config.blocks:
            scales = torch.empty((self.room, config.blocks), dtype=torch.float32, device=device)
        counts, offsets = (torch.empty(n, dtype=torch.int32, device=device) for n in (experts, experts + 1))
        return Outputs(x, scales, counts, offsets)

    # ---- launches; see GraphKernels

    def share(self, routes: Routes, indices: Any, tokens: Any | None, number: Any) -> None:
        self.kernels.share(self.board, routes.kept, indices, tokens, number)

    def send(self, x: Any, scales: Any | None, routes: Routes, number: Any) -> None:
        self.kernels.send(self.memory, self.own, x, scales, routes, number)

    def take(self, outputs: Outputs, number: Any) -> None:
        self.kernels.take(self.memory, self.board, *outputs, number)

    def give(self, y: Any, number: Any) -> None:
        self.kernels.give(self.memory, self.board, y, number)

    def sum(self, out: Any, routes: Routes, weights: Any, accumulate: bool, number: Any) -> None:
        self.kernels.sum(self.memory, out, routes.where, weights, accumulate, number)


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
