"""What people see of a benchmark: the table, the JSON file, the plot."""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

import crossrail as xr
from crossrail.cli.bench.spec import Result
from crossrail.cli.text import format_bytes
from crossrail.errors import UsageError

_JSON_FORMAT = 1
_TITLES_WIDTH = 108  # of a terminal that has room for titles
_VERDICT_STYLE = {"ok": "[green]ok[/green]", "miss": "[red]miss[/red]", "error": "[red]error[/red]", "": ""}


def make_table(results: list[Result], width: int) -> Table:
    """One line a measure: figure, unit, the machine's limit, ratio, bar, verdict. Short names where width is small."""
    table = Table(title="crossrail bench: medians", title_justify="left")
    table.add_column("measure")
    for title in ("value", "unit", "limit", "ratio", "bar"):
        table.add_column(title, justify="left" if title == "unit" else "right", no_wrap=True)
    table.add_column("")
    for result in results:
        measure = result.measure
        label = measure.title if width >= _TITLES_WIDTH else measure.name
        bar = str(measure.bar) if measure.bar else ""
        table.add_row(
            escape(label + (f" ({result.note})" if result.note else "")),
            _figure(result.value),
            measure.unit,
            _figure(result.limit),
            "" if result.ratio is None else f"{result.ratio:.2f}x",
            bar,
            _VERDICT_STYLE[result.verdict],
        )
    return table


def one_line(result: Result) -> str:
    """For a log: there is no bar there to look at meanwhile."""
    ratio = "" if result.ratio is None else f"{result.ratio:.2f}x"
    words = (_figure(result.value), result.measure.unit, ratio, result.verdict, result.note)
    return f"{result.measure.name:22} {'  '.join(words)}".rstrip()


def _figure(value: float | None) -> str:
    """Three digits that mean something."""
    if value is None:
        return ""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def to_json(results: list[Result], settings: Mapping[str, Any], busy: float) -> dict[str, Any]:
    """Everything that is needed to judge the figures, and to repeat them. settings: what they were taken with."""
    return {
        "format": _JSON_FORMAT,
        "command": " ".join(["crossrail", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "version": version(),
        "machine": machine(),
        "busy_before": round(busy, 3),
        "settings": dict(settings),
        "results": [_result_json(result) for result in results],
    }


def _result_json(result: Result) -> dict[str, Any]:
    measure = result.measure
    return {
        "name": measure.name,
        "title": measure.title,
        "unit": measure.unit,
        "limit_is": measure.limit,
        "value": result.value,
        "limit": result.limit,
        "ratio": result.ratio,
        "bar": str(measure.bar) if measure.bar else None,
        "verdict": result.verdict,
        "note": result.note or None,
        "error": result.error or None,
        "samples": [{"value": sample.value, "limit": sample.limit} for sample in result.samples],
    }


def version() -> str:
    """crossrail's version; in a checkout also the commit, marked when it has changes."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--tags"],
            cwd=Path(xr.__file__).parent,
            capture_output=True,
            text=True,
            timeout=10.0,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return xr.__version__
    return f"{xr.__version__} ({described})"


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "cpu": _proc_field("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "caches": _caches(),
        "memory": _proc_field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "huge_pages_shared": _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
    }


def describe_machine() -> str:
    """One line for the table."""
    about = machine()
    caches = ", ".join(f"{name} {size}" for name, size in about["caches"].items())
    return f"{about['cpu']}, {about['cores_usable']} cores, {caches}, Linux {about['kernel']}"


def busy_share(cpus: tuple[int, int], seconds: float = 0.5) -> float:
    """How much of these cores something else uses, 0 to 1. Sleeps meanwhile."""
    before = _cpu_times(cpus)
    time.sleep(seconds)
    spent = [after - start for after, start in zip(_cpu_times(cpus), before, strict=True)]
    return 1.0 - spent[0] / spent[1] if spent[1] else 0.0


def _cpu_times(cpus: tuple[int, int]) -> tuple[int, int]:
    """(idle, all) ticks of the cores together. proc(5): user nice system idle iowait irq softirq steal ..."""
    idle = total = 0
    names = {f"cpu{cpu}" for cpu in cpus}
    for line in _read("/proc/stat").splitlines():
        name, *ticks = line.split()
        if name in names:
            counts = [int(tick) for tick in ticks[:8]]
            idle += counts[3] + counts[4]
            total += sum(counts)
    return idle, total


def _caches() -> dict[str, str]:
    sizes: dict[str, str] = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_read(str(index / name)) for name in ("level", "type", "size"))
        if kind != "Instruction" and size:
            sizes[f"L{level}"] = format_bytes(int(size.rstrip("K")) << 10) if size.endswith("K") else size
    return sizes


def _proc_field(path: str, name: str) -> str:
    for line in _read(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def write_json(path: Path, results: list[Result], settings: Mapping[str, Any], busy: float) -> None:
    """The file; replaced when there. settings: what they were taken with; busy: what busy_share said before."""
    path.write_text(json.dumps(to_json(results, settings, busy), indent=1) + "\n")


def check_plot() -> None:
    """UsageError when there is nothing to draw with; asked before the measuring and not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'crossrail[bench]'")


def write_plot(path: Path, results: list[Result]) -> None:
    """Each measure as a share of the machine's limit beside it, with its bar."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    shown = [result for result in results if result.ratio is not None][::-1]
    figure, axes = pyplot.subplots(figsize=(9, 0.35 * len(shown) + 1.5), layout="constrained")
    axes.barh([result.measure.title for result in shown], [result.ratio for result in shown], color="#3b6ea5")
    axes.axvline(1.0, color="black", linewidth=1, label="the machine's limit")
    for row, result in enumerate(shown):
        bar = result.measure.bar
        if bar is not None and bar.of == "ratio":
            axes.plot([bar.bound] * 2, [row - 0.4, row + 0.4], color="#c44e52", linewidth=2)
    axes.set_xscale("log")
    axes.set_xlabel("value / limit of this machine in the same run (red: bar)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
