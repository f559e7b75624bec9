"""What crossrail costs a program before it does anything: memory and import time.

Each sample is a fresh interpreter, as neither can be measured twice in one.
"""

from __future__ import annotations

import json

from crossrail.cli.bench.fresh import RESIDENT_BYTES, run_script
from crossrail.cli.bench.pair import Pair
from crossrail.cli.bench.spec import Bar, Measure, Sample, SampleStream

_PEERS = 16

# Prints [ms of crossrail, ms of numpy].
_IMPORT_SCRIPT = """
import json, time
begun = time.perf_counter()
import numpy
between = time.perf_counter()
import crossrail
crossrail.Engine
print(json.dumps([1e3 * (time.perf_counter() - between), 1e3 * (between - begun)]))
"""

# Addresses of peers come on standard input. Prints [engine MiB, KiB per peer].
_MEMORY_SCRIPT = (
    RESIDENT_BYTES
    + """
import json, sys, time

addresses = json.load(sys.stdin)
before = resident_bytes()
import crossrail
engine = crossrail.Engine("bench-footprint")
time.sleep(0.2)
idle = resident_bytes()
for address in addresses:
    engine.connect(crossrail.Address.from_bytes(bytes.fromhex(address)))
time.sleep(0.2)
connected = resident_bytes()
print(json.dumps([(idle - before) / 2**20, (connected - idle) / len(addresses) / 2**10]))
"""
)


def measures() -> list[Measure]:
    """The measures, in the order of the table."""
    return [
        Measure(
            name="rss-engine",
            title="memory of an idle engine",
            unit="MiB",
            limit="",
            samples=lambda pair: _memory_samples(pair, 0),
            bar=Bar("value", "<=", 16.0),
        ),
        Measure(
            name="rss-peer",
            title="memory of each further peer",
            unit="KiB",
            limit="",
            samples=lambda pair: _memory_samples(pair, 1),
            bar=Bar("value", "<=", 512.0),
        ),
        Measure(
            name="import",
            title="import, beyond numpy",
            unit="ms",
            limit="import numpy",
            samples=_import_samples,
            bar=Bar("value", "<=", 60.0),
        ),
    ]


def _memory_samples(pair: Pair, column: int) -> SampleStream:
    """column: 0 for the engine, 1 for a peer."""
    addresses = pair.child.call("open_engines", count=_PEERS)
    try:
        with pair.on_all_cores():
            while True:
                yield Sample(run_script(_MEMORY_SCRIPT, json.dumps(addresses))[column], None)
    finally:
        pair.child.call("close_engines")


def _import_samples(_: Pair) -> SampleStream:
    run_script(_IMPORT_SCRIPT)  # the first one reads from disk
    while True:
        ours_ms, numpy_ms = run_script(_IMPORT_SCRIPT)
        yield Sample(ours_ms, numpy_ms)
