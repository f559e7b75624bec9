"""Options of `crossrail weights`. The commands themselves are in modules of their names, imported on use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from crossrail.cli.console import in_one_piece
from crossrail.cli.group import body
from crossrail.cli.json_output import json_option
from crossrail.cli.option_types import IntRange, OutputFile, seconds, size
from crossrail.cli.service import Decorator, engine_options, records_on_signal, together, transport_option
from crossrail.cli.weights.rl_options import RlOptions

READERS_MAX = 1 << 16  # of a checkpoint, as in crossrail.weights.inventory.checkpoint
WAYS = {
    "paper": ("paper",),
    "needed": ("needed",),
    "adapted": ("needed", "adapted"),
    "both": ("paper", "needed"),
    "all": ("paper", "needed", "adapted"),
}
SWEPT: Mapping[str, tuple[float, ...]] = {
    "trainers": (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0),
    "targets": (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0),
    "straggler": (1.0, 2.0, 4.0, 8.0, 16.0),
    "slow-link": (1.0, 1.5, 2.0, 3.0, 4.0, 8.0),
}
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_ranks = IntRange(max=1 << 16)  # each takes its time to describe

cluster_options = together(
    click.option("--trainers", type=_ranks, help="Number of trainers [default: as published for the model]."),
    click.option("--targets", type=_ranks, help="Inference ranks [default: as published for the model]."),
    click.option("--pipeline", type=int, help="Pipeline stages of the trainers."),
    click.option("--expert-parallel", type=int, help="Expert-parallel groups of a stage."),
    click.option("--dense-shard", type=int, help="Ranks over which all other parameters are sharded."),
    click.option("--target-experts", type=int, help="Inference ranks over which the experts are spread."),
    click.option("--layers", type=IntRange(1, 1000), help="Number of layers [default: all of the model's]."),
)


def _number(name: str, default: int, least: int, most: int | None, words: str) -> Decorator:
    return click.option(name, type=IntRange(least, most), default=default, show_default=True, help=words)


def _seconds(name: str, words: str) -> Decorator:
    return click.option(name, type=seconds(), default=600.0, show_default=True, help=words)


_trainers_option = _number("--trainers", 4, 1, 64, "Trainers, each with a share of the model.")


def _watermark_option(default: str, at_least: int, of: str) -> Decorator:
    return click.option(
        "--watermark",
        type=size(at_least, 1 << 40),
        default=default,
        show_default=True,
        help=f"Memory for each {of} to prepare tensors in.",
    )


def _reader(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if match is None or not int(match[1]) < int(match[2]) <= READERS_MAX:
        raise click.BadParameter(
            f"{text!r} is not an index and a number of readers, as 0/1 or 2/4, with at most {READERS_MAX} readers"
        )
    return int(match[1]), int(match[2])


@click.command()
@_number("--versions", 4, 1, 1_000_000, "Number of updates.")
@_trainers_option
@_number("--mib", 16, 1, 1 << 20, "Approximate size of the model in MiB, in bfloat16.")
@transport_option()
@click.option("--kill", "kills", is_flag=True, help="Kill a trainer in the middle of the last update.")
def demo(**options: Any) -> None:
    """Trainers update two inference ranks: one fused and tensor-parallel, one in fp8. Checked bit for bit."""
    body("weights", "crossrail.cli.weights.demo", "demo")(**options)


@click.command()
@click.option("--steps", default=RlOptions.steps, show_default=True, help="Number of training steps.")
@click.option("--trainers", default=RlOptions.trainers, show_default=True, help="FSDP2 shards, each a process.")
@click.option("--batch", default=RlOptions.batch, show_default=True, help="Completions per inference rank and step.")
@click.option("--seed", default=RlOptions.seed, show_default=True, help="Seed of weights, prompts and sampling.")
@transport_option(RlOptions.transport)
def rl(**options: Any) -> None:
    """Train a tiny Qwen3-MoE with reinforcement learning on the CPU: FSDP2 over gloo, rollouts in bf16 with TP 2 and in
    fp8.

    After each update both inference ranks compare all their weights with the converted checkpoint.
    """
    body("weights", "crossrail.cli.weights.rl", "rl")(**options)


@click.command()
@click.option(
    "--size", "nbytes", default="512MiB", show_default=True, type=size(1 << 20, 1 << 40), help="Size of the model."
)
@_trainers_option
@_number("--targets", 2, 1, 64, "Inference ranks, each with the whole model.")
@_number("--rounds", 5, 1, 100_000, "Number of updates to measure.")
@click.option("--fp8", is_flag=True, help="Inference ranks use fp8: all weights are converted before they are written.")
@_watermark_option("64MiB", 1 << 16, "trainer")
@transport_option("shm")
@click.option(
    "--no-gloo",
    is_flag=True,
    help="Leave out gather and broadcast by gloo, and checkpoint-engine, as if torch were not installed.",
)
@_number(
    "--small-writes",
    100_000,
    0,
    1_000_000,
    "Writes of 1 KiB in a step that measures what each costs in Python; 0 leaves it out.",
)
@json_option("the figures")
def bench(**options: Any) -> None:
    """Measure updates of a model from trainers to inference ranks."""
    body("weights", "crossrail.cli.weights.bench", "bench")(**options)


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@_number("--targets", 1, 1, READERS_MAX, "Number of inference ranks to wait for; they are numbered from 0.")
@click.option(
    "--reader",
    type=_reader,
    metavar="I/N",
    default="0/1",
    show_default=True,
    help="Index of this reader, and the number of readers.",
)
@click.option(
    "--controller", metavar="ADDRESS", help="For the other readers: the address that reader 0 printed, or its file."
)
@click.option(
    "--address-file",
    type=OutputFile(is_replaced=True),
    help="File to which reader 0 writes the address that ranks join, in hexadecimal; by default it is printed.",
)
@click.option(
    "--ignore", multiple=True, help="Pattern of tensors that no rank needs, such as 'mtp.*'; may be repeated."
)
@_number("--version", 0, 0, None, "Version number of these weights at the ranks.")
@_seconds("--wait-s", "Seconds to wait until all have joined.")
@_seconds("--timeout-s", "Seconds that the transfer may take.")
@_watermark_option("1GiB", 1 << 16, "reader")
@_number("--port", 0, 0, 65535, "First of the 16 ports (reader 0: 32) that TCP may listen on; 0: any.")
@engine_options
@records_on_signal()
def load(**options: Any) -> None:
    """Load the weights of CHECKPOINT, a safetensors file or a folder of them, into waiting inference ranks.

    The ranks are processes with a WeightReceiver, which join the address that this command prints.
    """
    body("weights", "crossrail.cli.weights.load", "load")(**options)


@click.command()
@click.argument("model", required=False)
@click.option(
    "--inventory",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Inventory of one process, from Inventory.to_bytes(); once per process, instead of MODEL.",
)
@cluster_options
@click.option(
    "--gather",
    type=click.Choice(["needed", "full"]),
    default="needed",
    show_default=True,
    help="needed: parameters are prepared where they are; full: every trainer gathers all of its part.",
)
@click.option("--ignore", multiple=True, help="A parameter that trainers hold and no inference rank needs.")
@click.option("-o", "--output", type=OutputFile(), help="Where to save the plan.")
def plan(**options: Any) -> None:
    """Plan an update of MODEL (kimi-k2, deepseek-v3, qwen3-235b) or from inventories, and verify the plan."""
    body("weights", "crossrail.cli.weights.plan", "plan")(**options)


@click.command()
@click.argument("file", type=_FILE)
@click.option("--compare", type=_FILE, help="Another plan: show the differences; exit code 1 if there are any.")
@click.option("--draw", "image", type=OutputFile(), help="Write the heat map as a PNG.")
@click.pass_context
@in_one_piece()
def show(ctx: click.Context, /, **options: Any) -> None:
    """Show the plan in FILE: figures, and how much each trainer (rows) sends to each target (columns)."""
    body("weights", "crossrail.cli.weights.show", "show")(ctx, **options)


@click.command()
@click.argument("model", default="kimi-k2")
@cluster_options
@click.option(
    "--way",
    type=click.Choice([*WAYS]),
    default="both",
    show_default=True,
    help="paper: every rank gathers everything; needed: weights are prepared where they are; adapted: the update "
    "after that, planned for the speeds that it showed; both: the first two.",
)
@click.option("--straggler", default=1.0, show_default=True, help="Factor by which trainer 0's GPU and CPU are slower.")
@click.option("--slow-link", default=1.0, show_default=True, help="Factor by which trainer 0's rails are slower.")
@click.option("--rails", default=1, show_default=True, help="Rails per GPU, which share 400 Gb/s.")
@click.option("--rail-down", is_flag=True, help="Trainer 0 loses a rail at the start.")
@click.option("--down-ms", type=float, help="With --rail-down: time until it comes back [default: never].")
@_watermark_option("8G", 1 << 20, "trainer")
@click.option("--sweep", metavar="NAME[=V,V...]", help=f"One update for each value; NAME: {', '.join(SWEPT)}.")
@click.option("--seed", default=1, show_default=True, help="Seed of all randomness.")
@json_option("the figures")
@click.option("--plot", "image", type=OutputFile(), help="Draw the timeline, or the sweep, as a PNG.")
def sim(**options: Any) -> None:
    """Simulate one update of MODEL (kimi-k2, deepseek-v3, qwen3-235b): real plan and engines, but no data.

    Work on GPUs takes the time that one rank of the paper's Table 5 took for it; the wire is the ConnectX-7 of its
    Table 2.
    """
    body("weights", "crossrail.cli.weights.sim", "sim")(**options)
