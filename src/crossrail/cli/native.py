"""The types of `crossrail._core.bench`, the native measuring loops. Times are nanoseconds; regions are indices."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

Memory = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]


class BenchRig(Protocol):
    """One engine with its memory (native/bench/rig.h)."""

    @property
    def address(self) -> bytes: ...
    def close(self) -> None: ...
    def alloc(self, nbytes: int) -> int: ...
    def map_private(self, nbytes: int) -> int: ...
    def descriptor(self, index: int) -> bytes: ...
    def remote(self, descriptor: bytes) -> int: ...
    def group(self, addresses: Sequence[bytes]) -> int: ...
    def view(self, index: int) -> Memory: ...
    def connect(self, address: bytes, timeout_s: float) -> None: ...
    def paths(self, address: bytes) -> list[tuple[str, str, str, float]]: ...
    def explain(self, address: bytes) -> tuple[Any, ...]: ...
    def drive(self, seconds: float) -> None: ...


class BenchFabric(Protocol):
    """Bare libfabric (native/bench/fabric_loop.h). A target is base and key."""

    @property
    def name(self) -> bytes: ...
    def add_memory(self, memory: Memory) -> tuple[int, int]: ...
    def meet(self, name: bytes) -> None: ...
    def writes(
        self, source: Memory, target: tuple[int, int], *, nbytes: int, count: int, window: int, timeout_s: float = ...
    ) -> int: ...
    def pages(
        self,
        source: Memory,
        target: tuple[int, int],
        src_pages: Indices,
        dst_pages: Indices,
        *,
        page_bytes: int,
        window: int,
        timeout_s: float = ...,
    ) -> int: ...
    def receive(self, count: int, *, timeout_s: float = ...) -> None: ...


class Native(Protocol):
    """native/bench/loops.h, messages.h, limits.h, sockets.h and fabric_loop.h."""

    SHARED_BYTES: int

    def Rig(  # noqa: N802 - it is a class
        self,
        name: str,
        *,
        transport: str = ...,
        rails: int | Sequence[str] = ...,
        polling: str = ...,
        spin_us: float = ...,
        private_path: str = ...,
        recorder_entries: int = ...,
        counts_traffic: bool = ...,
        port: int = ...,
        secret: bytes = ...,
        tls: tuple[str, str, str, str] = ...,
    ) -> BenchRig: ...
    def FabricLoop(self, provider: str, rail: str) -> BenchFabric: ...  # noqa: N802 - likewise
    def run_writes(
        self,
        rig: BenchRig,
        src: int,
        dst: int,
        *,
        nbytes: int,
        span_bytes: int,
        count: int,
        window: int,
        imm: int | None = ...,
        ack: int | None = ...,
        timeout_s: float = ...,
    ) -> int: ...
    def run_reads(
        self,
        rig: BenchRig,
        dst: int,
        src: int,
        *,
        nbytes: int,
        span_bytes: int,
        count: int,
        window: int,
        timeout_s: float = ...,
    ) -> int: ...
    def run_paged_writes(
        self,
        rig: BenchRig,
        src: int,
        src_pages: Indices,
        dst: int,
        dst_pages: Indices,
        *,
        page_bytes: int,
        batch_pages: int,
        rounds: int = ...,
        window: int = ...,
        imm: int | None = ...,
        ack: int | None = ...,
        timeout_s: float = ...,
    ) -> int: ...
    def run_scatters(
        self,
        rig: BenchRig,
        src: int,
        dsts: Sequence[int],
        group: int | None = ...,
        *,
        slice_bytes: int,
        span_bytes: int,
        count: int,
        window: int,
        imm: int | None = ...,
        ack: int | None = ...,
        timeout_s: float = ...,
    ) -> int: ...
    def run_ping_pong(
        self,
        rig: BenchRig,
        src: int,
        dst: int,
        landing: int,
        *,
        imm_out: int,
        imm_in: int,
        rounds: int,
        first: bool,
        verify: bool = ...,
        nbytes: int = ...,
        round_ns: Indices | None = ...,
        timeout_s: float = ...,
    ) -> int: ...
    def run_receivers(
        self,
        rigs: Sequence[BenchRig],
        *,
        imm: int,
        count: int,
        reply_src: int,
        reply_dst: int,
        reply_imm: int,
        timeout_s: float = ...,
    ) -> int: ...
    def run_messages(
        self,
        rig: BenchRig,
        peer: bytes,
        *,
        nbytes: int,
        count: int,
        window: int,
        sender: bool,
        verify: bool = ...,
        timeout_s: float = ...,
    ) -> int: ...
    def run_message_ping_pong(
        self,
        rig: BenchRig,
        peer: bytes,
        *,
        nbytes: int,
        count: int,
        first: bool,
        verify: bool = ...,
        timeout_s: float = ...,
    ) -> int: ...
    def copy_in_calls(self, dst: Memory, src: Memory, call_bytes: int) -> int: ...
    def copy_pages(self, dst: Memory, src: Memory, dst_pages: Indices, src_pages: Indices, page_bytes: int) -> int: ...
    def fill_work_requests(self, dst_pages: Indices, src_pages: Indices, page_bytes: int, rounds: int) -> int: ...
    def flag_ping_pong(self, fd: int, *, first: bool, start: int, rounds: int, timeout_s: float = ...) -> int: ...
    def slot_stream(self, fd: int, *, producer: bool, start: int, count: int, timeout_s: float = ...) -> int: ...
    def tune_socket(self, fd: int) -> None: ...
    def socket_stream(
        self,
        fd: int,
        memory: Memory,
        *,
        sender: bool,
        nbytes: int,
        count: int,
        window: int,
        wait: str = ...,
        timeout_s: float = ...,
    ) -> int: ...
    def socket_pages(
        self,
        fd: int,
        memory: Memory,
        *,
        sender: bool,
        src_pages: Indices,
        dst_pages: Indices,
        page_bytes: int,
        batch_pages: int,
        wait: str = ...,
        timeout_s: float = ...,
    ) -> int: ...
    def socket_ping_pong(
        self, fd: int, *, first: bool, nbytes: int, rounds: int, wait: str = ..., timeout_s: float = ...
    ) -> int: ...
    def socket_messages(
        self, fd: int, *, sender: bool, nbytes: int, count: int, wait: str = ..., timeout_s: float = ...
    ) -> int: ...
    def nothing(self, src: Any, dst: Any, length: int, *, src_offset: int = ..., dst_offset: int = ...) -> None: ...


def load_native() -> Native:
    """The loops of this build."""
    return cast(Native, importlib.import_module("crossrail._core").bench)
