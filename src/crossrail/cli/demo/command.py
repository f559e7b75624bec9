"""`crossrail demo`: two processes, a page pool, a real file, a count, a checksum.

This process registers a pool of pages and receives. A second one (writer.py) reads the file and writes it into the
pool as shuffled pages over several rails, each page with the same immediate. This process knows that everything has
arrived when it has counted as many arrivals as there are pages; there is no other message. Then it reads the pages in
file order and compares SHA-256 sums.
"""

from __future__ import annotations

import hashlib
import secrets
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table

import crossrail as xr
from crossrail._text import plain
from crossrail.cli.child import Child
from crossrail.cli.console import bytes_progress, open_console
from crossrail.cli.demo.plan import Segment, split_file
from crossrail.cli.memory import check_memory
from crossrail.cli.option_types import IntRange, size
from crossrail.cli.source import SourceFile, default_file
from crossrail.cli.tables import Fitted
from crossrail.cli.text import format_bytes, format_count, gb_per_s
from crossrail.errors import CrossrailError, UsageError, WaitTimeout

_STALL_TIMEOUT_S = 10.0
_LOOK_PERIOD_S = 0.05
# Enough rounds for a rate that means something: at least five, and about this long together.
_ROUNDS_MIN = 5
_ROUNDS_MAX = 50
_ROUNDS_TARGET_S = 1.5


@dataclass(frozen=True)
class Plan:
    """The parsed options."""

    file: Path
    rails: int
    receiver_rails: int
    page_bytes: int
    pool_bytes: int
    rounds: int | None
    private: bool
    seed: int


@dataclass
class Outcome:
    """The measurements."""

    rounds: int = 0
    moved_bytes: int = 0
    moved_pages: int = 0
    write_ns: list[int] = field(default_factory=list)
    copy_ns: list[int] = field(default_factory=list)
    sent_sha256: str = ""
    received_sha256: str = ""
    copies_differ: int = 0

    @property
    def intact(self) -> bool:
        """True when what arrived is what was sent, in every copy."""
        return self.sent_sha256 == self.received_sha256 and self.copies_differ == 0


class Receiver:
    """The receiving side: engine, pool and counter."""

    def __init__(self, plan: Plan, pool_bytes: int) -> None:
        """pool_bytes: room for the longest round."""
        self.engine = xr.Engine("demo-receiver", rails=plan.receiver_rails)
        if plan.private:
            # bytearray: memory of this process alone, which no peer can map.
            self.pool = self.engine.register(bytearray(pool_bytes))
        else:
            self.pool = self.engine.alloc(pool_bytes, populate=True)
        self.counter = self.engine.alloc_imm()
        self.digest = hashlib.sha256()

    def clear(self) -> None:
        """Zero the pool, so that what is checked next can only come from the next round."""
        self.pool.array()[:] = 0

    def check(self, segment: Segment) -> int:
        """Hash the first copy into the file's digest. Returns how many other copies differ from it."""
        places = segment.places()
        pages = self.pool.array()[: segment.total_pages * segment.page_bytes].reshape(-1, segment.page_bytes)
        first = pages[places[0]].reshape(-1)[: segment.nbytes]
        self.digest.update(first.data)
        return sum(
            not (pages[places[copy]].reshape(-1)[: segment.nbytes] == first).all() for copy in range(1, segment.copies)
        )


class Demo:
    """One run: the receiver here, the writer there, and what is shown meanwhile."""

    def __init__(self, plan: Plan, receiver: Receiver, writer: Child, progress: Progress) -> None:
        """The parts, all open; the caller closes them."""
        self.plan = plan
        self.receiver = receiver
        self.writer = writer
        self.progress = progress
        self.outcome = Outcome()

    def run(self, segments: list[Segment]) -> Outcome:
        """Every segment, each as many rounds as it takes for a steady figure, the last one checked."""
        self.outcome.sent_sha256 = self._load(segments[0])
        rounds = self._warm_up(segments[0])
        rounds_each = max(1, -(-rounds // len(segments)))
        total_bytes = sum(segment.total_bytes for segment in segments) * rounds_each
        task = self.progress.add_task(plain(self.plan.file.name), total=total_bytes)
        for index, segment in enumerate(segments):
            if index > 0:
                self.outcome.sent_sha256 = self._load(segment)
            for round_index in range(rounds_each):
                if round_index == rounds_each - 1:
                    self.receiver.clear()
                self._measure(segment, task)
            self.outcome.copies_differ += self.receiver.check(segment)
        self.outcome.received_sha256 = self.receiver.digest.hexdigest()
        return self.outcome

    def _load(self, segment: Segment) -> str:
        digest: str = self.writer.call("load", _patience_s(segment.nbytes), segment=segment.to_json())
        return digest

    def _warm_up(self, segment: Segment) -> int:
        """One round that is not counted: connects, faults memory in. Returns how many rounds to run."""
        begun = time.monotonic()
        self._write(segment, None)
        self._copy(segment)
        if self.plan.rounds is not None:
            return self.plan.rounds
        return min(_ROUNDS_MAX, max(_ROUNDS_MIN, int(_ROUNDS_TARGET_S / (time.monotonic() - begun))))

    def _measure(self, segment: Segment, task: TaskID) -> None:
        # The two in turn in every round: machines drift between speeds, and a share is fair only side by side.
        self.outcome.copy_ns.append(self._copy(segment))
        self.outcome.write_ns.append(self._write(segment, task))
        self.outcome.rounds += 1
        self.outcome.moved_bytes += segment.total_bytes
        self.outcome.moved_pages += segment.total_pages

    def _copy(self, segment: Segment) -> int:
        took_ns: int = self.writer.call("copy", _patience_s(segment.total_bytes))
        return took_ns

    def _write(self, segment: Segment, task: TaskID | None) -> int:
        """One round. Returns ns from the writer's first submit to the count being complete here."""
        self.writer.start("write")
        self._await_pages(segment, task)
        arrived_ns = time.monotonic_ns()
        begun_ns: int = self.writer.finish()
        return arrived_ns - begun_ns

    def _await_pages(self, segment: Segment, task: TaskID | None) -> None:
        done_before = 0 if task is None else self.progress.tasks[task].completed
        page_share = segment.total_bytes / segment.total_pages
        arrived, moved_at = 0, time.monotonic()
        while True:
            try:
                self.receiver.counter.wait(segment.total_pages, _LOOK_PERIOD_S)
                break
            except WaitTimeout:
                self.writer.raise_if_failed()
            if self.receiver.counter.poll() != arrived:
                arrived, moved_at = self.receiver.counter.poll(), time.monotonic()
            if time.monotonic() - moved_at > _STALL_TIMEOUT_S:
                raise CrossrailError(self._stalled(arrived, segment))
            if task is not None:
                self.progress.update(task, completed=done_before + arrived * page_share)
        if task is not None:
            self.progress.update(task, completed=done_before + segment.total_bytes)

    def _stalled(self, arrived: int, segment: Segment) -> str:
        return (
            f"no page arrived for {_STALL_TIMEOUT_S:g} s: {arrived} of {segment.total_pages} pages are here, and the "
            f"writing process (pid {self.writer.pid}) still runs; was it stopped (kill -STOP)?"
        )


def _patience_s(nbytes: int) -> float:
    """How long reading or copying so much may take on a slow machine before we call it stuck."""
    return 60.0 + nbytes / 10e6


def _summary(plan: Plan, segments: list[Segment], outcome: Outcome, explained: dict[str, Any]) -> Table:
    write_s = sum(outcome.write_ns) / 1e9
    copy_s = sum(outcome.copy_ns) / 1e9
    share = statistics.median(c / w for c, w in zip(outcome.copy_ns, outcome.write_ns, strict=True))
    table = Table(show_header=False, title="crossrail demo", title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("file", f"{escape(plain(str(plan.file)))} ({format_bytes(sum(s.nbytes for s in segments))})")
    table.add_row("moved", _moved(segments, outcome))
    table.add_row("pages", f"{outcome.moved_pages:,} of {format_bytes(plan.page_bytes)}, shuffled")
    table.add_row("rails", _rails(plan, explained))
    table.add_row("rate", f"{gb_per_s(outcome.moved_bytes, write_s):.2f} GB/s")
    table.add_row("memcpy here", f"{gb_per_s(outcome.moved_bytes, copy_s):.2f} GB/s (one thread, the same bytes)")
    table.add_row("share of memcpy", f"{share:.2f}")
    for path, reason in explained["paths"]:
        table.add_row("path", escape(f"{path}: {reason}" if reason else path))
    if outcome.intact:
        table.add_row("SHA-256", f"[green]ok[/green] {outcome.received_sha256}")
    else:
        table.add_row("SHA-256", f"[red]MISMATCH[/red] sent {outcome.sent_sha256}")
        table.add_row("", f"received {outcome.received_sha256}; {outcome.copies_differ} further copies differ")
    return table


def _moved(segments: list[Segment], outcome: Outcome) -> str:
    parts = [format_count(outcome.rounds, "round")]
    if segments[0].copies > 1:
        parts.append(f"{segments[0].copies} copies a round, as the file is small")
    if len(segments) > 1:
        parts.append(f"the file in {len(segments)} pieces, each the size of the pool")
    return f"{format_bytes(outcome.moved_bytes)} ({', '.join(parts)})"


def _rails(plan: Plan, explained: dict[str, Any]) -> str:
    pairs = ", ".join(f"{rail}→{peer_rail}" for rail, peer_rail in explained["rails"])
    return f"{plan.rails} here, {plan.receiver_rails} at the receiver ({pairs})" if pairs else f"{plan.rails}"


def _run(plan: Plan, console: Console) -> bool:
    with SourceFile(plan.file) as source:
        nbytes = source.nbytes
    if nbytes == 0:
        raise UsageError(f"{plan.file} is empty: there is nothing to move; give a larger file")
    segments = list(split_file(nbytes, plan.pool_bytes, plan.page_bytes, plan.seed))
    pool_bytes = max(segment.total_pages for segment in segments) * plan.page_bytes
    source_bytes = max(segment.nbytes for segment in segments)
    check_memory("the demo", 2 * pool_bytes + source_bytes, "make the pool smaller with --pool-bytes")
    receiver = Receiver(plan, pool_bytes)
    with (
        receiver.engine,
        Child("crossrail.cli.demo.writer", "the writing process") as writer,
        bytes_progress(console) as progress,
    ):
        writer.call(
            "open",
            path=str(plan.file),
            rails=plan.rails,
            pool=receiver.pool.descriptor.to_bytes().hex(),
            imm=receiver.counter.imm,
            source_bytes=source_bytes,
        )
        outcome = Demo(plan, receiver, writer, progress).run(segments)
        explained = writer.call("explain")
    console.print(Fitted(_summary(plan, segments, outcome, explained)))
    return outcome.intact


@click.command("demo")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--rails", type=IntRange(1, 16), default=4, show_default=True, help="Rails of the writer.")
@click.option("--receiver-rails", type=IntRange(1, 16), default=3, show_default=True, help="Rails of the receiver.")
@click.option("--page-bytes", type=size(1, 64 << 20), default="64K", show_default=True, help="Length of a page.")
@click.option(
    "--pool-bytes",
    type=size(1 << 16, 1 << 40),
    default="256M",
    show_default=True,
    help="Length of the page pool. A larger file is sent in several pieces.",
)
@click.option(
    "--rounds", type=IntRange(1, 100_000), help="Number of times the file is moved [default: for about 1.5 s]."
)
@click.option("--private", is_flag=True, help="Receive into memory that the writer cannot map.")
@click.option("--seed", type=IntRange(0), help="Seed of the shuffle [default: drawn].")
def command(
    file: Path | None,
    rails: int,
    receiver_rails: int,
    page_bytes: int,
    pool_bytes: int,
    rounds: int | None,
    private: bool,
    seed: int | None,
) -> None:
    """Move a real file between two processes and check it.

    FILE defaults to the shared library of the running Python. One process registers a pool of pages; another writes
    the file into it as shuffled pages over several rails. The first counts the arrivals and checks the SHA-256 sum.
    """
    if seed is None:
        seed = secrets.randbits(32)
    plan = Plan(file or default_file(), rails, receiver_rails, page_bytes, pool_bytes, rounds, private, seed)
    if not _run(plan, open_console()):
        raise CrossrailError(f"what arrived is not what was sent; repeat with --seed {seed}")
