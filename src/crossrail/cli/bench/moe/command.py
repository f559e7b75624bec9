"""`crossrail bench moe`: chooses shapes, ranks and what to compare with, and checks the results against the aims."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import click
import numpy as np
from rich.console import Console

from crossrail.cli.bench import report
from crossrail.cli.bench.machine import busy_share, describe_machine
from crossrail.cli.bench.moe import mpi
from crossrail.cli.bench.moe.kernels import measure_kernels
from crossrail.cli.bench.moe.posting import measure_posting
from crossrail.cli.bench.moe.ranks import Durations, Ranks, durations_us
from crossrail.cli.bench.moe.work import SHAPES, MoeShape, memory_bytes
from crossrail.cli.bench.options import output_options
from crossrail.cli.bench.outputs import Outputs
from crossrail.cli.bench.pair import choose_cpus
from crossrail.cli.bench.spec import Bar, Line, Result, Sample
from crossrail.cli.console import open_console
from crossrail.cli.json_output import is_alone
from crossrail.cli.memory import check_memory
from crossrail.cli.option_types import IntRange
from crossrail.errors import CrossrailError, UsageError

_STEPS = ("dispatch", "combine")
_COPIES_MAX = {"decode": 1.5, "prefill": 1.25}
_FASTER_THAN_GLOO = 5.0
_ROUNDS = {"decode": 40, "prefill": 3}
_QUICK_ROUNDS = {"decode": 10, "prefill": 1}
_OTHERS = {
    "gloo": "the same by torch.distributed over gloo",
    "gloo-bare": "its all_to_all_single alone",
    "mpi-bare": "MPI's alltoallv alone",
}
_POSTING_ROUNDS, _QUICK_POSTING_ROUNDS = 400, 20
_ORDINARY_SHARE = 4  # they take many times as long as we do


@dataclass(frozen=True)
class _Options:
    transport: str
    runs: int
    rounds: dict[str, int]
    gloo: bool
    mpi: bool


@click.command("moe")
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    type=click.Choice(list(SHAPES)),
    help="Tokens per step: few or many [default: both].",
)
@click.option(
    "--ranks",
    "counts",
    multiple=True,
    type=IntRange(1, 64),
    help="Number of ranks; may be repeated [default: 2 and 4].",
)
@click.option(
    "--transport",
    type=click.Choice(["auto", "shm", "tcp", "verbs", "ofi", "ofi:tcp"]),
    help="Transport of the ranks' engines [default: shm].",
)
@click.option("--runs", type=IntRange(1, 1000), default=5, show_default=True, help="Samples of each measure.")
@click.option("--quick", is_flag=True, help="Fewer rounds: for a first look, not for figures to quote.")
@click.option("--no-gloo", is_flag=True, help="Leave out torch.distributed, as if torch were not installed.")
@click.option("--no-mpi", is_flag=True, help="Leave out MPI, as if mpi4py or mpiexec were not installed.")
@click.option("--kernels", is_flag=True, help="Only the kernels of one rank, in this process.")
@output_options
@click.option("--strict", is_flag=True, help="Exit code 1 if a target is missed.")
def moe(
    shapes: tuple[str, ...],
    counts: tuple[int, ...],
    transport: str | None,
    runs: int,
    quick: bool,
    no_gloo: bool,
    no_mpi: bool,
    kernels: bool,
    strict: bool,
    **outputs: Any,
) -> None:
    """Measure dispatch and combine of MoE layers against the limits of this machine.

    Each rank is a process. A step begins when all ranks are ready and ends when the last is done. Just before it, all
    ranks copy as many bytes as they will receive by memcpy: that is the limit. Every byte is compared in a round that
    is not timed. Before that: what it costs to post a round's writes to 56 ranks, where nothing is moved.
    """
    if kernels and transport is not None:
        raise UsageError("--kernels measures without engines: leave --transport out")
    transport = transport or "shm"
    written = Outputs.chosen(outputs)
    console = open_console(stderr=is_alone(written.json_path))
    without_gloo = "--no-gloo" if no_gloo else "" if importlib.util.find_spec("torch") else "torch is not installed"
    without_mpi = "--no-mpi" if no_mpi else mpi.missing()
    chosen = [SHAPES[name] for name in dict.fromkeys(shapes or SHAPES)]
    of_ranks = list(dict.fromkeys(counts or (2, 4)))
    largest, most = max(chosen, key=lambda shape: shape.tokens), max(of_ranks)
    needed_bytes = memory_bytes(largest, most, gloo=not (without_gloo or kernels))
    check_memory(f"{largest.name} with {most} ranks", needed_bytes, "take fewer --ranks, or --shape decode")
    for name, why in (("gloo", without_gloo), ("MPI", without_mpi)):
        if why and not kernels:
            console.print(f"{name}: left out, {why}")
    options = _Options(transport, runs, _QUICK_ROUNDS if quick else _ROUNDS, not without_gloo, not without_mpi)
    console.print(describe_machine(), markup=False)
    busy = busy_share(choose_cpus())
    results: list[Result] = []
    settings = {"transport": transport, "runs": runs, "quick": quick, "kernels": kernels}
    with written.of(results, settings, busy, console):
        if not kernels:
            results += _measure_posting(runs, _QUICK_POSTING_ROUNDS if quick else _POSTING_ROUNDS, console)
        for shape in chosen:
            for count in of_ranks:
                measure = _measure_kernels if kernels else _measure
                results += measure(shape, count, options, console)
    verdicts = {result.verdict for result in results}
    if "error" in verdicts or (strict and "miss" in verdicts):
        raise click.exceptions.Exit(1)


def _measure(shape: MoeShape, count: int, options: _Options, console: Console) -> Iterator[Result]:
    """For one shape and number of ranks: our steps, then those of others. A failure is reported, and ends this part."""
    has_bars = options.transport == "shm"
    ours = [Result(_our_line(shape, count, step, _COPIES_MAX[shape.name] if has_bars else None)) for step in _STEPS]
    bound = _FASTER_THAN_GLOO if has_bars else None
    gloo = [Result(_others_line(shape, count, step, "gloo", bound)) for step in _STEPS]
    gloo += [Result(_others_line(shape, count, step, "gloo-bare", None)) for step in _STEPS]
    mpis = [Result(_others_line(shape, count, step, "mpi-bare", None)) for step in _STEPS]
    results = [*ours, *(gloo if options.gloo else []), *(mpis if options.mpi else [])]
    try:
        with Ranks(shape, count, options.transport) as ranks:
            ranks.start()
            if options.gloo:
                ranks.start_ordinary()
            rounds = options.rounds[shape.name]
            took = [_sample(ranks, ours, gloo if options.gloo else [], rounds) for _ in range(options.runs)]
            _note_fastest(ours, took)
        if options.mpi:
            _sample_mpi(shape, count, ours, mpis, options)
    except CrossrailError as error:
        console.print(f"{shape.name}, {count} ranks: {error}", style="red", markup=False, soft_wrap=True)
        for result in results:
            result.error = str(error)
    yield from results
    for result in results:
        console.print(report.one_line(result), markup=False, soft_wrap=True)


def _measure_posting(runs: int, rounds: int, console: Console) -> Iterator[Result]:
    """The measures without ranks. Keeps this thread off the core of the posting ones, if there is another."""
    allowed = os.sched_getaffinity(0)
    cpu = max(allowed)
    os.sched_setaffinity(0, (allowed - {cpu}) or allowed)
    try:
        for result in measure_posting(cpu, runs, rounds):
            yield result
            console.print(report.one_line(result), markup=False, soft_wrap=True)
    finally:
        os.sched_setaffinity(0, allowed)


def _measure_kernels(shape: MoeShape, count: int, options: _Options, console: Console) -> Iterator[Result]:
    for result in measure_kernels(shape, count, options.runs, options.rounds[shape.name]):
        yield result
        console.print(report.one_line(result), markup=False, soft_wrap=True)


def _our_line(shape: MoeShape, count: int, step: str, bound: float | None) -> Line:
    return Line(
        name=f"{shape.name}-{count}-{step}",
        title=f"MoE {step}, {shape.tokens} tokens, {count} ranks",
        unit="us",
        limit="memcpy of the same bytes",
        bar=None if bound is None else Bar("ratio", "<=", bound),
    )


def _others_line(shape: MoeShape, count: int, step: str, who: str, bound: float | None) -> Line:
    return Line(
        name=f"{shape.name}-{count}-{step}-{who}",
        title=_OTHERS[who],
        unit="us",
        limit=f"crossrail's {step}",
        bar=None if bound is None else Bar("ratio", ">=", bound),
    )


def _sample(ranks: Ranks, ours: list[Result], gloo: list[Result], rounds: int) -> Durations:
    """One sample of each result, and the times of our rounds."""
    took = ranks.run(rounds)
    for step, result in zip(_STEPS, ours, strict=True):
        result.samples.append(Sample(median(took[step]), median(took[f"copy-{step}"])))
    if gloo:
        ordinary = ranks.run_ordinary(max(rounds // _ORDINARY_SHARE, 1))
        measured = (*_STEPS, *(f"exchange-{step}" for step in _STEPS))
        for name, step, result in zip(measured, (*_STEPS, *_STEPS), gloo, strict=True):
            result.samples.append(Sample(median(ordinary[name]), median(took[step])))
    return took


def _note_fastest(ours: list[Result], took: list[Durations]) -> None:
    """If other programs take the cores, medians show mostly that: note the fastest tenth, too."""
    for step, result in zip(_STEPS, ours, strict=True):
        fastest, copy = (
            float(np.quantile(np.concatenate([run[name] for run in took]), 0.1)) for name in (step, f"copy-{step}")
        )
        result.note = f"fastest tenth {fastest / copy:.2f}x"


def _sample_mpi(shape: MoeShape, count: int, ours: list[Result], mpis: list[Result], options: _Options) -> None:
    """Starts MPI once, with nothing else running: its ranks spin, and would disturb ours."""
    rounds = max(options.runs * options.rounds[shape.name] // _ORDINARY_SHARE, 1)
    took = durations_us(mpi.run(shape, count, rounds))
    for step, own, result in zip(_STEPS, ours, mpis, strict=True):
        result.samples.append(Sample(median(took[step]), own.value))
