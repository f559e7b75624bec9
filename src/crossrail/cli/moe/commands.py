"""The options of `crossrail moe sim`; what it does is in sim.py, imported when it runs."""

from __future__ import annotations

from typing import Any

import click

from crossrail.cli.group import body
from crossrail.cli.json_output import json_option
from crossrail.cli.moe.published import CLUSTERS, TOKENS
from crossrail.cli.option_types import IntRange


@click.command()
@click.option(
    "--cluster", type=click.Choice([*CLUSTERS, "both"]), default="both", show_default=True, help="NICs of the cluster."
)
@click.option(
    "--shape",
    type=click.Choice([*TOKENS, "both"]),
    default="both",
    show_default=True,
    help="Tokens per rank: few or many.",
)
@click.option(
    "--ranks",
    type=IntRange(1, 256),
    multiple=True,
    help="GPUs, in nodes of 8; may be repeated [default: 8 to 64].",
)
@click.option(
    "--rounds",
    type=IntRange(1, 100),
    default=1,
    show_default=True,
    help="Rounds of each case, each with different routes.",
)
@click.option(
    "--private-tokens",
    default=256,
    show_default=True,
    help="Tokens sent before the routes are known; the default is that of the paper's benchmark.",
)
@click.option("--node-sums", is_flag=True, help="Each node sums what it returns, as AllToAll does.")
@click.option("--seed", default=1, show_default=True, help="Seed of the routes.")
@json_option("the figures")
def sim(**options: Any) -> None:
    """Simulate rounds of dispatch and combine: real layouts, proxies and engines, but no data and no GPU.

    The wire is that of Table 2 of arXiv 2510.27656; the kernels are those of its Figure 10 and of data sheets.
    Nothing is fitted to the published figures; docs/moe-measured.md says what that leaves open.
    """
    body("moe", "crossrail.cli.moe.sim", "sim")(**options)
