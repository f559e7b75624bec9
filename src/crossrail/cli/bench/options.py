"""Options of what becomes of the figures, the same for every benchmark. Nothing here waits for numpy."""

from __future__ import annotations

from pathlib import Path

import click

from crossrail.cli.json_output import json_option
from crossrail.cli.option_types import OutputFile
from crossrail.cli.service import together


def share(text: str) -> float:
    """The type of --fail-slower: `10%` or `0.1`."""
    number, percent, rest = text.strip().partition("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if rest or not 0 <= value < 1:
        raise click.BadParameter(f"{text!r} is not a share from 0 to less than 1; write for example 10% or 0.1")
    return value


output_options = together(
    json_option("all samples"),
    click.option(
        "--plot",
        "plot_path",
        type=OutputFile(),
        help="Draw the results; the suffix chooses PNG, SVG or PDF (needs matplotlib).",
    ),
    click.option("--html", "html_path", type=OutputFile(), help="Write a report as a single HTML file."),
    click.option(
        "--compare",
        "compare_path",
        type=click.Path(dir_okay=False, exists=True, readable=True, path_type=Path),
        help="Show what is faster or slower than in this file from an earlier --json.",
    ),
    click.option(
        "--fail-slower",
        type=share,
        metavar="SHARE",
        help="With --compare: exit code 1 if a measure is slower by more than this, e.g. 10%.",
    ),
)
