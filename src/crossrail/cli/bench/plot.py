"""Pictures of a benchmark, by matplotlib: throughput against size, latency as a distribution, ratios to limits.

PNG, SVG, PDF or whatever else matplotlib writes, by the file's suffix.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import itertools
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from crossrail.cli.bench.report import figure
from crossrail.cli.bench.spec import Line, Point, Result
from crossrail.errors import UsageError

# Okabe and Ito's colours, which people who see few colours can tell apart.
_COLORS = {"write": "#0072B2", "read": "#D55E00", "paged": "#009E73", "private write": "#CC79A7"}
_LATENCY_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_WORDS = {"write": "write", "read": "read", "paged": "paged writes"}
_MARKERS = "osD^vP*X"
_INK = "#333333"
_DASHES = ((0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))
_STYLE = {
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "font.size": 9,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "crossrail",  # the same figures give the same file
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}
_WIDTH_IN = 9.0
_CURVE_IN = 4.6
_TITLE_IN = 1.3
_ROW_IN = 0.34
_PERCENTILES = (50, 99)
_INTERVAL_SPAN_MAX = 2.0  # times what was measured
_MINOR_SPAN_MAX = 1e4  # over more powers of ten, numbers between them run into each other

# Draws one panel into axes.
_Draw = Callable[[Any, list[Result]], None]


def check_plot(path: Path | None = None, option: str = "--plot") -> None:
    """UsageError if matplotlib is missing, or the suffix is no picture's; called before measuring."""
    if not can_plot():
        raise UsageError(f"{option} needs matplotlib: pip install 'crossrail[bench]'")
    if path is not None:
        formats = _pyplot().figure().canvas.get_supported_filetypes()
        _pyplot().close()
        suffix = path.suffix.removeprefix(".").lower()
        if suffix not in formats:
            raise UsageError(f"{option} {path}: its suffix must be one of {', '.join(sorted(formats))}")


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def can_draw(line: Line) -> bool:
    """Whether there is a panel for what is measured there."""
    if line.point is not None and (line.point.kind == "latency" or line.unit == "GB/s"):
        return True
    return bool(line.limit) and (line.bar is not None or line.point is None)


def write_plot(path: Path, results: list[Result]) -> bool:
    """Writes all panels that have figures, one below the other. False, and no file, if none has."""
    panels = _panels(results)
    if not panels:
        return False
    heights = [height for _, _, height in panels]
    with _Styled() as pyplot:
        drawing, axes = pyplot.subplots(
            len(panels),
            1,
            figsize=(_WIDTH_IN, sum(heights)),
            height_ratios=heights,
            squeeze=False,
            layout="constrained",
        )
        for (draw, shown, _), place in zip(panels, axes[:, 0], strict=True):
            draw(place, shown)
        drawing.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(drawing)
    return True


def svgs(results: list[Result]) -> list[str]:
    """Each panel as an `<svg>` element to put into a page."""
    texts = []
    for draw, shown, height in _panels(results):
        with _Styled() as pyplot:
            drawing, axes = pyplot.subplots(figsize=(_WIDTH_IN, height), layout="constrained")
            draw(axes, shown)
            buffer = io.StringIO()
            drawing.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
            pyplot.close(drawing)
        texts.append("<svg" + buffer.getvalue().partition("<svg")[2])
    return texts


def _panels(results: list[Result]) -> list[tuple[_Draw, list[Result], float]]:
    """The panels to draw, with their results, and their heights in inches."""
    curves = [result for result in results if result.measure.point and result.measure.unit == "GB/s" and result.samples]
    spread = [result for result in results if result.ecdf]
    bars = [r for r in results if r.ratio is not None and (r.measure.bar is not None or r.measure.point is None)]
    panels: list[tuple[_Draw, list[Result], float]] = []
    if curves:
        panels.append((_draw_throughput, curves, _CURVE_IN))
    if spread:
        panels.append((_draw_latency, spread, _CURVE_IN))
    if bars:
        panels.append((_draw_ratios, bars, _TITLE_IN + _ROW_IN * len(bars)))
    return panels


def _pyplot() -> Any:
    importlib.import_module("matplotlib").use("Agg")
    return importlib.import_module("matplotlib.pyplot")


class _Styled:
    """pyplot, in our style as long as this is open."""

    def __enter__(self) -> Any:
        pyplot = _pyplot()
        self._context = pyplot.rc_context(_STYLE)
        self._context.__enter__()
        return pyplot

    def __exit__(self, *exc_info: Any) -> None:
        self._context.__exit__(*exc_info)


# --- throughput ---


def _draw_throughput(axes: Any, results: list[Result]) -> None:
    """A line for each kind and window with its 95 % intervals; dashed, the machine's limits."""
    windows = sorted({point.window for point, _ in _points(results)})
    markers = dict(zip(windows, itertools.cycle(_MARKERS), strict=False))
    for (kind, window), curve in _curves(results).items():
        color = _COLORS.get(kind, "#777777")
        sizes = [point.nbytes for point, _ in curve]
        faded = 1.0 if window == windows[-1] else 0.55
        label = _WORDS.get(kind, kind) + (f", {window} in flight" if window else "")
        values = [result.value for _, result in curve]
        axes.plot(sizes, values, color=color, marker=markers[window], markersize=4, alpha=faded, label=label)
        _shade(axes, curve, color)
    dashes = itertools.cycle(_DASHES)
    for name, limit in sorted(_limits(results).items()):
        sizes = sorted(limit)
        values = [statistics.median(limit[nbytes]) for nbytes in sizes]
        axes.plot(
            sizes,
            values,
            color=_INK,
            linestyle=next(dashes),
            linewidth=1,
            marker="_",
            alpha=0.8,
            label=f"limit: {name}",
        )
    _size_axis(axes, sorted({point.nbytes for point, _ in _points(results)}))
    # The interval of a few wild runs may reach far beyond all that was measured; it is cut off then.
    highest = max(value for line in axes.get_lines() for value in line.get_ydata())
    axes.set_ylim(0, min(axes.get_ylim()[1], _INTERVAL_SPAN_MAX * highest))
    axes.set_ylabel("GB/s (10⁹ bytes)")
    axes.set_xlabel("bytes of one operation; of paged writes, of one page")
    axes.set_title("Throughput against size; shaded: 95 % of the median")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0.0, -0.13), ncols=2)


def _points(results: Iterable[Result]) -> Iterable[tuple[Point, Result]]:
    return [(result.measure.point, result) for result in results if result.measure.point is not None]


def _curves(results: list[Result]) -> dict[tuple[str, int], list[tuple[Point, Result]]]:
    """Curves by kind and window, each by size."""
    curves: dict[tuple[str, int], list[tuple[Point, Result]]] = {}
    for point, result in sorted(_points(results), key=lambda pair: (pair[0].kind, -pair[0].window, pair[0].nbytes)):
        curves.setdefault((point.kind, point.window), []).append((point, result))
    return curves


def _limits(results: list[Result]) -> dict[str, dict[int, list[float]]]:
    """Limits by name, at each size that was measured: memcpy knows no window, sockets do."""
    limits: dict[str, dict[int, list[float]]] = {}
    for point, result in _points(results):
        if result.limit is not None:
            of_memory = result.measure.limit.startswith("memcpy")
            name = result.measure.limit if of_memory else f"{result.measure.limit}, {point.window} in flight"
            limits.setdefault(name, {}).setdefault(point.nbytes, []).append(result.limit)
    return limits


def _shade(axes: Any, curve: list[tuple[Point, Result]], color: str) -> None:
    with_intervals = [(point.nbytes, result.value_interval) for point, result in curve]
    shown = [(nbytes, interval.low, interval.high) for nbytes, interval in with_intervals if interval is not None]
    if shown:
        axes.fill_between(*zip(*shown, strict=True), color=color, alpha=0.1, linewidth=0)


def _size_axis(axes: Any, sizes: list[int]) -> None:
    axes.set_xscale("log", base=2)
    every = -(-len(sizes) // 9)  # labels that fit beside each other
    axes.set_xticks(sizes[::every], [short_size(size) for size in sizes[::every]])
    axes.set_xticks([], minor=True)


def short_size(nbytes: int) -> str:
    """4096 -> "4 KiB"; exact: what is no whole number of a unit is in a smaller one."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << power and nbytes % (1 << power) == 0:
            return f"{nbytes >> power} {unit}"
    return f"{nbytes} B"


# --- latency ---


def _draw_latency(axes: Any, results: list[Result]) -> None:
    """Share of round trips that took no longer; marks at some percentiles."""
    for result, color in zip(results, itertools.cycle(_LATENCY_COLORS), strict=False):
        shares = [share for share, _ in result.ecdf]
        values = [value for _, value in result.ecdf]
        at = {percent: _value_at(result.ecdf, percent / 100) for percent in _PERCENTILES}
        told = ", ".join(f"p{percent} {figure(value)} {result.measure.unit}" for percent, value in at.items())
        axes.plot(values, shares, color=color, label=f"{result.measure.title}: {told}", drawstyle="steps-post")
        axes.plot(list(at.values()), [percent / 100 for percent in at], "o", color=color, markersize=4)
    axes.set_xscale("log")
    formatter = importlib.import_module("matplotlib.ticker").FuncFormatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(formatter)
    _few_minor_labels(axes, formatter)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(f"{results[0].measure.unit}, one way: half of each round trip")
    axes.set_ylabel("share of round trips")
    axes.set_title("Latency, all round trips of all runs")
    axes.legend(fontsize=8, loc="lower right")


def _few_minor_labels(axes: Any, formatter: Any) -> None:
    """Numbers between powers of ten, as far as there is room: at 2 and 5."""
    ticker = importlib.import_module("matplotlib.ticker")
    low, high = axes.get_xlim()
    axes.xaxis.set_minor_locator(ticker.LogLocator(subs=(2, 5)))
    axes.xaxis.set_minor_formatter(formatter if high / low <= _MINOR_SPAN_MAX else ticker.NullFormatter())
    axes.tick_params(axis="x", which="minor", labelsize=7)


def _value_at(ecdf: list[tuple[float, float]], share: float) -> float:
    """The smallest value with at least that share at or below it."""
    return next((value for at, value in ecdf if at >= share), ecdf[-1][1])


# --- ratios ---


def _draw_ratios(axes: Any, results: list[Result]) -> None:
    """Each measure as a share of the machine's limit beside it, with its interval and its bar."""
    shown = results[::-1]
    rows = range(len(shown))
    axes.barh(rows, [result.ratio for result in shown], color="#7fa8c9", height=0.62)
    axes.set_yticks(rows, [result.measure.title for result in shown])
    for row, result in enumerate(shown):
        if (interval := result.ratio_interval) is not None:
            axes.plot([interval.low, interval.high], [row, row], color=_INK, linewidth=1.2)
        bar = result.measure.bar
        if bar is not None and bar.of == "ratio":
            axes.plot([bar.bound] * 2, [row - 0.4, row + 0.4], color="#D55E00", linewidth=2)
    axes.axvline(1.0, color=_INK, linewidth=1)
    axes.set_xscale("log")
    axes.grid(axis="y", visible=False)
    formatter = importlib.import_module("matplotlib.ticker").FuncFormatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(formatter)
    _few_minor_labels(axes, formatter)
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_xlabel("value / limit of this machine in the same run; line: 95 % of the median, red: bar to reach")
    axes.set_title("Beside the machine's limits; better is more of rates, less of times")
