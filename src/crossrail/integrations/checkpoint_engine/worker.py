"""The inference engine's worker at the other end of a ZeroMQ socket: checkpoint_engine.worker.update_weights_from_ipc.

Strict turn-taking: each message is answered before the next is sent. First a handle of the buffer, then the layout of
each bucket, then None: the worker releases the buffer, then None again: it finishes. An exception in place of any of
these ends the worker's part. Empty answers mean success; others are the worker's traceback.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from crossrail._extras import needs
from crossrail.integrations.checkpoint_engine.errors import CheckpointUpdateFailed
from crossrail.integrations.checkpoint_engine.meeting import Meeting

with needs(__name__, "'crossrail[checkpoint-engine]'"):
    import zmq

log = logging.getLogger("crossrail.checkpoint_engine")

_SLICE_MS = 100
_COMING_MS = 2000  # for a worker that is on its way when an update fails: later ones find nobody, and wait
_GRACE_S = 10.0  # for a worker to learn that an update has failed, and for the request to return then


class Worker:
    """Turns with the worker of this rank. A context manager: an exception within ends the worker's part, too.

    request: called with nothing in a thread of its own, to make the engine's workers come to the socket. What it raises
    ends the update, also when it is only another rank's worker that it was to bring.
    """

    def __init__(self, socket: zmq.Socket[bytes], request: Callable[[], None], meeting: Meeting) -> None:
        self._socket = socket
        self._meeting = meeting
        self._request = request
        self._error: BaseException | None = None
        self._is_its_turn = False
        self._thread = threading.Thread(target=self._ask, name="crossrail-request", daemon=True)

    def __enter__(self) -> Worker:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._meeting.tell(error)
                self._end(f"the update failed: {error}")
        finally:
            self._socket.close(linger=int(_GRACE_S * 1000))
        if error is None:
            self._join()
        else:
            self._thread.join(_GRACE_S)
            if self._thread.is_alive():
                log.warning("the update failed, and the request to the inference engine has not returned yet")

    def send(self, message: Any) -> None:
        """Waits for the worker to connect, if it has not yet. Raises CheckpointUpdateFailed."""
        self._await(zmq.POLLOUT, "has not connected")
        self._socket.send_pyobj(message)
        self._is_its_turn = True

    def answer(self) -> None:
        """Waits for the worker's answer. Raises CheckpointUpdateFailed when it is a bad one."""
        self._await(zmq.POLLIN, "has not answered")
        said = self._socket.recv()
        self._is_its_turn = False
        if said:
            raise CheckpointUpdateFailed(
                f"its worker could not load the weights:\n{said.decode(errors='replace').rstrip()}"
            )

    def _await(self, event: int, what: str) -> None:
        deadline = time.monotonic() + self._meeting.timeout_s
        while not self._socket.poll(_SLICE_MS, event):
            self._raise_of_request()
            self._meeting.look()
            if time.monotonic() > deadline:
                raise CheckpointUpdateFailed(f"its worker {what} within {self._meeting.timeout_s:g} s")
        self._meeting.sign()

    def _end(self, why: str) -> None:
        """Tells the worker, if there is one: it waits for a message without a timeout."""
        if self._is_its_turn and self._socket.poll(int(_GRACE_S * 1000), zmq.POLLIN):
            self._socket.recv()
            self._is_its_turn = False
        if not self._is_its_turn and self._socket.poll(_COMING_MS, zmq.POLLOUT):
            self._socket.send_pyobj(RuntimeError(why))

    def _ask(self) -> None:
        try:
            self._request()
        except BaseException as error:
            self._error = error

    def _raise_of_request(self) -> None:
        if self._error is not None:
            error = self._error
            raise CheckpointUpdateFailed(
                f"its request to the inference engine failed: {type(error).__name__}: {error}"
            ) from error

    def _join(self) -> None:
        deadline = time.monotonic() + self._meeting.timeout_s
        while self._thread.is_alive():
            self._thread.join(_SLICE_MS / 1000)
            self._meeting.look()
            if time.monotonic() > deadline:
                raise CheckpointUpdateFailed(
                    f"its request to the inference engine has not returned {self._meeting.timeout_s:g} s after its "
                    "worker was done"
                )
        self._raise_of_request()
