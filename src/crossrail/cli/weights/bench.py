"""`crossrail weights bench`: updates on this machine, beside what its memory can do and beside the ordinary way.

The ordinary way gathers every parameter at trainer 0, which broadcasts it to the inference ranks, by torch.distributed
over gloo. All of it runs in turns, so that what else the machine does meets them alike.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import secrets
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import crossrail as xr
from crossrail.cli.console import open_console
from crossrail.cli.service import transport_option
from crossrail.cli.tables import Fitted
from crossrail.cli.text import OutputFile, format_bytes, gb_per_s, size
from crossrail.cli.weights.common import naming
from crossrail.cli.weights.gloo import GlooFleet
from crossrail.cli.weights.players import Player, Players
from crossrail.control.wire import EngineWire
from crossrail.weights.services.controller import WeightController
from crossrail.weights.services.messages import mailbox
from crossrail.weights.services.reports import UpdateReport
from crossrail.weights.toy import ToyModel

_UPDATE_S = 300.0
_COPY_BYTES = 256 << 20
# Of an expert of Qwen3-30B-A3B.
_HIDDEN = 2048
_INTERMEDIATE = 768


@dataclass
class _Row:
    """Of one measure. values: one for each round, of the unit."""

    title: str
    unit: str
    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@click.command()
@click.option(
    "--size", "nbytes", default="512MiB", show_default=True, type=size(1 << 20, 1 << 40), help="Size of the model."
)
@click.option(
    "--trainers",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Trainers, each with a share of the model.",
)
@click.option(
    "--targets",
    type=click.IntRange(1, 64),
    default=2,
    show_default=True,
    help="Inference ranks, each with the whole model.",
)
@click.option(
    "--rounds", type=click.IntRange(1, 100_000), default=5, show_default=True, help="Number of updates to measure."
)
@click.option("--fp8", is_flag=True, help="Inference ranks use fp8: all weights are converted before they are written.")
@click.option(
    "--watermark",
    default="64MiB",
    show_default=True,
    type=size(1 << 16, 1 << 40),
    help="Memory for each trainer to prepare tensors in.",
)
@transport_option("shm")
@click.option("--no-gloo", is_flag=True, help="Leave out gather and broadcast by gloo, as if torch were not installed.")
@click.option("--json", "json_path", type=OutputFile(), help="Also write the figures to this file.")
def bench(
    nbytes: int,
    trainers: int,
    targets: int,
    rounds: int,
    fp8: bool,
    watermark: int,
    transport: str,
    no_gloo: bool,
    json_path: Path | None,
) -> None:
    """Measure updates of a model from trainers to inference ranks."""
    console = open_console()
    model = ToyModel.of_bytes(nbytes, _HIDDEN, _INTERMEDIATE)
    has_gloo = not no_gloo and importlib.util.find_spec("torch") is not None
    if not no_gloo and not has_gloo:
        console.print("gloo: left out, torch is not installed")
    player = Player("trainer", 0, model, "", rounds + 1, count=trainers, transport=transport, checks=False)
    player = replace(player, tmp_bytes_max=watermark, kind="fp8" if fp8 else "plain")
    measured = asyncio.run(_measure(player, targets, rounds, has_gloo, console))
    _show(measured, model, console)
    if json_path is not None:
        with naming(json_path):
            json_path.write_text(json.dumps({row.title: {"unit": row.unit, "values": row.values} for row in measured}))


async def _measure(player: Player, targets: int, rounds: int, has_gloo: bool, console: Console) -> list[_Row]:
    secret = secrets.token_hex(16)
    players = Players(secret)
    gloo = GlooFleet(player.model, player.count, targets) if has_gloo else None
    with xr.Engine("controller", transport=player.transport, secret=secret.encode()) as engine:
        wire = EngineWire(engine)
        box = mailbox(wire, secret.encode())
        controller = WeightController(box)
        box.start()
        try:
            if gloo is not None:
                await asyncio.to_thread(gloo.start)
            player = replace(player, controller=controller.address.hex())
            await asyncio.gather(
                *(players.start(replace(player, rank=rank)) for rank in range(player.count)),
                *(players.start(replace(player, role="target", rank=rank)) for rank in range(targets)),
            )
            first = await controller.update(1, _UPDATE_S)
            writes = sum(step.writes for step in first.steps.values())
            console.print(
                f"{player.count} trainers, {targets} inference ranks with {format_bytes(player.model.nbytes)} as "
                f"{player.kind}; planned and told in {first.plan_s * 1e3:.0f} ms, {writes} writes"
            )
            return await _rounds(controller, gloo, rounds, player.count)
        finally:
            if gloo is not None:
                await asyncio.to_thread(gloo.close)
            await players.close()
            await box.close()
            wire.close()


async def _rounds(controller: WeightController, gloo: GlooFleet | None, rounds: int, trainers: int) -> list[_Row]:
    copy = _Row("memcpy, all cores", "GB/s")
    stage = _Row("write stage", "GB/s")
    whole = _Row("update, from Go to the last count", "GB/s")
    overlap = _Row("update over its slowest stage", "x")
    python = _Row("event loop's processor time per write", "us")
    ordinary = _Row("gather and broadcast by gloo", "GB/s")
    for index in range(rounds):
        copy.values.append(_memcpy_gb_per_s(min(trainers, os.cpu_count() or 1)))
        report = await controller.update(index + 2, _UPDATE_S)
        steps = report.steps.values()
        slowest_write = max(step.write_s for step in steps)
        stage.values.append(gb_per_s(report.written_bytes, slowest_write))
        whole.values.append(gb_per_s(report.written_bytes, report.transfer_s))
        overlap.values.append(report.transfer_s / max(slowest_write, *(step.prepare_s for step in steps)))
        python.values.append(_python_us(report))
        if gloo is not None:
            ordinary.values.append(gb_per_s(report.written_bytes, await asyncio.to_thread(gloo.update)))
    return [copy, stage, whole, overlap, python, *([ordinary] if gloo is not None else [])]


def _python_us(report: UpdateReport) -> float:
    """Of the trainer that spends most: processor time of its pipeline's thread, by its writes.

    What that thread copies itself, while it drives the engine as a guest, is in it.
    """
    return max(step.python_s / max(step.writes, 1) * 1e6 for step in report.steps.values())


def _memcpy_gb_per_s(threads: int) -> float:
    """As many threads as can copy side by side, each its own memory. Best of three."""
    pairs = [(np.ones(_COPY_BYTES, np.uint8), np.zeros(_COPY_BYTES, np.uint8)) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(3):
            begun = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), pairs))
            best = max(best, gb_per_s(threads * _COPY_BYTES, time.perf_counter() - begun))
    return best


def _show(measured: list[_Row], model: ToyModel, console: Console) -> None:
    table = Table(title=f"weight updates, {format_bytes(model.nbytes)} of bfloat16")
    for column in ("what", "median", "best", "unit", "of memcpy"):
        table.add_column(column, justify="left" if column in ("what", "unit") else "right")
    limit = measured[0].median
    for row in measured:
        best = max(row.values) if row.unit == "GB/s" else min(row.values)
        share = f"{row.median / limit:.2f}" if row.unit == "GB/s" else ""
        table.add_row(row.title, f"{row.median:.2f}", f"{best:.2f}", row.unit, share)
    console.print(Fitted(table))
    by_title = {row.title: row for row in measured}
    if (gloo := by_title.get("gather and broadcast by gloo")) is not None:
        ratio = by_title["update, from Go to the last count"].median / gloo.median
        console.print(f"{ratio:.1f} times gathering and broadcasting")
