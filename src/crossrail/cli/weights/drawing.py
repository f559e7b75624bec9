"""Pictures of simulated updates: what each stage of some trainers did when, and the results of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crossrail.cli.weights.simulate import Outcome
from crossrail.weights.planning.show import new_figure

_STAGES = {
    "h2d": ("host to device", "#4c72b0"),
    "read": ("read from others", "#8172b3"),
    "gather": ("gather", "#55a868"),
    "fuse": ("fuse", "#64b5cd"),
    "quantise": ("quantise", "#ccb974"),
    "submit": ("submit", "#937860"),
    "write": ("write", "#dd8452"),
    "wait for others": ("wait for others", "#c0c0c0"),
}
_WAYS = {"paper": "#4c72b0", "needed": "#dd8452", "adapted": "#55a868"}


def timeline(outcomes: Mapping[str, Outcome], title: str, path: Path) -> None:
    """A column for each way, a row for each stage of each trainer in Outcome.spans. Writes a PNG. Blocks."""
    rows = max(sum(len(_stages(spans)) for spans in one.spans.values()) for one in outcomes.values())
    figure = new_figure(5.2 * len(outcomes) + 1.6, 0.3 * rows + 2.2)
    end_ms = max(one.total_s for one in outcomes.values()) * 1e3
    for axes, (way, one) in zip(figure.subplots(1, len(outcomes), squeeze=False)[0], outcomes.items(), strict=True):
        _lanes(axes, one)
        bound_ms = one.bounds[one.bound] * 1e3
        axes.axvline(bound_ms, color="black", linewidth=1, linestyle="--")
        axes.set_xlim(0, end_ms * 1.03)
        axes.set_xlabel(f"ms; dashed: {one.bound}, {bound_ms:,.0f} ms")
        axes.set_title(f"{way}: {one.total_s * 1e3:,.0f} ms")
    figure.suptitle(title)
    figure.savefig(path, dpi=130)


def _stages(spans: Sequence[Any]) -> list[str]:
    found = {span.stage for span in spans}
    return [stage for stage in _STAGES if stage in found]


def _lanes(axes: Any, outcome: Outcome) -> None:
    labels: list[str] = []
    for rank, spans in outcome.spans.items():
        for number, stage in enumerate(_stages(spans)):
            label, colour = _STAGES[stage]
            bars = [(span.begin_s * 1e3, (span.end_s - span.begin_s) * 1e3) for span in spans if span.stage == stage]
            axes.broken_barh(bars, (len(labels) - 0.4, 0.8), color=colour)
            labels.append(f"trainer {rank}   {label}" if not number else label)
        axes.axhline(len(labels) - 0.5, color="#d0d0d0", linewidth=0.8)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def sweep(points: Sequence[tuple[float, Mapping[str, Outcome]]], title: str, name: str, path: Path) -> None:
    """Milliseconds of each way over what was varied, with its bound dashed. Writes a PNG. Blocks."""
    figure = new_figure(7.5, 4.8)
    axes = figure.subplots()
    ways = list(dict.fromkeys(way for _, outcomes in points for way in outcomes))
    for way in ways:
        of = [(value, outcomes[way]) for value, outcomes in points if way in outcomes]
        values = [value for value, _ in of]
        colour = _WAYS[way]
        axes.plot(values, [one.total_s * 1e3 for _, one in of], color=colour, marker="o", label=way)
        axes.plot(
            values, [one.bounds[one.bound] * 1e3 for _, one in of], color=colour, linestyle="--", label=f"{way}: bound"
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    values = [value for value, _ in points]
    axes.set_xticks(values, [f"{value:,g}" for value in values])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:,g}")
    axes.set_xlabel(name)
    axes.set_ylabel("ms")
    axes.grid(visible=True, which="both", color="#e5e5e5")
    axes.set_axisbelow(True)
    axes.legend(frameon=False)
    axes.set_title(title)
    figure.savefig(path, dpi=130)
