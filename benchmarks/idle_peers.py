"""What peers that connected to an engine over tcp, and idle, cost its submits: `python benchmarks/idle_peers.py`.

CPU time of the submitting thread for each 8-byte write, the best of several rounds: alone, and beside `--peers` others.
They are bare sockets of the tests, which the engine takes for peers: run it in a checkout.
"""

import argparse
import contextlib
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import crossrail as xr

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.tcp_wire import RawPeer

WAIT_S = 30.0
ROUNDS, WRITES = 40, 100


def submit_ns(engine: xr.Engine, source: xr.Region, target: xr.RegionDescriptor) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        begin_ns = time.thread_time_ns()
        writes = [engine.submit_write(source, target, 8) for _ in range(WRITES)]
        best = min(best, (time.thread_time_ns() - begin_ns) / WRITES)
        for write in writes:
            write.wait(WAIT_S)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=1000)
    options = parser.parse_args()
    tcp = {"transport": "tcp", "rails": ["127.0.0.1"]}
    with xr.Engine("hub", **tcp) as hub, xr.Engine("other", **tcp) as other, contextlib.ExitStack() as connections:
        source, target = hub.alloc(8), other.alloc(8)
        alone_ns = submit_ns(hub, source, target.descriptor)
        for _ in range(options.peers):
            connections.enter_context(RawPeer(hub.address).connected())
        beside_ns = submit_ns(hub, source, target.descriptor)
    table = Table("peers that idle", "CPU per submit", "ratio")
    table.add_row("0", f"{alone_ns / 1e3:.2f} us", "")
    table.add_row(str(options.peers), f"{beside_ns / 1e3:.2f} us", f"{beside_ns / alone_ns:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
