"""`crossrail weights load`: fills inference ranks from a checkpoint on disk, by the same path that later updates take.

Reader 0 is the controller too. Readers on other hosts map the checkpoint from there. Each reads about as many bytes,
and writes them straight into the ranks' memory, cast, cut and quantised as the ranks need them.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import crossrail as xr
from crossrail._text import rate_text
from crossrail.cli import event_loop
from crossrail.cli.console import open_console
from crossrail.cli.option_types import RAILS_MAX
from crossrail.cli.service import read_secret
from crossrail.cli.text import format_bytes, format_count, gb_per_s, naming
from crossrail.cli.weights.common import opened_mailbox
from crossrail.cli.weights.progress import showing_update
from crossrail.control.mailbox import Mailbox
from crossrail.errors import CrossrailError, UsageError
from crossrail.weights.inventory.checkpoint import Checkpoint
from crossrail.weights.services.controller import WeightController
from crossrail.weights.services.reports import ControllerOptions, UpdateReport
from crossrail.weights.services.trainer import WeightTrainer

_LOOK_S = 0.2


@dataclass(frozen=True)
class _Options:
    targets: int
    reader: tuple[int, int]
    controller: str | None
    address_file: Path | None
    ignore: tuple[str, ...]
    version: int
    wait_s: float
    timeout_s: float
    watermark: int
    transport: str
    rails: int | list[str]
    port: int
    secret: bytes


def load(checkpoint: Path, secret_file: Path | None, **options: Any) -> None:
    """The command; commands.py has its options and its help."""
    chosen = _Options(secret=read_secret(secret_file), **options)
    if (chosen.controller is None) != (chosen.reader[0] == 0):
        raise UsageError("reader 0 is the controller; the others need its address: --controller")
    source = Checkpoint(checkpoint)
    try:
        ended_by = event_loop.run(_until_signal(_load(source, chosen, open_console())))
    finally:
        source.close()
    if ended_by is not None:
        click.echo(f"ended by {ended_by.name}", err=True)
        click.get_current_context().exit(128 + ended_by)


async def _until_signal(work: Coroutine[Any, Any, None]) -> signal.Signals | None:
    """Which of SIGTERM and SIGHUP ended it, with its files put away; None: it came to its own end."""
    loop, task, came = asyncio.get_running_loop(), asyncio.ensure_future(work), []

    def end(number: signal.Signals) -> None:
        came.append(number)
        task.cancel()

    handled = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    for number in handled:  # not one that nohup has the process ignore
        loop.add_signal_handler(number, end, number)
    try:
        await task
    except asyncio.CancelledError:
        if not came:
            raise
        return came[0]
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
    return None


async def _load(source: Checkpoint, options: _Options, console: Console) -> None:
    names = [name for name in source.names if not any(fnmatchcase(name, pattern) for pattern in options.ignore)]
    if not names:
        raise UsageError("no tensor of the checkpoint is left")
    console.print(f"{format_count(len(names), 'tensor')}, {format_bytes(source.nbytes(names))}")
    async with _reading(source, names, options) as trainer:
        if options.controller is not None:
            await trainer.join(_address(options.controller), options.wait_s)
            step = await trainer.publish(options.version, _patience_s(options))
            console.print(f"reader {trainer.rank} wrote {format_bytes(step.written_bytes)}")
            return
        async with _opened("load", options, options.port) as (_, box):
            report = await _lead(trainer, WeightController(box), options, console)
    console.print(
        f"[green]ok[/green]: version {report.version} is at {format_count(options.targets, 'inference rank')}: "
        f"{format_bytes(report.written_bytes)} in {report.transfer_s:.2f} s, "
        f"{rate_text(gb_per_s(report.written_bytes, report.transfer_s))}, planned in {report.plan_s:.2f} s; "
        f"the slowest reader prepared for {max(step.prepare_s for step in report.steps.values()):.2f} s and wrote for "
        f"{max(step.write_s for step in report.steps.values()):.2f} s"
    )


def _patience_s(options: _Options) -> float:
    """Time limit of publish(): until all have joined, the update is over, and ranks have switched."""
    return options.wait_s + options.timeout_s + ControllerOptions().abort_s


async def _lead(
    trainer: WeightTrainer, controller: WeightController, options: _Options, console: Console
) -> UpdateReport:
    await trainer.join(controller.address, options.wait_s)
    with _told(controller.address.hex(), options.address_file, console):
        await _everybody(controller, options, console)
        offered = asyncio.ensure_future(trainer.publish(options.version, _patience_s(options)))
        try:
            with showing_update(console, f"version {options.version}") as show:
                report = await controller.update(options.version, options.timeout_s, show)
            await offered
            if lost := [name for name in report.left_out if not name.startswith("trainer")]:
                raise CrossrailError(
                    f"version {options.version} may not be at {', '.join(lost)}, which went meanwhile. Next: restart "
                    "what died, and load once more"
                )
            return report
        finally:
            offered.cancel()
            await asyncio.gather(offered, return_exceptions=True)


async def _everybody(controller: WeightController, options: _Options, console: Console) -> None:
    """Returns when all readers and ranks have joined. WaitTimeout, naming those that are missing."""
    ready = asyncio.ensure_future(controller.ready(range(options.reader[1]), range(options.targets), options.wait_s))
    try:
        with console.status("waiting") as status:
            while not (await asyncio.wait([ready], timeout=_LOOK_S))[0]:
                readers, targets = (len(controller.ranks(role)) for role in ("trainer", "target"))
                status.update(
                    f"waiting for inference ranks ({targets} of {options.targets}) and readers "
                    f"({readers} of {options.reader[1]})"
                )
        await ready
    finally:
        ready.cancel()
        await asyncio.gather(ready, return_exceptions=True)


@asynccontextmanager
async def _reading(source: Checkpoint, names: list[str], options: _Options) -> AsyncIterator[WeightTrainer]:
    """This process as a trainer that holds its share of the checkpoint."""
    rank, count = options.reader
    port = options.port + RAILS_MAX if options.port and rank == 0 else options.port
    async with _opened(f"reader-{rank}", options, port) as (engine, box):
        with source.memory(engine, rank, count, names) as memory:
            trainer = WeightTrainer(box, memory, options.watermark)
            try:
                yield trainer
            finally:
                await trainer.close()


def _opened(name: str, options: _Options, port: int) -> AbstractAsyncContextManager[tuple[xr.Engine, Mailbox]]:
    return opened_mailbox(name, options.secret, transport=options.transport, rails=options.rails, port=port)


@contextmanager
def _told(address: str, file: Path | None, console: Console) -> Iterator[None]:
    """Shows where the controller is, for as long as it exists."""
    if file is None:
        console.print(f"controller: {address}", soft_wrap=True)
        yield
        return
    written = file.with_name(f"{file.name}.new")
    with naming(file):
        written.write_text(f"{address}\n")
        written.replace(file)  # readers find all of it or nothing
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _address(text: str) -> bytes:
    file = Path(text)
    try:
        return bytes.fromhex(file.read_text() if len(text) < 256 and file.is_file() else text)
    except (ValueError, OSError) as error:
        raise CrossrailError(f"--controller {text[:64]}: neither an address nor a file with one: {error}") from None
