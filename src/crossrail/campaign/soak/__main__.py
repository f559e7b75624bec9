"""The soak command: four processes load each other at full speed while they are killed, stopped and cut off.

    python -m crossrail.campaign.soak [--minutes M] [--rounds N] [--transport shm,tcp] [--seed N]
        [--round-s S] [--folder FOLDER] [--csv FILE]

A seed determines each thread's operations and the schedule of faults, but not when they meet: that depends on the
machine. So the command that is printed with a failure is likely, not certain, to reproduce it. In the development tree:
./dev soak.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from dataclasses import fields
from pathlib import Path

from crossrail.campaign.players import TRANSPORTS
from crossrail.campaign.soak.run import FAILURES_MAX, Soak
from crossrail.campaign.usage import Usage

_PROGRESS_S = 10.0


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m crossrail.campaign.soak", description="the soak over processes")
    parser.add_argument("--minutes", type=float, default=None, help="how long; default 60, or until --rounds are over")
    parser.add_argument("--rounds", type=int, default=None, help="how many of each transport")
    parser.add_argument("--transport", default=",".join(TRANSPORTS), help="one, or several with commas")
    parser.add_argument("--seed", type=int, default=None, help="of the first round; default: a fresh one")
    parser.add_argument("--round-s", type=float, default=3.0, help="how long the faults of a round last, in seconds")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where failed rounds leave books and flight recorders"
    )
    parser.add_argument("--csv", type=Path, default=None, help="where samples of what processes hold are written")
    options = parser.parse_args(arguments)
    transports = options.transport.split(",")
    if not set(transports) <= set(TRANSPORTS):
        parser.error(f"--transport is {options.transport!r}, must be some of {', '.join(TRANSPORTS)}")
    if options.round_s <= 0:
        parser.error(f"--round-s is {options.round_s}, must be more than 0")
    if options.minutes is None:
        options.minutes = 60.0 if options.rounds is None else float("inf")
    rounds = float("inf") if options.rounds is None else options.rounds
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(4), "little")
    soak = Soak(transports, seed, options.round_s, options.folder)
    try:
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(options.csv.open("w", newline="")) if options.csv else None
            if log is not None:
                log.write(",".join(["seconds", "rounds", "process", *(field.name for field in fields(Usage))]) + "\n")
            shown = 0.0
            while soak.rounds < rounds and soak.failed < FAILURES_MAX:
                soak.round(log)
                now = time.monotonic()
                if now - shown >= _PROGRESS_S:
                    shown = now
                    print(soak.progress(), file=sys.stderr, flush=True)
                if now - soak.began >= 60 * options.minutes:
                    break
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    finally:
        soak.close()
    print(soak.summary())
    return 1 if soak.failed or soak.growth() else 0


if __name__ == "__main__":
    sys.exit(main())
