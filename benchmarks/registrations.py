"""What it costs to make memory known to RDMA NICs: `./dev vm -- .venv/bin/python benchmarks/registrations.py`.

first: a source (access "local") of so many bytes while no region covers it. again: the same while one that is open
does. peers: the same memory for peers to write to, which is never shared. revoke: such a region, while no source covers
it and while an open one does. Each region is closed again; medians of `--rounds` rounds. `--rails` may name a device
several times.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

import crossrail as xr


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


class Bench:
    def __init__(self, engine: xr.Engine, nbytes: int) -> None:
        self.engine = engine
        self.memory = np.ones(nbytes, np.uint8)
        self.taken: dict[str, list[float]] = {}

    def round(self) -> None:
        self._register("first", "local")
        self._register("peers", "write")
        self._revoke("revoke, first")
        with self.engine.register(self.memory, access="local"):
            self._register("again", "local")
            self._revoke("revoke, again")

    def _register(self, name: str, access: str) -> None:
        begin = time.perf_counter()
        region = self.engine.register(self.memory, access=access)
        self._note(name, time.perf_counter() - begin)
        region.close()

    def _revoke(self, name: str) -> None:
        with self.engine.register(self.memory, access="write") as region:
            self._note(name, seconds(region.revoke))

    def _note(self, name: str, taken_s: float) -> None:
        self.taken.setdefault(name, []).append(taken_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="verbs")
    parser.add_argument("--rails", nargs="+", default=["rxe0"])
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    names = ["first", "again", "peers", "revoke, first", "revoke, again"]
    table = Table("memory", *names, title=f"milliseconds, {arguments.transport}, rails {' '.join(arguments.rails)}")
    with xr.Engine(transport=arguments.transport, rails=arguments.rails) as engine:
        for mib in arguments.mib:
            bench = Bench(engine, mib << 20)
            for _ in range(arguments.rounds):
                bench.round()
            medians = [statistics.median(bench.taken[name]) * 1e3 for name in names]
            table.add_row(f"{mib} MiB", *(f"{each:.3f}" for each in medians))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
