"""The writing process of `crossrail demo`: reads the file and writes it page by page into the other process's pool."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import crossrail as xr
from crossrail import _core
from crossrail.cli.child import answer_calls
from crossrail.cli.demo.plan import Segment, shuffled_pages, tail_places
from crossrail.cli.source import SourceFile

# Pages of one submit: enough to amortise the call, few enough that the receiver sees the count grow.
_BATCH_PAGES = 1024
_TRANSFER_TIMEOUT_S = 60.0
_COPY_CALL_BYTES = 32 << 20


class Writer:
    """State between the calls of the parent. Calls come one at a time."""

    def __init__(self) -> None:
        self._engine: xr.Engine
        self._file: SourceFile
        self._source: xr.Region
        self._own_pool: xr.Region
        self._pool: xr.RegionDescriptor
        self._imm = 0
        self._digest = hashlib.sha256()
        self._segment: Segment

    def open(self, path: str, rails: int, pool: str, imm: int, source_bytes: int) -> None:
        """Open file and engine. pool: the target's descriptor, in hex. source_bytes: the longest segment."""
        self._file = SourceFile(Path(path))
        self._engine = xr.Engine("demo-writer", rails=rails)
        self._pool = xr.RegionDescriptor.from_bytes(bytes.fromhex(pool))
        self._imm = imm
        self._source = self._engine.alloc(source_bytes, populate=True)
        # Same kind and length as the pool: the target of the memcpy that we are compared with.
        self._own_pool = self._engine.alloc(self._pool.nbytes, populate=True)
        self._engine.connect(self._pool.owner)

    def load(self, segment: dict[str, Any]) -> str:
        """Read a segment of the file. Returns the SHA-256 of the file up to and including it."""
        self._segment = Segment(**segment)
        source = self._source.view()[: self._segment.nbytes]
        self._file.read_into(source, self._segment.offset)
        self._digest.update(source)
        return self._digest.hexdigest()

    def write(self) -> int:
        """Write every page of the segment, each with the immediate. Returns when it began, in monotonic ns."""
        sources, places = shuffled_pages(self._segment)
        tails = tail_places(self._segment)
        begun_ns = time.monotonic_ns()
        transfers = [
            self._write_pages(sources[i : i + _BATCH_PAGES], places[i : i + _BATCH_PAGES])
            for i in range(0, len(sources), _BATCH_PAGES)
        ]
        transfers += [self._write_tail(int(place)) for place in tails]
        for transfer in transfers:
            transfer.wait(_TRANSFER_TIMEOUT_S)
        return begun_ns

    def _write_pages(self, sources: Any, places: Any) -> xr.Transfer:
        page_bytes = self._segment.page_bytes
        return self._engine.submit_paged_writes(self._source, sources, self._pool, places, page_bytes, imm=self._imm)

    def _write_tail(self, place: int) -> xr.Transfer:
        segment = self._segment
        return self._engine.submit_write(
            self._source,
            self._pool,
            segment.tail_bytes,
            src_offset=segment.whole_pages * segment.page_bytes,
            dst_offset=place * segment.page_bytes,
            imm=self._imm,
        )

    def copy(self) -> int:
        """Copies the same bytes by one thread's memcpy, again and again into a pool of our own. Returns nanoseconds."""
        segment = self._segment
        source = self._source.array()[: segment.nbytes]
        pool = self._own_pool.array()
        copy_bytes = segment.pages * segment.page_bytes
        took_ns = 0
        for copy in range(segment.copies):
            target = pool[copy * copy_bytes : copy * copy_bytes + segment.nbytes]
            took_ns += _core.bench.copy_in_calls(target, source, _COPY_CALL_BYTES)
        return took_ns

    def explain(self) -> dict[str, Any]:
        """Which rail goes to which, and on which path the bytes went."""
        explanation = self._engine.explain(self._pool.owner)
        paths = [[path.path, path.reason] for path in explanation.paths if path.bytes > 0]
        return {"rails": [list(pair) for pair in explanation.rails], "paths": paths}


def main() -> None:
    """Answer the parent's calls."""
    writer = Writer()
    answer_calls(
        {
            "open": writer.open,
            "load": writer.load,
            "write": writer.write,
            "copy": writer.copy,
            "explain": writer.explain,
        }
    )


if __name__ == "__main__":
    main()
