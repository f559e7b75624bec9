"""Measures of the simulator: work requests per second of CPU time, and the memory that many engines take."""

from __future__ import annotations

from crossrail.cli.bench.fresh import RESIDENT_BYTES, run_script
from crossrail.cli.bench.pair import Pair
from crossrail.cli.bench.spec import Bar, Measure, Sample, SampleStream

_ENGINES = 512
_PEERS = 16

# Prints millions of work requests a second of CPU time: of this thread, which is all that a simulation takes.
_SPEED_SCRIPT = """
import json, time
from crossrail.sim.scenarios import find, play

scenario = find("weight-fanout")[0]
begun = time.thread_time()
outcome = play(scenario, seed=1)
took_s = time.thread_time() - begun
assert outcome.ok, outcome.failures
print(json.dumps(outcome.stats["works"] / took_s / 1e6))
"""

# Prints MiB.
_MEMORY_SCRIPT = f"""
{RESIDENT_BYTES}
before = resident_bytes()
from crossrail import sim

with sim.World(seed=1) as world:
    engines = [world.host(f"n{{i}}", "2xcx7").engine(f"e{{i}}") for i in range({_ENGINES})]
    regions = [engine.alloc(4096) for engine in engines]
    for away in range(1, {_PEERS} + 1):
        targets = [regions[(i + away) % {_ENGINES}].descriptor for i in range({_ENGINES})]
        for transfer in [engines[i].submit_write(regions[i], targets[i], 8) for i in range({_ENGINES})]:
            transfer.wait(timeout_s=60.0)
    print((resident_bytes() - before) / 2**20)
"""


def measures() -> list[Measure]:
    """The measures, in the order of the table."""
    return [
        Measure(
            name="sim-works",
            title="simulated work requests, a second",
            unit="M/s",
            limit="",
            samples=lambda pair: _samples(pair, _SPEED_SCRIPT),
            bar=Bar("value", ">=", 1.0),
        ),
        Measure(
            name="sim-memory",
            title=f"{_ENGINES} simulated engines",
            unit="MiB",
            limit="",
            samples=lambda pair: _samples(pair, _MEMORY_SCRIPT),
            bar=Bar("value", "<=", 2048.0),
        ),
    ]


def _samples(pair: Pair, script: str) -> SampleStream:
    with pair.on_all_cores():
        while True:
            yield Sample(run_script(script), None)
