"""The command: an hour of the campaign, and whether anything grows meanwhile.

    python -m crossrail.campaign.soak [--minutes M] [--transport shm,tcp] [--csv FILE]

Rounds of the transports take turns, with processes killed and restarted every few seconds. One process of each is never
killed: what it holds, and what the parent holds, is sampled between rounds and must not grow.
In the development tree: ./dev soak.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TextIO

from crossrail.campaign.players import TRANSPORTS
from crossrail.campaign.run import SPARED, Campaign
from crossrail.campaign.usage import Usage, growth

_SAMPLE_S = 5.0
_PROGRESS_S = 60.0
_PLOT_COLUMNS = 60
_BARS = "▁▂▃▄▅▆▇█"


class _Rows(Protocol):
    def writerow(self, row: Iterable[object], /) -> object: ...


class Soak:
    """Campaigns that take turns, and samples of what processes hold."""

    def __init__(self, transports: Sequence[str], first: int) -> None:
        self.campaigns = [Campaign(transport, first) for transport in transports]
        self.samples: dict[str, list[Usage]] = {}
        self._began = time.monotonic()

    def run(self, for_s: float, log: TextIO) -> None:
        """log: gets a line of CSV for each sample."""
        writer = csv.writer(log)
        writer.writerow(["seconds", "rounds", "process", *(field.name for field in fields(Usage))])
        sampled = shown = self._began
        while (now := time.monotonic()) - self._began < for_s:
            for campaign in self.campaigns:
                campaign.round()
            if now - sampled >= _SAMPLE_S:
                sampled = now
                self._sample(writer)
                log.flush()
            if now - shown >= _PROGRESS_S:
                shown = now
                done = ", ".join(f"{one.transport} {one.rounds} rounds, {one.failed} failed" for one in self.campaigns)
                print(f"{(now - self._began) / 60:.0f} min: {done}", file=sys.stderr, flush=True)

    def findings(self) -> list[str]:
        """What grew."""
        return [f"{who}: {what}" for who, samples in self.samples.items() for what in growth(samples)]

    def summary(self) -> str:
        """What came of it, with a plot for each process and thing that was sampled."""
        lines = [campaign.summary() for campaign in self.campaigns]
        for who, samples in self.samples.items():
            for field in fields(Usage):
                values = [asdict(sample)[field.name] for sample in samples]
                lines.append(f"{who:>14} {field.name:>11} {plot(values)} {min(values)} to {max(values)}")
        lines += [f"GROWTH: {finding}" for finding in self.findings()] or ["nothing grew"]
        return "\n".join(lines)

    def close(self) -> None:
        """Ends all processes."""
        for campaign in self.campaigns:
            campaign.close()

    def _sample(self, writer: _Rows) -> None:
        gc.collect()  # a ledger is a ring of references
        found = {"parent": Usage.take()}
        for campaign in self.campaigns:
            if campaign.samples:
                found[f"{campaign.transport} {SPARED}"] = campaign.samples[-1]
        rounds = sum(campaign.rounds for campaign in self.campaigns)
        for who, usage in found.items():
            self.samples.setdefault(who, []).append(usage)
            writer.writerow([f"{time.monotonic() - self._began:.1f}", rounds, who, *asdict(usage).values()])


def plot(values: Sequence[int]) -> str:
    """A line of bars from zero to the highest, each the mean of its share of the values."""
    columns = min(_PLOT_COLUMNS, len(values))
    top = max(values, default=0) or 1
    edges = [len(values) * column // columns for column in range(columns + 1)] if columns else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    return "".join(_BARS[round(mean / top * (len(_BARS) - 1))] for mean in means)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m crossrail.campaign.soak", description="the campaign for an hour")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--transport", default=",".join(TRANSPORTS), help="one, or several with commas")
    parser.add_argument("--from", type=int, default=None, dest="first", help="seed of the first round")
    parser.add_argument("--csv", type=Path, default=Path("soak.csv"), help="where samples are written")
    options = parser.parse_args(arguments)
    transports = options.transport.split(",")
    if not set(transports) <= set(TRANSPORTS):
        parser.error(f"--transport is {options.transport!r}, must be some of {', '.join(TRANSPORTS)}")
    soak = Soak(transports, options.first if options.first is not None else int.from_bytes(os.urandom(4), "little"))
    try:
        with options.csv.open("w", newline="") as log:
            soak.run(60 * options.minutes, log)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    finally:
        soak.close()
    print(soak.summary())
    return 1 if soak.findings() or any(campaign.failed for campaign in soak.campaigns) else 0


if __name__ == "__main__":
    sys.exit(main())
