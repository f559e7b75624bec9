"""Runs many rounds of the soak and sums up the results."""

from __future__ import annotations

import csv
import gc
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import asdict, fields
from pathlib import Path
from typing import TextIO

import numpy as np

from crossrail.campaign.checkers import CheckFailed
from crossrail.campaign.network import Network
from crossrail.campaign.soak.chaos import KINDS
from crossrail.campaign.soak.records import EMPTY, Stage
from crossrail.campaign.soak.rounds import SPARED, Round
from crossrail.campaign.soak.seats import Seats
from crossrail.campaign.usage import Usage, growth, growth_text, plot

FAILURES_MAX = 5  # then it is over: what is broken that often is not seen better by more of it


class Soak:
    """Rounds of each transport by turns. folder: where failed ones leave what is known of them."""

    def __init__(self, transports: list[str], seed: int, round_s: float, folder: Path | None = None) -> None:
        self.transports = transports
        self.seed, self.round_s = seed, round_s
        self.folder = folder
        self.rounds = self.failed = self.started = self.kills = 0
        self.bytes_done = 0
        self.faults: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.samples: dict[str, list[Usage]] = {}  # after each round
        self.began = time.monotonic()
        self._network = Network()
        self._stages = {transport: Stage.make() for transport in transports}
        self._seats: dict[str, Seats] = {}

    def round(self, log: TextIO | None = None) -> None:
        """The next one, of each transport. Findings are printed; after one there are other processes."""
        seed = self.seed + self.rounds
        self.rounds += 1
        for transport in self.transports:
            self._round_of(transport, seed)
        self._sample("parent", Usage.take(), log)
        gc.collect()

    def _round_of(self, transport: str, seed: int) -> None:
        if transport not in self._seats:
            self._seats[transport] = Seats(transport, self._stages[transport], self._network)
        seats = self._seats[transport]
        this = Round(seats, seed, self.rounds, self.round_s)
        try:
            this.run()
        except Exception as failure:  # whatever else happens is a finding too
            self._report(transport, seed, failure)
            return
        finally:
            self.faults.update(this.faults)
        self.ended.update(this.ended)
        self.bytes_done += this.bytes_done
        spared = seats.seats[SPARED].now
        assert spared is not None
        assert spared.usage is not None
        self._sample(f"{transport} seat-{SPARED}", spared.usage, None)

    def _report(self, transport: str, seed: int, failure: Exception) -> None:
        self.failed += 1
        seats = self._seats[transport]
        text = str(failure) if isinstance(failure, CheckFailed) else traceback.format_exc(limit=-6)
        if not isinstance(failure, CheckFailed):
            text = "\n".join([*seats.fleet.complaints, text])  # a process that died while it was asked, say
        again = f"./dev soak --transport {transport} --seed {seed} --rounds 1 --round-s {self.round_s:g}"
        print(f"FAILED: {transport}, round {seed}: {text}\n  again: {again}", flush=True)
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="soak-"))
        folder = self.folder / f"{transport}-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "why.txt").write_text(f"{text}\n{again}\n")
        seats.fleet.complaints.clear()
        seats.fleet.thaw_all()
        seats.dump(str(folder))
        self._keep_books(folder, seats)
        print(f"  books and flight recorders (crossrail trace): {folder}\n", flush=True)
        self.samples.clear()
        self._end(transport)

    def _keep_books(self, folder: Path, seats: Seats) -> None:
        for seat in seats.seats:
            for life in (seat.now, seat.past):
                if life is None:
                    continue
                book, member = life.book, life.member
                np.savez_compressed(
                    folder / f"life-{member.life}-seat-{member.seat}.npz",
                    head=book.head, rows=book.rows[book.rows["state"] != EMPTY], slots=book.slots,
                    arrivals=book.arrivals[: book.head["arrivals"][0]], taken=book.taken, seen=book.seen,
                )  # fmt: skip

    def _sample(self, who: str, usage: Usage, log: TextIO | None) -> None:
        self.samples.setdefault(who, []).append(usage)
        if log is not None:
            writer = csv.writer(log)
            for name, samples in self.samples.items():
                writer.writerow(
                    [f"{time.monotonic() - self.began:.1f}", self.rounds, name, *asdict(samples[-1]).values()]
                )
            log.flush()

    def _end(self, transport: str) -> None:
        seats = self._seats.pop(transport)
        self.started += seats.started
        self.kills += seats.kills
        seats.close_all()

    def close(self) -> None:
        """Ends all processes."""
        for transport in list(self._seats):
            self._end(transport)

    def growth(self) -> list[str]:
        """Resources of which never-killed processes, and the parent, hold more and more."""
        return [f"{who}: {what}" for who, samples in self.samples.items() for what in growth(samples)]

    def progress(self) -> str:
        """A line."""
        seconds = time.monotonic() - self.began
        kills = self.kills + sum(seats.kills for seats in self._seats.values())
        return (
            f"{seconds / 60:5.1f} min  {self.rounds} rounds of {', '.join(self.transports)}  "
            f"{sum(self.ended.values()):,} operations  {kills} kills  {self.bytes_done / 1e9:.1f} GB  "
            f"{self.failed} failed"
        )

    def summary(self) -> str:
        """The results, in a few lines. After close()."""
        lines = [
            self.progress(),
            f"  seeds from {self.seed}, rounds of {self.round_s:g} s; {self.started} processes were started",
            "  operations: " + ", ".join(f"{count:,} {name}" for name, count in self.ended.most_common() if count),
            "  faults: " + ", ".join(f"{self.faults[kind]:,} {kind}" for kind in KINDS),
        ]
        for who, samples in self.samples.items():
            for field in fields(Usage):
                values = [asdict(sample)[field.name] for sample in samples]
                lines.append(f"{who:>14} {field.name:>11} {plot(values)} {min(values)} to {max(values)}")
        lines += [f"GROWTH: {finding}" for finding in self.growth()]
        lines += [f"{who}: {growth_text(samples)}" for who, samples in self.samples.items() if not growth(samples)]
        if not self.samples:  # a failure has ended the processes
            lines.append(growth_text([]))
        return "\n".join(lines)
