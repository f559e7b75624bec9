"""Each deliberate mistake of native/util/mutation.h: found by the campaign within so many seeds, or it is blind.

Run by `./dev sim --mutations [NAME ...]`, with a build that has them.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HEADER = Path(__file__).resolve().parents[2] / "native" / "util" / "mutation.h"
FIRST_SEED = 1
# Within so many seeds of FIRST_SEED each has to be found.
SEEDS_MAX = 200
SEEDS_CLEAN = 50
TIMEOUT_S = 600
BESIDES = ["--scenario", "tests.moe.campaign:rounds", "--every", "5"]


def mutations() -> dict[str, int]:
    """Names and numbers, as the header has them."""
    text = HEADER.read_text()
    body = text[text.index("enum class Mutation") :]
    names = re.findall(r"^  (k\w+),", body, re.MULTILINE)
    return {name: number for number, name in enumerate(names) if name != "kNone"}


def campaign(number: int, seeds: int) -> tuple[int, str]:
    """Exit status and output of the campaign with that mistake in the engine: 3 when a seed failed."""
    command = [sys.executable, "-m", "crossrail.sim.campaign", "--from", str(FIRST_SEED), "--seeds", str(seeds)]
    command += ["--until-failure", "--jobs", "1", "--seed-timeout-s", "30", *BESIDES]
    env = {**os.environ, "CROSSRAIL_MUTATION": str(number)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    return done.returncode, done.stdout + done.stderr


def hunt(name: str, number: int) -> bool:
    started = time.monotonic()
    status, output = campaign(number, SEEDS_MAX)
    found = re.search(r"^FAILED: seed (\d+): (.*)", output, re.MULTILINE)
    if status != 3 or found is None:
        print(f"{name}: NOT FOUND in {SEEDS_MAX} seeds (status {status})\n{output[-2000:]}", flush=True)
        return False
    seeds = int(found[1]) - FIRST_SEED + 1
    said = found[2][:150]
    if said.startswith("the process ended"):
        words = re.search(r"^crossrail: internal error: .*", output, re.MULTILINE)
        said = words[0][:150] if words else said
    print(f"{name}: found by seed {seeds} in {time.monotonic() - started:.0f} s: {said}", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    chosen = parser.parse_args().names
    known = mutations()
    if unknown := set(chosen) - known.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    status, output = campaign(0, SEEDS_CLEAN)
    if status != 0:
        print(f"without any mistake the campaign fails:\n{output[-3000:]}")
        return 1
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda name: hunt(name, known[name]), chosen or known))
    print(f"{sum(results)} of {len(results)} mistakes found")
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
