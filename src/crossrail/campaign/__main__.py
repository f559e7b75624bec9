"""The campaign command: runs checked rounds over real processes and reports the result.

    python -m crossrail.campaign [--transport shm|tcp] [--rounds N] [--from SEED] [--until-failure]

A seed determines the operations and the faults, but not exactly when they meet: that depends on the machine. So the
command that is printed with a failure is likely, not certain, to reproduce it. In the development tree: ./dev campaign.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from crossrail.campaign.players import TRANSPORTS
from crossrail.campaign.run import Campaign

_PROGRESS_S = 10.0


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m crossrail.campaign", description="the campaign over processes")
    parser.add_argument("--transport", choices=TRANSPORTS, default="shm")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--from", type=int, default=None, dest="first", help="seed of the first; default: fresh ones")
    parser.add_argument("--until-failure", action="store_true", help="stop at the first failure")
    options = parser.parse_args(arguments)
    first = options.first if options.first is not None else int.from_bytes(os.urandom(4), "little") << 16
    campaign = Campaign(options.transport, first)
    shown = began = time.monotonic()
    try:
        while campaign.rounds < options.rounds and not (options.until_failure and campaign.failed):
            campaign.round()
            if (now := time.monotonic()) - shown >= _PROGRESS_S:
                shown = now
                print(f"{campaign.rounds} rounds, {now - began:.0f} s", file=sys.stderr, flush=True)
    finally:
        campaign.close()
    print(campaign.summary())
    return 1 if campaign.failed or campaign.growth() else 0


if __name__ == "__main__":
    sys.exit(main())
