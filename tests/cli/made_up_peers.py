"""Libraries that misbehave as real ones do, for test_bench_peers.py: each is a bare socket with one fault."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Sequence

from crossrail.cli.bench.peers.limits import Socket


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


class Crashes(Socket):
    def post(self, src_offset: int, dst_offset: int, nbytes: int) -> None:
        if nbytes >= 4096:  # messages go through here, too
            _crash()
        super().post(src_offset, dst_offset, nbytes)


class CrashesAtExit(Socket):
    def close(self) -> None:
        super().close()
        atexit.register(_crash)


class Hangs(Socket):
    def take_stream(self, places: Sequence[tuple[int, int]], nbytes: int, count: int, window: int) -> None:
        time.sleep(3600)


class LosesAByte(Socket):
    def take_stream(self, places: Sequence[tuple[int, int]], nbytes: int, count: int, window: int) -> None:
        super().take_stream(places, nbytes, count, window)
        self.memory[places[(count - 1) % len(places)][1] + nbytes - 1] ^= 1


class SwapsPages(Socket):
    def take_pages(self, page_bytes: int, dst: object) -> None:
        super().take_pages(page_bytes, dst[::-1])  # type: ignore[index]


class EchoesWrongly(Socket):
    def take(self, nbytes: int) -> None:
        super().take(nbytes)
        if nbytes > 8 and not self.is_sender:
            self.memory[self.incoming] ^= 1


class IsNotConfigured(Socket):
    def open(self) -> bytes:
        raise OSError("libthat.so.1: cannot open shared object file:\n  No such file or directory")


class DiesOnImport(Socket):
    def __init__(self, *_: object) -> None:
        print("Fatal: no device", flush=True)
        os._exit(7)
