"""`crossrail weights rl`: a Qwen3-MoE learns, and after each step two inference ranks get its weights, bit for bit."""

from __future__ import annotations

from statistics import fmean

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress
from rich.table import Table

from crossrail.cli import event_loop
from crossrail.cli.console import open_console, text_column
from crossrail.cli.group import require
from crossrail.cli.tables import Fitted
from crossrail.cli.text import format_bytes
from crossrail.cli.weights.rl_loop import RlStep, run_rl
from crossrail.cli.weights.rl_options import SERVED, RlOptions


def rl(steps: int, trainers: int, batch: int, seed: int, transport: str) -> None:
    """The command; commands.py has its options and its help."""
    require("weights rl", "weights", "torch", "transformers")
    event_loop.run(_show(RlOptions(steps, trainers, batch, seed, transport)))


async def _show(options: RlOptions) -> None:
    console = open_console()
    progress = Progress(
        text_column("step {task.completed}/{task.total}"),
        BarColumn(),
        text_column("{task.description}"),
    )
    bar = progress.add_task("", total=options.steps)
    table = Table(title="reward: part of the sampled tokens that are even")
    columns = ("step", *(f"reward {each.label}" for each in SERVED), "gap", "written", "transfer ms", "equal tensors")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    rewards: list[float] = []

    def on_phase(name: str, done: int, whole: int) -> None:
        progress.update(bar, description=f"{name} {format_bytes(done)} of {format_bytes(whole)}" if whole else name)

    def on_step(step: RlStep) -> None:
        rewards.append(fmean(step.rewards))
        progress.update(bar, completed=step.version - 1)
        table.add_row(
            str(step.version - 1),
            *(f"{reward:.3f}" for reward in step.rewards),
            "" if step.gap is None else f"{step.gap:.3f}",
            format_bytes(step.report.written_bytes),
            f"{step.report.transfer_s * 1e3:.1f}",
            str(step.tensors),
        )

    with Live(Group(table, progress), console=console, transient=True):
        await run_rl(options, on_phase, on_step)
    console.print(Fitted(table))
    console.print(f"mean reward {rewards[0]:.3f} at first, {rewards[-1]:.3f} after {options.steps} steps")
    console.print("[green]ok[/green]: after each update all tensors equal the converted checkpoint, bit for bit")
