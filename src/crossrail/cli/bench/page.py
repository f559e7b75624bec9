"""A benchmark's report as one self-contained HTML file: it fetches nothing and runs no script.

Every word that comes from outside this program - the machine, file names, errors, what an older file says - goes
through `_text`, which escapes it. Only matplotlib's pictures, which escape themselves, go in as they are.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from crossrail.cli.bench.compare import Comparison
from crossrail.cli.bench.plot import can_plot, svgs
from crossrail.cli.bench.report import figure, interval_text, ratio_text
from crossrail.cli.bench.saved import Saved
from crossrail.cli.bench.spec import Result

_BAR_OCTAVES = 3.0  # the little bars reach from 1/8 to 8 times the limit

_STYLE = """
:root { color-scheme: light; --ink: #263238; --soft: #607d8b; --line: #dfe5e8; --paper: #ffffff; --tint: #f5f7f8; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; color: var(--ink); background: var(--paper);
       max-width: 72rem; margin: 0 auto; padding: 2rem 1.5rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); } code { font: .92em ui-monospace, "DejaVu Sans Mono", monospace; }
.command { display: block; background: var(--tint); padding: .6rem .8rem; border-radius: .3rem; overflow-x: auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .92rem; }
th { text-align: left; font-weight: 600; border-bottom: 2px solid var(--line); padding: .35rem .6rem;
     white-space: nowrap; }
td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; vertical-align: middle; }
td.n, th.n { text-align: right; white-space: nowrap; } td small { color: var(--soft); display: block; }
tbody tr:hover { background: var(--tint); }
.verdict { border-radius: 1rem; padding: .05rem .6rem; font-size: .82rem; white-space: nowrap; }
.ok, .faster { background: #d7f0e3; color: #0b5a3b; } .miss, .slower, .error { background: #fbdcd2; color: #8c2500; }
.none { background: var(--tint); color: var(--soft); }
.warning { background: #fff3cd; border-left: 4px solid #e69f00; padding: .6rem .8rem; margin: .6rem 0;
           font-weight: 600; }
.bar { fill: #7fa8c9; } .limit { stroke: #263238; } .range { stroke: #263238; stroke-width: 1.5; }
.goal { stroke: #d55e00; stroke-width: 2; }
figure { margin: .8rem 0; } figure svg { max-width: 100%; height: auto; }
@media print { body { padding: 0; } tr, figure { break-inside: avoid; } }
"""


def write_page(path: Path, run: Saved, comparison: Comparison | None) -> None:
    """The file; replaced when there."""
    path.write_text("\n".join(_page(run, comparison)) + "\n", encoding="utf-8", errors="replace")


def _page(run: Saved, comparison: Comparison | None) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    # Whatever might slip through the escaping cannot load or run anything.
    yield "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    yield f"<title>{_text(f'crossrail bench, {run.date}')}</title>\n<style>{_STYLE}</style>\n</head>\n<body>"
    yield "<h1>crossrail bench</h1>"
    yield f'<p class="soft">{_text(run.date)} &middot; crossrail {_text(run.version)}</p>'
    yield f'<code class="command">{_text(run.command)}</code>'
    if run.only_part:
        yield f'<p class="warning">Only a part was measured: {_text(run.only_part)}</p>'
    yield from _description("Machine", run.machine)
    if comparison is not None:
        yield from _changes(comparison)
    yield from _pictures(run.results)
    yield from _figures(run.results)
    yield from _description("Settings", run.settings)
    yield "</body>\n</html>"


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


# --- figures ---


def _figures(results: list[Result]) -> Iterator[str]:
    yield "<h2>Figures</h2>"
    yield (
        "<p>Medians of the runs. The limit is what the machine itself did right beside each run, the ratio the median "
        "of the runs' ratios. 95 % is the interval of the median ratio, or of the median value where there is no "
        "limit: by order statistics from six runs on, by Student's t of the logarithms with fewer.</p>"
    )
    head = ("measure", "value", "unit", "limit", "ratio", "95 %", "of the limit", "bar", "verdict", "runs")
    rows = []
    for result in results:
        measure = result.measure
        about = " &middot; ".join(
            _text(word) for word in (measure.name, result.path, result.note, result.error) if word
        )
        ratio = "" if result.ratio is None else f"{ratio_text(result.ratio)}x"
        limit = figure(result.limit) + (f"<small>{_text(measure.limit)}</small>" if measure.limit else "")
        rows.append((
            f"{_text(measure.title)}<small>{about}</small>", figure(result.value), _text(measure.unit), limit, ratio,
            interval_text(result), _ratio_picture(result), _text(measure.bar or ""), _badge(result.verdict),
            str(len(result.samples)),
        ))  # fmt: skip
    yield from _table(head, rows, numbers={1, 3, 4, 5, 7, 9})


def _ratio_picture(result: Result) -> str:
    """A bar from the left to the ratio on a logarithmic scale, the limit in the middle, the interval over it."""
    if result.ratio is None or result.ratio <= 0:
        return ""
    parts = [f'<rect class="bar" x="0" y="4" width="{_across(result.ratio):.1f}" height="8"/>']
    parts.append(f'<line class="limit" x1="{_across(1):.1f}" x2="{_across(1):.1f}" y1="0" y2="16"/>')
    if (interval := result.ratio_interval) is not None:
        ends = f'x1="{_across(interval.low):.1f}" x2="{_across(interval.high):.1f}"'
        parts.append(f'<line class="range" {ends} y1="8" y2="8"/>')
    bar = result.measure.bar
    if bar is not None and bar.of == "ratio":
        at = f"{_across(bar.bound):.1f}"
        parts.append(f'<line class="goal" x1="{at}" x2="{at}" y1="1" y2="15"/>')
    label = f"{ratio_text(result.ratio)} of the limit"
    return f'<svg width="120" height="16" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _across(ratio: float) -> float:
    octaves = min(max(math.log2(ratio), -_BAR_OCTAVES), _BAR_OCTAVES)
    return 60 + octaves / _BAR_OCTAVES * 58


def _badge(verdict: str) -> str:
    kind = verdict if verdict in ("ok", "miss", "error", "faster", "slower") else "none"
    return f'<span class="verdict {kind}">{_text(verdict)}</span>' if verdict else ""


def _table(head: Iterable[str], rows: Iterable[Iterable[str]], numbers: set[int]) -> Iterator[str]:
    """Cells are HTML already."""

    def kind(index: int) -> str:
        return ' class="n"' if index in numbers else ""

    yield '<div class="scroll"><table>\n<thead><tr>'
    yield "".join(f"<th{kind(index)}>{word}</th>" for index, word in enumerate(head)) + "</tr></thead>\n<tbody>"
    for row in rows:
        yield "<tr>" + "".join(f"<td{kind(index)}>{cell}</td>" for index, cell in enumerate(row)) + "</tr>"
    yield "</tbody>\n</table></div>"


# --- the rest ---


def _pictures(results: list[Result]) -> Iterator[str]:
    if not can_plot():
        why = "matplotlib is not installed (pip install 'crossrail[bench]')"
        yield f'<p class="soft">Pictures are left out: {_text(why)}.</p>'
        return
    for svg in svgs(results):
        yield f"<figure>{svg}</figure>"


def _changes(comparison: Comparison) -> Iterator[str]:
    yield f"<h2>Beside {_text(comparison.old.name)}</h2>"
    yield f'<p class="soft">{_text(comparison.old.date)} &middot; crossrail {_text(comparison.old.version)}</p>'
    for warning in comparison.warnings:
        yield f'<p class="warning">{_text(warning)}</p>'
    yield (
        "<p>Better by: above 1 is better now, of throughput as of latency; with 95 % intervals by Welch's t of the "
        "runs' logarithms. Faster or slower is what has its whole interval on one side of 1.</p>"
    )
    head = ("measure", "old", "new", "of", "better by", "95 %", "verdict")
    rows = []
    for change in comparison.changes:
        ends = (
            "" if change.interval is None else f"{ratio_text(change.interval.low)}-{ratio_text(change.interval.high)}x"
        )
        of = "limit" if change.by == "ratio" else _text(change.unit)
        rows.append((
            f"{_text(change.title)}<small>{_text(change.name)}</small>", f"{change.old:.3g}", f"{change.new:.3g}", of,
            f"{change.quotient:.2f}x", ends, _badge(change.verdict),
        ))  # fmt: skip
    yield from _table(head, rows, numbers={1, 2, 4, 5})
    if comparison.notes:
        yield "<p>" + "<br>".join(_text(note) for note in comparison.notes) + "</p>"


def _description(title: str, words: Mapping[str, Any]) -> Iterator[str]:
    if not words:
        return
    yield f"<h2>{_text(title)}</h2>\n<dl>"
    for key, value in words.items():
        yield f"<dt>{_text(key.replace('_', ' '))}</dt><dd>{_description_value(value)}</dd>"
    yield "</dl>"


def _description_value(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{_text(key)} {_description_value(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_description_value(item) for item in value)
    return _text(value).replace("\n", "<br>")
