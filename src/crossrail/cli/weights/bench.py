"""`crossrail weights bench`: updates on this machine, next to memcpy and next to the ordinary way.

The ordinary way gathers every parameter at trainer 0, which broadcasts it to the inference ranks, by torch.distributed
over gloo. checkpoint-engine's own parameter servers, one at each inference rank, broadcast what each owns of the model,
here over gloo too. All of it runs in turns, so that what else the machine does meets them alike.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from crossrail._text import plain
from crossrail.cli import event_loop
from crossrail.cli.console import open_console
from crossrail.cli.json_output import is_alone, saved_first
from crossrail.cli.tables import Fitted
from crossrail.cli.text import format_bytes, gb_per_s
from crossrail.cli.weights.checkpoint_engine import CheckpointEngineFleet
from crossrail.cli.weights.common import opened_mailbox
from crossrail.cli.weights.gloo import GlooFleet
from crossrail.cli.weights.players import Player, Players
from crossrail.cli.weights.small_writes import measure as measure_small
from crossrail.errors import CrossrailError
from crossrail.weights.services.controller import WeightController
from crossrail.weights.services.reports import UpdateReport
from crossrail.weights.toy import ToyModel

_UPDATE_S = 300.0
_COPY_BYTES = 256 << 20
_SMALL_ROUNDS = 3
_UPDATE = "update, from Go to the last count"
_GLOO = "gather and broadcast by gloo"
_CHECKPOINT_ENGINE = "checkpoint-engine, over gloo"
# of an expert of Qwen3-30B-A3B
_HIDDEN = 2048
_INTERMEDIATE = 768


@dataclass
class _Row:
    """One measure. values: one per round, in the unit."""

    title: str
    unit: str
    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)


_T = TypeVar("_T")


class _Rival(Protocol):
    """Another method, in processes of its own. part: the share of the model's bytes that it moves. Calls block."""

    part: float

    def start(self) -> None:
        """Returns when they are ready."""

    def update(self) -> float:
        """Seconds of one."""

    def close(self) -> None:
        """Ends them."""


def bench(
    nbytes: int,
    trainers: int,
    targets: int,
    rounds: int,
    fp8: bool,
    watermark: int,
    transport: str,
    no_gloo: bool,
    small_writes: int,
    json_path: Path | None,
) -> None:
    """The command; commands.py has its options and its help."""
    console = open_console(stderr=is_alone(json_path))
    model = ToyModel.of_bytes(nbytes, _HIDDEN, _INTERMEDIATE)
    has_gloo = not no_gloo and importlib.util.find_spec("torch") is not None
    if not no_gloo and not has_gloo:
        console.print("gloo: left out, torch is not installed")
    player = Player("trainer", 0, model, "", rounds + 1, count=trainers, transport=transport, checks=False)
    player = replace(player, tmp_bytes_max=watermark, kind="fp8" if fp8 else "plain")
    rivals: dict[str, _Rival] = {}
    if has_gloo:
        rivals[_GLOO] = GlooFleet(model, trainers, targets)
        if importlib.util.find_spec("checkpoint_engine") is not None:
            rivals[_CHECKPOINT_ENGINE] = CheckpointEngineFleet(model.nbytes, targets)
        else:
            console.print("checkpoint-engine: left out, it is not installed")
    measured = event_loop.run(_measure(player, targets, rounds, rivals, console))
    small = _small(small_writes, player, console) if small_writes else None
    rows = measured if small is None else [*measured, small]
    with saved_first(json_path, {row.title: {"unit": row.unit, "values": row.values} for row in rows}):
        _show(measured, model, console)
        if small is not None:
            console.print(f"{small.title}: {small.values[0]:.1f} {small.unit}")


def _small(writes: int, player: Player, console: Console) -> _Row:
    row = _Row(f"Python for each of {writes:,} writes of 1 KiB", "us")
    kind, params = ("fp8", max(writes // 2, 1)) if player.kind == "fp8" else ("direct", writes)
    with console.status(f"{writes:,} writes of 1 KiB", refresh_per_second=2):
        row.values.append(event_loop.run(measure_small(kind, params, _SMALL_ROUNDS, player.transport)).loop_us)
    return row


async def _measure(
    player: Player, targets: int, rounds: int, rivals: dict[str, _Rival], console: Console
) -> list[_Row]:
    secret = secrets.token_hex(16)
    async with (
        opened_mailbox("controller", secret.encode(), transport=player.transport) as (_, box),
        Players(secret) as players,
    ):
        controller = WeightController(box)
        try:
            for title, rival in list(rivals.items()):
                console.print(f"{title}: its processes start")
                try:
                    await _done(rival, rival.start)
                    await _done(rival, rival.update)  # finds no connection, no page and no module
                except CrossrailError as error:  # with a GPU checkpoint-engine is not to be had on the CPU, for one
                    await asyncio.to_thread(rivals.pop(title).close)
                    console.print(f"{title}: left out, {plain(str(error))}", markup=False)
            console.print(f"{player.count} trainers and {targets} inference ranks start, and update once")
            player = replace(player, controller=controller.address.hex())
            await asyncio.gather(
                *(players.start(replace(player, rank=rank)) for rank in range(player.count)),
                *(players.start(replace(player, role="target", rank=rank)) for rank in range(targets)),
            )
            first = await controller.update(1, _UPDATE_S)
            writes = sum(step.writes for step in first.steps.values())
            console.print(
                f"{format_bytes(player.model.nbytes)} as {player.kind}, planned and told in "
                f"{first.plan_s * 1e3:.0f} ms, {writes} writes; {rounds} rounds follow"
            )
            with console.status("", refresh_per_second=2) as status:  # seldom: it takes time of what is measured
                return await _rounds(controller, players, rivals, rounds, player.count, status.update)
        finally:
            for rival in rivals.values():
                await asyncio.to_thread(rival.close)


async def _done(rival: _Rival, call: Callable[[], _T]) -> _T:
    """In a thread. If we are cancelled, its processes are ended until it returns: nothing else ends its waits."""
    doing = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(doing)
    finally:
        while not doing.done():
            await asyncio.to_thread(rival.close)
            await asyncio.wait([doing], timeout=0.05)
        doing.exception()  # marked as seen: if we are cancelled, nobody asks


async def _rounds(
    controller: WeightController,
    players: Players,
    rivals: Mapping[str, _Rival],
    rounds: int,
    trainers: int,
    show: Callable[[str], object],
) -> list[_Row]:
    copy = _Row("memcpy, all cores", "GB/s")
    stage = _Row("write stage", "GB/s")
    whole = _Row(_UPDATE, "GB/s")
    overlap = _Row("update over its slowest stage", "x")
    busy = _Row("update over its processor time by core", "x")
    python = _Row("event loop's processor time per write, copies included", "us")
    others = {title: _Row(title, "GB/s") for title in rivals}
    cores = len(os.sched_getaffinity(0))
    for index in range(rounds):
        show(f"round {index + 1} of {rounds}: memcpy and an update")
        copy.values.append(_memcpy_gb_per_s(min(trainers, os.cpu_count() or 1)))
        before_s = players.processor_s()
        report = await controller.update(index + 2, _UPDATE_S)
        processor_s = players.processor_s() - before_s
        steps = report.steps.values()
        slowest_write = max(step.write_s for step in steps)
        stage.values.append(gb_per_s(report.written_bytes, slowest_write))
        whole.values.append(gb_per_s(report.written_bytes, report.transfer_s))
        overlap.values.append(report.transfer_s / max(slowest_write, *(step.prepare_s for step in steps)))
        busy.values.append(report.transfer_s / (processor_s / cores))
        python.values.append(_python_us(report))
        for title, rival in rivals.items():
            show(f"round {index + 1} of {rounds}: {title}")
            took_s = await _done(rival, rival.update)
            others[title].values.append(gb_per_s(int(report.written_bytes * rival.part), took_s))
    return [copy, stage, whole, overlap, busy, python, *others.values()]


def _python_us(report: UpdateReport) -> float:
    """For the trainer that spends most: processor time of its pipeline's thread, per write.

    Includes what that thread itself copies while it drives the engine.
    """
    return max(step.python_s / max(step.writes, 1) * 1e6 for step in report.steps.values())


def _memcpy_gb_per_s(threads: int) -> float:
    """memcpy by as many threads as can copy side by side, each in its own memory. Best of three."""
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
    for title, name in ((_GLOO, "gathering and broadcasting"), (_CHECKPOINT_ENGINE, "checkpoint-engine")):
        if (rival := by_title.get(title)) is not None:
            console.print(f"{by_title[_UPDATE].median / rival.median:.1f} times {name}")
