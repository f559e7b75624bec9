"""The thread that posts writes for rounds of kernels, and how it and the kernels wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from crossrail import _core
from crossrail._torch import told, wait_for_kernels
from crossrail.moe.config import Config
from crossrail.moe.graph.signals import Signals
from crossrail.moe.graph.steps import Steps
from crossrail.moe.graph.tensors import Tensors
from crossrail.moe.links.far import Far


class PostingThread:
    """One rank's thread; see native/moe/stream_proxy.h. number: int64 [1] on the device, the round's.

    proxy: the native half. Lifecycle: 1. made, when all ranks are ready: runs. 2. rounds. 3. stop().
    """

    def __init__(
        self,
        config: Config,
        layout: _core.moe.Layout,
        far: Far,
        rank: int,
        steps: Steps,
        tensors: Tensors,
        timeout_s: float,
        cpu: int | None,
    ) -> None:
        """cpu: its core; None: any."""
        device = tensors.device
        self._opened = steps.opened
        with told(f"memory for rounds on {device}"):
            self._signals = Signals(config, far, rank, device)
        self.proxy = _core.moe.StreamProxy(
            far.proxy, layout, rank, steps.board.memory, steps.board.as_native, rows_limits=config.rows_limits,
            routes_limits=config.routes_limits, timeout_s=timeout_s, cpu=cpu,
            gpu=device.index if tensors.is_gpu else -1,
        )  # fmt: skip
        try:
            if tensors.is_gpu:
                self._load(tensors)
        except BaseException:
            self.stop()
            raise

    def _load(self, tensors: Tensors) -> None:
        """Loads its kernels too, before one of them has to wait."""
        with tensors.launching() as stream:
            number = torch.zeros(1, dtype=torch.int64, device=tensors.device)
            self.proxy.publish("ended", number.data_ptr(), stream)
            self.proxy.wait("rows", number.data_ptr(), stream)
        wait_for_kernels([str(tensors.device)])

    def open(self, number: Any, stream: int) -> None:
        """Launches: opens the next round, and sets number."""
        self.proxy.open(self._opened.data_ptr(), number.data_ptr(), stream)

    def publish(self, word: str, number: Any, stream: int, step: str | None = None) -> None:
        """Launches: tells the thread that the round has got to this word. step: also tells the ranks that we reach."""
        if step is None:
            self.proxy.publish(word, number.data_ptr(), stream)
        else:
            sent = self._signals.sent[step]
            self.proxy.publish(word, number.data_ptr(), stream, sent.at, sent.count)

    def wait(self, step: str, number: Any, stream: int, look: Callable[[], None]) -> None:
        """Launches: waits until all of this step has come. Without a GPU it waits here, and calls look() meanwhile: if
        that raises, the wait may be repeated.
        """
        awaited, needs_words = self._signals.awaited[step], self._signals.needs_words[step]
        while not self.proxy.wait(step, number.data_ptr(), stream, awaited.at, awaited.count, needs_words):
            look()

    def stop(self) -> None:
        """Ends it; nothing waits for it any more. Idempotent."""
        self.proxy.stop()

    def close(self) -> None:
        """Like stop(), once no kernel of rounds is running; also releases its GPU memory. Idempotent."""
        self.proxy.close()
