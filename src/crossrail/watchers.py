"""64-bit words that a GPU kernel or the CPU increments, with callbacks when they change."""

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
        """Adds delta once all earlier work on this CUDA stream has ended. Returns at once.

        It launches a kernel of one thread; during a capture it becomes part of the graph, and adds at each replay.
        on_change, and the transfers that it starts, then see everything that earlier kernels wrote.
        stream: a torch.cuda.Stream, a cudaStream_t as an int, or an object with `cuda_stream` or `__cuda_stream__`;
        None: torch's current stream. It must belong to the context that torch and CUDA's runtime use. Keep this object
        until its kernels have run, and as long as a graph that contains one may be replayed: close() only ends the
        callbacks, the word stays. Only one side may add at a time, a GPU or the CPU: over PCIe a GPU's addition is not
        necessarily atomic for others. Needs NVIDIA's driver and compute capability 7.0; the first call of an engine
        pins the page of its words. Raises UsageError for anything but a stream of a GPU of this host, and on a
        simulated engine; TransportError with CUDA's error. Nothing was launched in these cases. Any thread.
        """
        handle, gpu = stream_of(stream)
        self._add_on(handle, gpu, delta)

    def close(self) -> None:
        """Stops watching: once a call under way has returned, on_change is not called any more. Idempotent.

        Writes that wait for the word (trigger=) are cancelled, as they are when this object is garbage-collected. The
        word keeps its value, and others may add to it, as long as this object lives.
        """
        self._close()
        self._callbacks.forget(self._cookie)
        self._let_go()

    def _let_go(self) -> None:
        self._on_change = _ignore  # it may refer to our array, which refers to us: see Engine._let_go_last

    def __del__(self) -> None:
        if hasattr(self, "_callbacks"):  # otherwise it did not open
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
    """Replaces an on_change that must not be called any more."""
