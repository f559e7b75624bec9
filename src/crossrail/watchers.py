"""64-bit words that a GPU kernel or the CPU increments, and callbacks when they change."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from crossrail import _core, _raise
from crossrail._closing import Closing
from crossrail._notify import callbacks_of, weakly
from crossrail._torch import stream_of
from crossrail.errors import EngineClosed

if TYPE_CHECKING:
    import numpy.typing as npt


class Watcher(_core.Watcher, Closing):
    """A word, zero at first, and a call of on_change(old, new) after it changed. Made by Engine.alloc_watcher.

    Values in between may be skipped, none is reported twice, the last is always reported. What add() and store() change
    is announced at once; for what others write, a thread looks at the word every watcher_poll_us from the first use of
    `address`, `array` or add_on() on, which takes a part of a core.
    on_change runs on the engine's callback thread; if it raises, that is logged and watching goes on. Watching ends
    with close(), with the engine, or when this object is collected: hold it, or its array. Any thread.
    """

    def __init__(self, engine: _core.Engine, on_change: Callable[[int, int], object]) -> None:
        _raise.check_callable(on_change, "on_change")
        callbacks = callbacks_of(engine)
        callbacks.start()
        self._cookie = callbacks.register(weakly(self._changed), once=False)
        self._on_change = on_change
        try:
            super().__init__(engine, callbacks.notifier, self._cookie)
        except BaseException:
            callbacks.forget(self._cookie)
            raise
        self._callbacks = callbacks
        callbacks.start()

    @property
    def array(self) -> npt.NDArray[np.uint64]:
        """The word as a numpy array of shape (1,) that shares it and keeps it alive. Writing to it is not atomic."""
        return np.frombuffer(self._memoryview(), dtype=np.uint64)

    def add_on(self, stream: object = None, delta: int = 1) -> None:
        """Adds once everything that this CUDA stream was given before has ended; returns at once.

        A kernel of one thread does it: while the stream is captured it goes into the graph, and adds at each replay.
        on_change then sees, and what it starts reads, all that the kernels before it wrote.
        stream: a torch.cuda.Stream, a cudaStream_t as an int, an object with `cuda_stream` or `__cuda_stream__`; None:
        torch's current one. Of the context that torch and CUDA's runtime use. Keep this object until its kernels have
        run, and as long as a graph that has one may be replayed: close() only ends the callbacks, the word stays.
        One adds at a time, a GPU or the CPU: the GPU's addition need not be atomic to others where it is on PCIe.
        Needs NVIDIA's driver and compute capability 7.0; the first call of an engine pins the page of its words.
        Raises UsageError for what is no stream of a GPU here, and on a simulated engine; TransportError with CUDA's
        error. Nothing was launched then. Any thread.
        """
        handle, gpu = stream_of(stream)
        self._add_on(handle, gpu, delta)

    def close(self) -> None:
        """Stops watching: on_change is called no more, once a call under way has returned. Idempotent.

        Writes that wait for the word (trigger=) are cancelled; so they are when this object is collected.

        The word stays what it is, and others may add to it, for as long as this object lives.
        """
        self._close()
        self._callbacks.forget(self._cookie)
        self._let_go()

    def _let_go(self) -> None:
        self._on_change = _ignore  # it may refer to our array, and that to us: see Engine._let_go_last

    def __del__(self) -> None:
        if hasattr(self, "_callbacks"):  # else it did not open
            self.close()

    def _changed(self) -> None:
        old, new = self._take()
        if old != new:
            self._on_change(old, new)

    def __repr__(self) -> str:
        if not hasattr(self, "_callbacks"):
            return "<Watcher that did not open>"
        try:
            return f"<Watcher at {self.address:#x}: {self.value}>"
        except EngineClosed:
            return _raise.inherited(self)


def _ignore(_old: int, _new: int) -> None:
    """Instead of an on_change that is called no more."""
