"""A worker process of a run, the same on either side: one engine, driven by calls from its parent.

The loops are native (native/bench/loops.h). Before a timed loop the two workers exchange a word, so that the writer's
clock does not start before the other worker is in its loop.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import time
from typing import Any

import numpy as np

from crossrail import _core
from crossrail.cli.bench.arrays import Indices, Memory
from crossrail.cli.bench.hosts.wire import CONTROL_BYTES
from crossrail.cli.bench.passes import fill
from crossrail.cli.child import answer_calls
from crossrail.errors import CrossrailError
from crossrail.tls import tls_of

# Immediates. Each side has counters of its own, so the same number in both directions is two counters.
IMM_DATA, IMM_ACK, IMM_GATE, IMM_PING = 1, 2, 3, 4
PAGES_PER_CALL = 4096
_CONNECT_S = 20.0
_COPY_CALL_BYTES = 32 << 20


class Worker:
    """State between calls. memory: what the other side writes to and reads from; own: as much memory, unknown to it."""

    def __init__(self) -> None:
        self._rig: _core.bench.Rig
        self._memory = self._own = self._control = self._far_memory = self._far_control = 0
        self._span_bytes = 0
        self._peer = b""
        self._listener: socket.socket | None = None
        self._bare: socket.socket | None = None
        self._token = b""
        self._pages: tuple[Indices, Indices] | None = None

    def open(
        self, name: str, transport: str, rails: int | list[str], port: int, secret: str, span_bytes: int, polling: str
    ) -> dict[str, str]:
        """The engine and its memory, faulted in; under TLS if the environment says so. Returns a wire.Part."""
        self._rig = _core.bench.Rig(
            name, transport=transport, rails=rails, polling=polling, port=port, secret=bytes.fromhex(secret),
            tls=tls_of(None, transport),
        )  # fmt: skip
        self._span_bytes = span_bytes
        self._memory = self._rig.alloc(span_bytes)
        self._control = self._rig.alloc(CONTROL_BYTES)
        return {
            "address": self._rig.address.hex(),
            "memory": self._rig.descriptor(self._memory).hex(),
            "control": self._rig.descriptor(self._control).hex(),
        }

    def open_own(self) -> None:
        """Memory for reads to land in, and for memcpy; only the side that drives needs it."""
        self._own = self._rig.alloc(self._span_bytes)

    def meet(self, address: str, memory: str, control: str) -> None:
        """Connects with the worker over there."""
        self._peer = bytes.fromhex(address)
        self._far_memory = self._rig.remote(bytes.fromhex(memory))
        self._far_control = self._rig.remote(bytes.fromhex(control))
        self._rig.connect(self._peer, _CONNECT_S)

    def explain(self) -> list[Any]:
        """The fields of crossrail.peers.Explanation."""
        return list(self._rig.explain(self._peer))

    def connected(self) -> int:
        """An empty call: an answer shows that the worker is ready."""
        return time.monotonic_ns()

    def clear(self, nbytes: int) -> None:
        """Zero the first bytes of the memory."""
        self._rig.view(self._memory)[:nbytes] = 0

    def clear_own(self, nbytes: int) -> None:
        """Clears the other memory."""
        self._rig.view(self._own)[:nbytes] = 0

    def fill(self, nbytes: int, seed: int) -> str:
        """Bytes that differ everywhere, into the memory. Returns their SHA-256."""
        view = self._rig.view(self._memory)[: -(-nbytes // 8) * 8]
        fill(view, seed)
        return hashlib.sha256(view[:nbytes].data).hexdigest()

    def digest(self, nbytes: int) -> str:
        """SHA-256 of the first bytes of the memory."""
        return hashlib.sha256(self._rig.view(self._memory)[:nbytes].data).hexdigest()

    def digest_own(self, nbytes: int) -> str:
        """The digest of the other memory."""
        return hashlib.sha256(self._rig.view(self._own)[:nbytes].data).hexdigest()

    # --- the side that drives: [begun, ended] on the clock that all processes of a host share, in ns ---

    def write(self, nbytes: int, window: int, count: int, span_bytes: int, timeout_s: float) -> list[int]:
        """So many writes through the span, until the other side reports that it has counted them all."""
        self._gate(first=True, timeout_s=timeout_s)
        begun = time.monotonic_ns()
        _core.bench.run_writes(
            self._rig, self._memory, self._far_memory, nbytes=nbytes, span_bytes=span_bytes, count=count,
            window=window, imm=IMM_DATA, ack=IMM_ACK, timeout_s=timeout_s,
        )  # fmt: skip
        return [begun, time.monotonic_ns()]

    def read(self, nbytes: int, window: int, count: int, span_bytes: int, timeout_s: float) -> list[int]:
        """So many reads through the span, into the own memory."""
        begun = time.monotonic_ns()
        _core.bench.run_reads(
            self._rig, self._own, self._far_memory, nbytes=nbytes, span_bytes=span_bytes, count=count, window=window,
            timeout_s=timeout_s,
        )  # fmt: skip
        return [begun, time.monotonic_ns()]

    def paged(self, nbytes: int, window: int, count: int, span_bytes: int, timeout_s: float) -> list[int]:
        """Pages of nbytes, `count` of them or as many whole times all of the span's, see paged_work."""
        pages, rounds = paged_work(count, span_bytes // nbytes)
        src, dst = self._permutations(span_bytes // nbytes)
        self._gate(first=True, timeout_s=timeout_s)
        begun = time.monotonic_ns()
        _core.bench.run_paged_writes(
            self._rig, self._memory, src[:pages], self._far_memory, dst[:pages], page_bytes=nbytes,
            batch_pages=PAGES_PER_CALL, rounds=rounds, window=window, imm=IMM_DATA, ack=IMM_ACK, timeout_s=timeout_s,
        )  # fmt: skip
        return [begun, time.monotonic_ns()]

    def paged_digest(self, nbytes: int, span_bytes: int) -> str:
        """The digest that the other side's memory must have after all pages of the span were written."""
        src, dst = self._permutations(span_bytes // nbytes)
        source = self._rig.view(self._memory)[:span_bytes].reshape(-1, nbytes)
        expected = np.empty_like(source)
        expected[dst] = source[src]
        return hashlib.sha256(expected.data).hexdigest()

    def ping_pong(self, nbytes: int, count: int, verify: bool, timeout_s: float, first: bool = True) -> list[int]:
        """Round trips. Returns how long each took, in ns; the second side nothing."""
        round_ns = np.zeros(count if first else 0, np.int64)
        _core.bench.run_ping_pong(
            self._rig, self._control, self._far_control, self._control, imm_out=IMM_PING, imm_in=IMM_PING,
            rounds=count, first=first, verify=verify, nbytes=nbytes, round_ns=round_ns if first else None,
            timeout_s=timeout_s,
        )  # fmt: skip
        taken: list[int] = round_ns.tolist()
        return taken

    # --- the side that serves ---

    def receive(self, count: int, timeout_s: float) -> None:
        """Count so many arrivals, then say so."""
        self._gate(first=False, timeout_s=timeout_s)
        _core.bench.run_receivers(
            [self._rig], imm=IMM_DATA, count=count, reply_src=self._control, reply_dst=self._far_control,
            reply_imm=IMM_ACK, timeout_s=timeout_s,
        )  # fmt: skip

    # --- limits ---

    def copy(self, nbytes: int, span_bytes: int) -> list[int]:
        """memcpy in calls of so many bytes, once through the span, in one thread. Returns what `write` does."""
        calls = min(nbytes, _COPY_CALL_BYTES)
        begun = time.monotonic_ns()
        _core.bench.copy_in_calls(self._view(self._own, span_bytes), self._view(self._memory, span_bytes), calls)
        return [begun, time.monotonic_ns()]

    def copy_pages(self, nbytes: int, span_bytes: int) -> list[int]:
        """memcpy of the pages that `paged` writes, in the same order."""
        src, dst = self._permutations(span_bytes // nbytes)
        own, memory = self._view(self._own, span_bytes), self._view(self._memory, span_bytes)
        begun = time.monotonic_ns()
        _core.bench.copy_pages(own, memory, dst, src, nbytes)
        return [begun, time.monotonic_ns()]

    def listen(self, timeout_s: float) -> str:
        """Listens for one bare connection at the first rail's address. Returns "HOST PORT TOKEN"."""
        endpoints = self._rig.explain(self._peer)[6]
        if not endpoints:
            raise CrossrailError("this worker has no TCP endpoint")
        host = endpoints[0][0].rpartition(":")[0].strip("[]")
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._listener.settimeout(timeout_s)
        self._token = np.random.default_rng().bytes(16)
        return f"{host} {self._listener.getsockname()[1]} {self._token.hex()}"

    def connect_bare(self, host: str, port: int, token: str, timeout_s: float) -> None:
        """Connects to where the other side listens."""
        self._bare = socket.create_connection((host, port), timeout_s)
        _core.bench.tune_socket(self._bare.fileno())
        self._bare.sendall(bytes.fromhex(token))

    def _accept_bare(self, timeout_s: float) -> socket.socket:
        if self._bare is None:
            assert self._listener is not None
            with self._listener as listener:
                connection = listener.accept()[0]
            connection.settimeout(timeout_s)
            given = b""
            while len(given) < len(self._token) and (more := connection.recv(len(self._token) - len(given))):
                given += more
            if not hmac.compare_digest(given, self._token):
                connection.close()
                raise CrossrailError("somebody else connected to the port of the bare limit")
            _core.bench.tune_socket(connection.fileno())
            self._bare = connection
        return self._bare

    def stream(
        self, nbytes: int, window: int, count: int, sender: bool, spin: bool, span_bytes: int, timeout_s: float
    ) -> list[int]:
        """Messages over the bare connection, through as much memory. Returns what `write` does."""
        bare = self._accept_bare(timeout_s)
        begun = time.monotonic_ns()
        _core.bench.socket_stream(
            bare.fileno(), self._view(self._memory, span_bytes), sender=sender, nbytes=nbytes, count=count,
            window=window, wait="spin" if spin else "block", timeout_s=timeout_s,
        )  # fmt: skip
        return [begun, time.monotonic_ns()]

    def _gate(self, *, first: bool, timeout_s: float) -> None:
        """Returns on both sides within a message's time once both are here."""
        _core.bench.run_ping_pong(
            self._rig, self._control, self._far_control, self._control, imm_out=IMM_GATE, imm_in=IMM_GATE, rounds=1,
            first=first, timeout_s=timeout_s,
        )  # fmt: skip

    def _view(self, region: int, nbytes: int) -> Memory:
        return self._rig.view(region)[:nbytes]

    def _permutations(self, pages: int) -> tuple[Indices, Indices]:
        """Permutations of sources and of targets; the last ones are kept."""
        if self._pages is None or len(self._pages[0]) != pages:
            rng = np.random.default_rng(pages)
            self._pages = (rng.permutation(pages).astype(np.int64), rng.permutation(pages).astype(np.int64))
        return self._pages


def paged_work(count: int, pages_max: int) -> tuple[int, int]:
    """How `count` pages are written, of which the span has pages_max: (pages of a round, rounds)."""
    return (count, 1) if count <= pages_max else (pages_max, count // pages_max)


def main() -> None:
    """Answer the parent's calls: every public method of Worker."""
    worker = Worker()
    names = (name for name in dir(Worker) if not name.startswith("_"))
    with contextlib.suppress(KeyboardInterrupt):
        answer_calls({name: getattr(worker, name) for name in names})


if __name__ == "__main__":
    main()
