"""checkpoint-engine's update beside the same over crossrail, on a machine without a GPU: broadcasts over gloo there.

    ./dev run python benchmarks/checkpoint_engine.py [--ranks 2] [--mib 512] [--rounds 5]

Ranks and their workers (the real update_weights_from_ipc, which load nothing) are processes of this machine; each rank
owns an equal part of the weights. Both servers are open; their updates take turns. Prints each round's seconds, from
the first rank's call of update() until all have returned, and the ratio. checkpoint-engine makes its process group in
each update, as it does by default: --keep-group leaves that out.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics

from crossrail.cli.weights.checkpoint_engine import CheckpointEngineFleet

KINDS = ("checkpoint-engine", "crossrail")


def measure(ranks: int, mib: int, rounds: int, keeps_group: bool) -> None:
    os.environ["CROSSRAIL_SECRET"] = secrets.token_hex()
    fleets = {kind: CheckpointEngineFleet(mib << 20, ranks, kind, keeps_group) for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    try:
        for fleet in fleets.values():
            fleet.start()
        for number in range(rounds + 1):
            for kind, fleet in fleets.items():
                took = fleet.update()
                if number:  # the first finds no connection, no page and no module
                    seconds[kind].append(took)
    finally:
        for fleet in fleets.values():
            fleet.close()
    for kind in KINDS:
        print(f"{kind:18} {statistics.median(seconds[kind]):6.3f} s   {' '.join(f'{s:.3f}' for s in seconds[kind])}")
    ratios = [theirs / ours for theirs, ours in zip(*seconds.values(), strict=True)]
    print(f"{'ratio':18} {statistics.median(ratios):6.2f}     {' '.join(f'{ratio:.2f}' for ratio in ratios)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep-group", action="store_true")
    arguments = parser.parse_args()
    measure(arguments.ranks, arguments.mib, arguments.rounds, arguments.keep_group)
