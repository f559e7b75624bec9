"""What a scheduled transfer costs in Python: `./dev run python benchmarks/weights_small_writes.py [--writes 100000]`.

A step with so many writes of 1 KiB, each a task of its own, the most that a step can have to do for its bytes: trainer,
inference rank and controller in this process, over shm. "direct": the bytes lie ready. "cast": float32 to bfloat16.
"fp8": bfloat16 to fp8 with a scale, two writes of a task. "gather": two trainers with half of each parameter, of which
each sends half of them, whole.

plan: the first update's, planning and making tasks ready. ready: the latter alone, processor time for each task. loop:
processor time of the event loop's thread in a later update for each write, of all members together; all: of the
process, with conversions, the engines' copies and whatever else its threads do. Medians.
"""

import argparse
import asyncio

from rich.console import Console
from rich.table import Table

from crossrail.cli.weights.small_writes import KINDS, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writes", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    args = parser.parse_args()
    table = Table("", "writes", "plan s", "ready us/task", "update s", "loop us/write", "all us/write")
    for kind in args.kinds:
        found = asyncio.run(measure(kind, args.writes // (2 if kind == "fp8" else 1), args.rounds))
        table.add_row(kind, f"{found.writes:,}", *(f"{figure:.2f}" for figure in found[1:]))
    Console().print(table)


if __name__ == "__main__":
    main()
