"""The randomised campaign: each seed gives a world, a workload and faults of every kind; then every check must hold.

    python -m crossrail.sim.campaign [--seeds N] [--from S] [--jobs J] [--until-failure] [--scenario NAME [--every K]]

With every K-th seed a scenario is played as well, one of `crossrail sim`, or MODULE:FUNCTION. A seed determines
everything: the same seed, build and version fail alike. Each failure prints the command that repeats it. In the
development tree: ./dev sim, which also plays rounds of MoE layers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from crossrail.campaign.checkers import CheckFailed
from crossrail.sim.scenarios import Scenario, find, play
from crossrail.sim.workload import Workload

_BATCH = 25  # seeds of one process


@dataclass(frozen=True)
class Beside:
    """Scenarios that are played with each seed that is a multiple of `every`, after the workload."""

    scenarios: list[Scenario]
    every: int


def run_seed(seed: int, beside: Beside | None = None) -> str:
    """Runs one seed. Returns what went wrong, empty if nothing did."""
    try:
        Workload(seed).run()
    except CheckFailed as failure:
        return str(failure)
    except Exception:  # whatever else happens is a finding too
        return traceback.format_exc(limit=-4)
    if beside is None or seed % beside.every != 0:
        return ""
    outcomes = [play(scenario, seed) for scenario in beside.scenarios]
    return "\n".join(
        f"{one.scenario}: {failure}\n{one.traceback}".rstrip() for one in outcomes for failure in one.failures
    )


# ---- many seeds


def _run_batch(
    first: int, count: int, timeout_s: float, until_failure: bool, more: Sequence[str]
) -> tuple[list[tuple[int, str]], int]:
    """In a process of its own, which may crash. Returns findings, and how many seeds ran. more: further arguments."""
    command = [sys.executable, "-m", "crossrail.sim.campaign", "--child", "--from", str(first), "--seeds", str(count)]
    command += ["--until-failure"] * until_failure
    command += more
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
            ending = f"the process ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            ending = f"it had not ended after {timeout_s:.0f} s"
    findings = []
    started = ended = first - 1
    for line in output.splitlines():
        if line.startswith("seed "):
            started = int(line.split()[1])
        elif line.startswith("ok "):
            ended = started
        elif line.startswith("failed "):
            ended = started
            findings.append((started, line[len("failed ") :].replace("\\n", "\n")))
    if ended != started or (ended < first + count - 1 and not findings):
        last_words = "\n".join(line for line in output.splitlines() if not line.startswith(("seed ", "ok ", "failed ")))
        findings.append((max(started, first), f"{ending}\n{last_words[-3000:]}"))
    return findings, max(ended - first + 1, 0)


def _child(first: int, count: int, until_failure: bool, beside: Beside | None) -> int:
    for seed in range(first, first + count):
        print(f"seed {seed}", flush=True)
        failure = run_seed(seed, beside)
        print("failed " + failure.replace("\n", "\\n") if failure else "ok", "", flush=True)
        if failure and until_failure:
            return 3
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m crossrail.sim.campaign", description="the randomised campaign in the simulator"
    )
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--from", type=int, default=None, dest="first", help="the first one; default: fresh ones")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--seed-timeout-s", type=float, default=60.0, help="real time that a seed may take")
    parser.add_argument("--until-failure", action="store_true", help="stop at the first failure; exit status 3")
    parser.add_argument("--scenario", metavar="NAME", help="also play this one: as of crossrail sim --scenario")
    parser.add_argument("--every", type=int, default=10, metavar="K", help="with each K-th seed (default: 10)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    first = options.first if options.first is not None else int.from_bytes(os.urandom(4), "little") << 16
    beside = Beside(find(options.scenario), options.every) if options.scenario else None
    if options.child:
        return _child(first, options.seeds, options.until_failure, beside)
    more = ["--scenario", options.scenario, "--every", str(options.every)] if options.scenario else []
    started = time.monotonic()
    batches = [(at, min(_BATCH, first + options.seeds - at)) for at in range(first, first + options.seeds, _BATCH)]
    ran = failed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = [
            pool.submit(_run_batch, at, count, options.seed_timeout_s + 5.0 * count, options.until_failure, more)
            for at, count in batches
        ]
        for run in runs:
            if run.cancelled():
                continue
            findings, count = run.result()
            ran += count
            for seed, text in findings:
                failed += 1
                print(f"FAILED: seed {seed}: {text}\n  again: ./dev sim --from {seed} --seeds 1\n", flush=True)
            if findings and options.until_failure:
                for other in runs:
                    other.cancel()
    seconds = time.monotonic() - started
    print(f"{ran} seeds from {first}, {failed} failed, {seconds:.0f} s")
    return (3 if options.until_failure else 1) if failed else 0


if __name__ == "__main__":
    sys.exit(main())
