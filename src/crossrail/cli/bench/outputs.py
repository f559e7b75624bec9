"""What is done with the figures after measuring, the same for every benchmark; its options are in options.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from crossrail.cli.bench.compare import Comparison, compare, fail_if_slower, show
from crossrail.cli.bench.page import write_page
from crossrail.cli.bench.plot import can_draw, check_plot, write_plot
from crossrail.cli.bench.report import make_table
from crossrail.cli.bench.saved import Saved, read_json, to_json
from crossrail.cli.bench.spec import Line, Result
from crossrail.cli.json_output import write_json
from crossrail.cli.tables import Fitted
from crossrail.errors import UsageError


@dataclass(frozen=True)
class Outputs:
    """The parsed options; the old file has been read."""

    json_path: Path | None
    plot_path: Path | None
    html_path: Path | None
    old: Saved | None
    fail_slower: float | None

    @staticmethod
    def chosen(options: Mapping[str, Any], lines: Iterable[Line] | None = None) -> Outputs:
        """The choice made by output_options. UsageError for outputs that could not be written after measuring.

        lines: what is to be measured; None when that depends on the other side.
        """
        old, plot = options["compare_path"], options["plot_path"]
        if options["fail_slower"] is not None and old is None:
            raise UsageError("--fail-slower needs an older run to compare with: --compare OLD.json")
        if plot is not None:
            check_plot(plot)
            if lines is not None and not any(can_draw(line) for line in lines):
                raise UsageError(f"--plot {plot}: nothing of what is to be measured can be drawn")
        return Outputs(options["json_path"], plot, options["html_path"], old and read_json(old), options["fail_slower"])

    @contextmanager
    def of(self, results: list[Result], settings: Mapping[str, Any], busy: float, console: Console) -> Iterator[None]:
        """Wraps the measuring, which fills both arguments: finally shows the figures and writes all requested outputs.

        Also after an error or Ctrl-C, for what was measured before, marked as partial. May raise click's Exit, by
        --fail-slower.
        """
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            had = [result for result in results if result.samples]
            if had:
                self._hand_out(had, to_json(had, settings, busy, _why(error)), console)
            raise
        comparison = self._hand_out(results, to_json(results, settings, busy), console)
        if comparison is not None:
            fail_if_slower(comparison, self.fail_slower)

    def _hand_out(self, results: list[Result], content: dict[str, Any], console: Console) -> Comparison | None:
        """The files first, JSON before pictures, and then what is shown: a reader that goes away costs no figures.

        Where a file cannot be written, the table is shown all the same.
        """
        only_part = content["only_part"] or ""
        run = Saved(
            "this run", results, content["machine"], content["settings"], content["command"], content["date"],
            content["version"], only_part,
        )  # fmt: skip
        comparison = None if self.old is None else compare(self.old, run)
        try:
            write_json(self.json_path, content)
            if self.plot_path is not None and not write_plot(self.plot_path, results):
                click.echo(f"warning: --plot {self.plot_path}: nothing that can be drawn was measured", err=True)
            if self.html_path is not None:
                write_page(self.html_path, run, comparison)
        finally:
            if only_part:
                console.print(f"only a part was measured: {only_part}", style="yellow", markup=False)
            console.print(Fitted(make_table(results, console.width)))
            if comparison is not None:
                show(comparison, console)
        return comparison


def _why(error: BaseException) -> str:
    """Why not all was measured, in words for the report."""
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    return "the reader of its output went away" if isinstance(error, BrokenPipeError) else str(error)
