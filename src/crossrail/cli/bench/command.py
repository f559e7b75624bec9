"""`crossrail bench`: its options, and its commands, which are imported when they run."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from crossrail.cli.bench.options import output_options
from crossrail.cli.group import LazyGroup, body, say_what_is_meant
from crossrail.cli.option_types import IntRange, cpu_pair, size
from crossrail.errors import UsageError

_COMMANDS: dict[str, tuple[str, str]] = {
    "compare": ("compare:compare_command", "Compare two files of --json: what is faster, slower or the same."),
    "moe": ("moe.command", "Measure dispatch and combine of MoE layers against the machine's limits."),
    "peers": ("peers.command", "Measure other libraries next to crossrail: the same shapes, the same clock."),
    "run": ("hosts.run:run_command", "Measure between this machine and a `crossrail bench serve`."),
    "serve": ("hosts.serve:serve_command", "Run the other side of `crossrail bench run`."),
}


class _Bench(LazyGroup):
    """A group that measures by itself if no subcommand is given."""

    def __init__(self, name: str, help: str, **more: Any) -> None:  # noqa: A002 - as click names it
        super().__init__(name, help, _COMMANDS, **more)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Like click's; a user who gives a host is told how to measure between hosts."""
        word = args[0]
        say_what_is_meant(ctx, word, _COMMANDS)
        if not ctx.resilient_parsing and word not in _COMMANDS and not word.startswith("-"):
            ctx.fail(
                f"No such command {word!r}. To measure the way to a host: crossrail bench run HOST:PORT, while "
                "crossrail bench serve runs there and has printed the PORT"
            )
        return super().resolve_command(ctx, args)


def _refuse_options(ctx: click.Context) -> None:
    """Before a subcommand they would do nothing."""
    for option in ctx.command.params:
        if ctx.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE:
            what = ctx.invoked_subcommand
            raise UsageError(
                f"{option.opts[0]} before `{what}` is of `crossrail bench` itself; what `bench {what}` takes comes "
                f"after it: crossrail bench {what} --help"
            )


@click.group("bench", cls=_Bench, invoke_without_command=True)
@output_options
@click.option(
    "--only", multiple=True, metavar="NAME", help="Only measures whose names begin with this; may be repeated."
)
@click.option("--list", "list_only", is_flag=True, help="List the measures and exit.")
@click.option("--runs", type=IntRange(1, 1000), help="Samples of each measure [default: 5, quick 3].")
@click.option("--quick", is_flag=True, help="A tenth of the work: for a first look, not for figures to quote.")
@click.option("--cpus", metavar="A,B", type=cpu_pair, help="Cores of the two processes [default: first and last].")
@click.option(
    "--pool-bytes",
    type=size(64 << 20, 1 << 40),
    default="256M",
    show_default=True,
    help="Memory that copies cycle through on each side. Must be much larger than the caches.",
)
@click.option(
    "--transport",
    type=click.Choice(["shm", "tcp", "verbs", "ofi", "ofi:tcp"]),
    default="shm",
    show_default=True,
    help="Transport of the engines: tcp over 127.0.0.1, against bare sockets; verbs and ofi from a NIC to itself; "
    "ofi:tcp over libfabric's own tcp provider.",
)
@click.option("--stand-in", type=click.Choice(["shm"]), hidden=True, help="Engines use this one; tests the bench.")
@click.option("--strict", is_flag=True, help="Exit code 1 if a target is missed.")
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Measure the engine against the limits of this machine.

    Two processes run, pinned to different cores. Each sample of a measure is taken right after a sample of the
    machine's limit for it (one thread's memcpy, a bare flag or socket, ...), and the ratio is between these two,
    because the speed of machines drifts. Data is verified in a pass that is not timed. benchmarks/README.md describes
    each measure.
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    body("bench", "crossrail.cli.bench.measures", "measure")(**options)
