"""`crossrail weights demo`: trainers, inference ranks, one version after another, each compared bit for bit.

This process is the controller. Each inference rank compares all its weights with a conversion of the whole checkpoint.
With --kill a trainer is killed in the middle of an update: the update fails everywhere, another trainer takes its
place, and the same version arrives.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace

from rich.markup import escape
from rich.table import Table

from crossrail.cli import event_loop
from crossrail.cli.console import open_console
from crossrail.cli.tables import Fitted
from crossrail.cli.text import format_bytes, gb_per_s
from crossrail.cli.weights.common import opened_mailbox
from crossrail.cli.weights.players import Player, Players
from crossrail.cli.weights.progress import showing_update
from crossrail.errors import CrossrailError
from crossrail.weights.errors import UpdateFailed
from crossrail.weights.services.controller import OnProgress, Stage, WeightController
from crossrail.weights.services.reports import UpdateReport
from crossrail.weights.toy import TargetKind, ToyModel

_UPDATE_S = 60.0
_CHECK_S = 120.0
# The first is updated in place, between pause and resume, the second has spare memory.
_TARGETS: tuple[tuple[TargetKind, bool], ...] = (("fused", False), ("fp8", True))


def demo(versions: int, trainers: int, mib: int, transport: str, kills: bool) -> None:
    """The command; commands.py has its options and its help."""
    event_loop.run(_Demo(versions, trainers, ToyModel.of_bytes(mib << 20), transport).run(kills))


class _Demo:
    def __init__(self, versions: int, trainers: int, model: ToyModel, transport: str) -> None:
        self._versions, self._trainers, self._model, self._transport = versions, trainers, model, transport
        self._console = open_console()
        self._table = Table(title="updates; equal: to what converting the whole checkpoint gives, bit for bit")
        for column in ("version", "written", "plan ms", "transfer ms", "GB/s", "slowest stage", "equal"):
            self._table.add_column(column, justify="right", no_wrap=True)

    async def run(self, kills: bool) -> None:
        secret = secrets.token_hex(16)
        async with (
            opened_mailbox("controller", secret.encode(), transport=self._transport) as (_, box),
            Players(secret) as players,
        ):
            controller = WeightController(box)
            await self._start(players, controller)
            for version in range(1, self._versions + 1):
                is_last = version == self._versions
                report = await self._update(controller, version, players if kills and is_last else None)
                self._show(report, await self._check(players, version))
        self._console.print(Fitted(self._table))
        self._console.print(f"[green]ok[/green]: {self._versions} versions, all bits equal at all inference ranks")

    def _trainer(self, controller: WeightController, rank: int, first: int) -> Player:
        address = controller.address.hex()
        trainer = Player("trainer", rank, self._model, address, self._versions, first, self._trainers)
        return replace(trainer, transport=self._transport)

    async def _start(self, players: Players, controller: WeightController) -> None:
        fleet = [self._trainer(controller, rank, 1) for rank in range(self._trainers)]
        for rank, (kind, spare) in enumerate(_TARGETS):
            target = Player("target", rank, self._model, controller.address.hex(), self._versions, kind=kind)
            fleet.append(replace(target, spare=spare, transport=self._transport))
        await asyncio.gather(*(players.start(player) for player in fleet))
        await controller.ready(range(self._trainers), range(len(_TARGETS)), _UPDATE_S)
        self._console.print(
            f"{self._trainers} trainers share {format_bytes(self._model.nbytes)} in bfloat16; inference ranks: "
            + ", ".join(f"{kind}{' with spare memory' if spare else ' in place'}" for kind, spare in _TARGETS)
        )

    async def _update(self, controller: WeightController, version: int, to_kill: Players | None) -> UpdateReport:
        with showing_update(self._console, f"version {version}") as show:
            if to_kill is None:
                return await controller.update(version, _UPDATE_S, show)
            return await self._update_with_a_death(controller, version, to_kill, show)

    async def _update_with_a_death(
        self, controller: WeightController, version: int, players: Players, show: OnProgress
    ) -> UpdateReport:
        victim = self._trainers - 1
        writing = asyncio.get_running_loop().create_future()

        def watch(stage: Stage, done: int, whole: int) -> None:
            if stage == "write" and not writing.done():
                writing.set_result(None)
            show(stage, done, whole)

        update = asyncio.ensure_future(controller.update(version, _UPDATE_S, watch))
        await asyncio.wait([update, writing], return_when=asyncio.FIRST_COMPLETED)
        await players.kill(f"trainer-{victim}")
        try:
            return await update  # it was quicker than the kill
        except UpdateFailed as error:
            self._console.print(f"[red]killed[/red] trainer {victim}: {escape(str(error))}")
        await players.start(self._trainer(controller, victim, version))
        return await controller.update(version, _UPDATE_S, show)

    async def _check(self, players: Players, version: int) -> bool:
        for rank in range(len(_TARGETS)):
            said = await players.said(f"target-{rank}", "version", _CHECK_S)
            if said["version"] != version or said["wrong"]:
                raise CrossrailError(
                    f"inference rank {rank} has version {said['version']}, and of {version} these are wrong: "
                    f"{', '.join(said['wrong']) or 'none'}"
                )
        return True

    def _show(self, report: UpdateReport, equal: bool) -> None:
        stages = {
            name: max(getattr(step, f"{name}_s") for step in report.steps.values())
            for name in ("gather", "prepare", "write", "barrier")
        }
        slowest = max(stages, key=stages.__getitem__)
        self._table.add_row(
            str(report.version),
            format_bytes(report.written_bytes),
            f"{report.plan_s * 1e3:.1f}",
            f"{report.transfer_s * 1e3:.1f}",
            f"{gb_per_s(report.written_bytes, report.transfer_s):.2f}",
            f"{slowest} {stages[slowest] * 1e3:.0f} ms",
            "yes" if equal else "no",
        )
