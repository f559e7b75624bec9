"""`crossrail bench run HOST:PORT`: measures with a `crossrail bench serve` on another host or in another shell."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import crossrail as xr
from crossrail._options import SECRET_VARIABLE
from crossrail.cli.bench import report
from crossrail.cli.bench.hosts import wire
from crossrail.cli.bench.hosts.driver import Driver
from crossrail.cli.bench.hosts.places import BENCH, is_loopback, loopback_rails, target_place
from crossrail.cli.bench.hosts.post import MESSAGES_HELD, Post
from crossrail.cli.bench.hosts.sweep import KINDS, Limit, Plan, measure, span_bytes
from crossrail.cli.bench.hosts.workers import EngineOptions, Workers
from crossrail.cli.bench.machine import busy_share, describe_machine
from crossrail.cli.bench.options import output_options
from crossrail.cli.bench.outputs import Outputs
from crossrail.cli.bench.pair import choose_cpus
from crossrail.cli.bench.spec import Result
from crossrail.cli.console import count_progress, open_console
from crossrail.cli.json_output import is_alone
from crossrail.cli.meeting import ask
from crossrail.cli.option_types import FloatRange, IntRange, cpu_list, size
from crossrail.cli.option_types import rails as rails_type
from crossrail.cli.service import secret_of, transport_option

_WELCOME_S = 60.0
_SIZE_MIN, _SIZE_MAX = 8, 1 << 30
_SIZES = "1K,4K,16K,64K,256K,1M,4M,32M"


def sizes(at_most: int) -> Callable[[str], tuple[int, ...]]:
    """The type of an option such as `4K,64K,1M`: multiples of 8 bytes, in order, each once."""
    one = size(_SIZE_MIN, at_most)

    def sizes(text: str) -> tuple[int, ...]:
        found = sorted({one(word) for word in text.split(",")})
        if odd := next((nbytes for nbytes in found if nbytes % 8), None):
            raise click.BadParameter(f"{odd} bytes are not a multiple of 8")
        return tuple(found)

    return sizes


def windows(text: str) -> tuple[int, ...]:
    """The type of --windows: `1,16`."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= wire.WINDOW_MAX for word in words):
        raise click.BadParameter(f"{text!r} is not a list of numbers from 1 to {wire.WINDOW_MAX}")
    return tuple(sorted({int(word) for word in words}))


@click.command("run")
@click.argument("target", metavar="HOST:PORT", type=target_place)
@click.option("--only", multiple=True, type=click.Choice(KINDS), help="Measure only this; may be repeated.")
@click.option(
    "--sizes", type=sizes(_SIZE_MAX), default=_SIZES, show_default=True, help="Sizes of writes, reads and pages."
)
@click.option(
    "--windows", type=windows, default="1,16", show_default=True, help="How many writes and reads are in flight."
)
@click.option(
    "--latency-sizes",
    type=sizes(wire.CONTROL_BYTES),
    default="8,4K",
    show_default=True,
    help="Sizes of the writes whose round trips are timed.",
)
@click.option(
    "--processes",
    type=IntRange(1, wire.PROCESSES_MAX),
    default=1,
    show_default=True,
    help="Workers on each side.",
)
@click.option("--seconds", type=FloatRange(0.001, 60), default=0.2, show_default=True, help="How long each run takes.")
@click.option(
    "--warmup", type=FloatRange(0, 60), default=0.1, show_default=True, help="Seconds before the runs, not counted."
)
@click.option("--runs", type=IntRange(1, 1000), default=7, show_default=True, help="Runs of each point.")
@click.option(
    "--memory",
    type=size(1 << 20, 1 << 40),
    default="256M",
    show_default=True,
    help="Memory that transfers cycle through on each side.",
)
@transport_option()
@click.option("--rails", type=rails_type, help="Rails of each engine, or their interfaces [default: 1].")
@click.option(
    "--polling",
    type=click.Choice(["adaptive", "spin"]),
    default="adaptive",
    show_default=True,
    help="How workers wait: spin never sleeps.",
)
@click.option(
    "--cpus", type=cpu_list, default="", metavar="A,B,...", help="Cores of the workers on this side, assigned in turn."
)
@click.option(
    "--secret-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"File with the secret of `bench serve` [default: {SECRET_VARIABLE}].",
)
@click.option(
    "--timeout-s", type=FloatRange(1, 3600), default=60.0, show_default=True, help="Seconds for a single pass."
)
@output_options
def run_command(target: tuple[str, int], **options: Any) -> None:
    """Measure with the `crossrail bench serve` at HOST:PORT.

    Measures writes, reads and paged writes of each size, and the distribution of round trips, with one or more workers
    on each side. The data of each point is checked in a pass that is not timed. Each timed run is paired with one of
    memcpy (both sides on one host) or of bare sockets (writes over TCP).
    """
    outputs = Outputs.chosen(options)
    host, port = target
    secret = secret_of(options["secret_file"])
    plan = Plan(
        options["only"] or KINDS, options["sizes"], options["windows"], options["latency_sizes"], options["seconds"],
        options["warmup"], options["runs"],
    )  # fmt: skip
    rails = options["rails"]
    if rails is None:
        rails = loopback_rails(host) if is_loopback(host) and options["transport"] != "shm" else 1
    engines = EngineOptions(options["transport"], rails, secret)
    console = open_console(stderr=is_alone(outputs.json_path))
    serve = ask(host, port, secret, BENCH)
    busy = busy_share(choose_cpus())
    report.warn_if_busy(busy, console)
    results: list[Result] = []
    settings: dict[str, Any] = {}
    with (
        outputs.of(results, settings, busy, console),
        xr.Engine(
            "bench-run",
            transport=engines.transport,
            rails=rails,
            secret=secret,
            message_bytes_max=wire.MESSAGE_BYTES_MAX,
        ) as engine,
        engine.submit_recvs(MESSAGES_HELD, wire.MESSAGE_BYTES_MAX) as pool,
        Workers(options["processes"], options["cpus"]) as workers,
    ):
        engine.connect(serve)
        post = Post(engine, pool, serve, secrets.randbits(62), f"the server at {host}", lambda _: None)
        try:
            _measure_all(post, workers, engines, plan, options, console, results, settings)
        finally:
            post.try_send(wire.Bye(run=post.run))


def _measure_all(
    post: Post,
    workers: Workers,
    engines: EngineOptions,
    plan: Plan,
    options: dict[str, Any],
    console: Console,
    results: list[Result],
    settings: dict[str, Any],
) -> None:
    """Meets, then point after point. Fills the results and what they are taken with."""
    span = span_bytes(options["memory"], len(workers), plan.sizes)
    welcome = _meet(post, workers, engines, span, options["polling"])
    driver = Driver(post, workers, span, options["timeout_s"])
    explanation = driver.explain()
    console.print(f"here:  {describe_machine()}", markup=False, soft_wrap=True)
    console.print(f"there: {describe_machine(welcome.machine)}", markup=False, soft_wrap=True)
    console.print(str(explanation), markup=False, soft_wrap=True)
    cores = min(len(os.sched_getaffinity(0)), welcome.cores)
    limit = Limit(driver, explanation.transport, spins=2 * len(workers) <= cores)
    if limit.missing:
        console.print(limit.missing, style="yellow", markup=False)
    points = list(plan.points())
    settings |= {
        "transport": explanation.transport,
        "path": str(explanation),
        "processes": len(workers),
        "span_bytes": span,
        "polling": options["polling"],
        "cpus": options["cpus"],
        **plan.to_json(),
        "there": welcome.machine,
    }
    with count_progress(console) as progress:
        task = progress.add_task("", total=len(points) * plan.runs)
        for point in points:
            progress.update(task, description=f"{point.kind} {point.nbytes}")
            result = measure(driver, point, plan, limit, lambda: progress.advance(task))
            results.append(result)
            if not console.is_terminal:
                console.print(report.one_line(result), markup=False, soft_wrap=True)


def _meet(post: Post, workers: Workers, engines: EngineOptions, span: int, polling: str) -> wire.Welcome:
    """Opens and connects workers on both sides. Returns what the serve reported about itself."""
    run = post.run
    post.send(wire.Hello(run=run, processes=len(workers), span_bytes=span, polling=polling))
    parts = workers.open(engines, span, polling)
    workers.call("open_own")
    welcome = post.receive(wire.Welcome, _WELCOME_S)
    if len(welcome.parts) != len(workers):
        raise wire.ProtocolError(f"the server has {len(welcome.parts)} workers for {len(workers)}")
    post.send(wire.Meet(run=run, parts=parts))
    workers.each(
        "meet", [{"address": part.address, "memory": part.memory, "control": part.control} for part in welcome.parts]
    )
    post.receive(wire.Met, _WELCOME_S)
    return welcome
