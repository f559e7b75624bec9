"""`crossrail top`: rails, peers and transfers of engines in another process, live."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import click
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from crossrail._text import plain
from crossrail.cli.console import open_console
from crossrail.cli.live_view import patience_option, show_live
from crossrail.cli.option_types import FloatRange, url_of
from crossrail.cli.tables import plain_table
from crossrail.errors import UsageError
from crossrail.observe.samples import Interval, Labels, Scrape, scrape

_DEFAULT_URL = "http://127.0.0.1:9478/metrics"
_TIMEOUT_S = 5.0
_BAD_STATES = {"slow": "yellow", "frozen": "red", "connecting": "yellow"}
_WORD_MIN = 4  # of names and the like, where numbers need the room
# The metrics used, and the labels without which they are useless. Relays of metrics may drop some.
_LABELS = {
    "crossrail_engine_open": ("engine",),
    "crossrail_rail_works_total": ("engine", "transport", "rail"),
    "crossrail_rail_latency_seconds_bucket": ("engine", "transport", "rail", "le"),
    "crossrail_peer_outstanding": ("engine", "peer"),
    "crossrail_peer_latency_seconds_bucket": ("engine", "peer", "le"),
    "crossrail_weights_updates_total": ("outcome",),
    "crossrail_moe_rounds_total": ("model",),
    "crossrail_moe_round_seconds_bucket": ("model", "le"),
    "crossrail_kv_time_to_first_token_seconds_bucket": ("le",),
}


@click.command("top")
@click.argument("url", type=url_of, default=_DEFAULT_URL)
@click.option("--once", is_flag=True, help="Show one interval and exit; the default if the output is not a terminal.")
@click.option(
    "--every-s",
    type=FloatRange(min=0.05, max=3600),
    default=1.0,
    show_default=True,
    help="Seconds between updates; rates are averages over one interval.",
)
@click.option("--engine", metavar="NAME", help="Show this engine alone, of all whose metrics are served there.")
@patience_option
def command(url: str, once: bool, every_s: float, engine: str | None, patience_s: float) -> None:
    """Show rails, peers and transfers of the engines whose metrics are served at URL.

    The process has to serve them: by crossrail.observe.serve_metrics(engine), or by --metrics-port of
    `crossrail kv prefiller` and `decoder`. URL defaults to http://127.0.0.1:9478/metrics; HOST:PORT is enough.
    Ctrl-C ends it.
    """
    url = _whole(url)
    console = open_console()
    latest = scrape(url, _TIMEOUT_S)

    def look() -> RenderableType:
        """A picture of what happened since the look before."""
        nonlocal latest
        before, latest = latest, scrape(url, _TIMEOUT_S)
        return picture(Interval(before, latest), console.width, engine)

    time.sleep(every_s)
    first = look()
    if engine is not None and engine not in (there := latest.values_of("crossrail_engine_open", "engine")):
        raise UsageError(f"no engine {engine!r} there; there is {', '.join(map(repr, there)) or 'none'}")
    if once or not console.is_terminal or console.is_dumb_terminal:
        console.print(first)
        return
    show_live(console, first, look, every_s, patience_s)


def _whole(url: str) -> str:
    """The address of an endpoint, given shortly."""
    return url if url.count("/") > 2 else f"{url}/metrics"


def picture(interval: Interval, width: int, only: str | None = None) -> RenderableType:
    """A picture of the interval, for a screen of so many columns; only: this engine."""
    if only is not None:
        return Group(*_engine(interval, only, width))
    parts: list[RenderableType] = []
    for engine in interval.now.values_of("crossrail_engine_open", "engine"):
        parts += _engine(interval, engine, width)
    parts += [Text(line) for line in (*_updates(interval), *_rounds(interval), *_requests(interval))]
    parts += [Text(f"passed over: {line}", "yellow") for line in _partial(interval.now)]
    if not parts:
        parts.append(Text("metrics are served there, and none of crossrail"))
    return Group(*parts)


def _partial(now: Scrape) -> list[str]:
    """The metrics of which some samples lack a label, and which."""
    lines = []
    for name, labels in _LABELS.items():
        lacking = [label for label in labels if any(not _has(label, has) for has, _ in now.of(name))]
        if lacking:
            lines.append(f"{name} without {', '.join(lacking)}")
    return lines


def _has(label: str, has: Labels) -> bool:
    """And, of a histogram's bound, whether that is a number."""
    if label == "le" and label in has:
        with contextlib.suppress(ValueError):
            return not math.isnan(float(has[label]))
        return False
    return label in has


def _whole_of(now: Scrape, name: str, **of: str) -> Iterator[tuple[Labels, float]]:
    """The samples that have all labels that they need."""
    return ((has, value) for has, value in now.of(name, **of) if all(_has(label, has) for label in _LABELS[name]))


def _quantile(interval: Interval, name: str, share: float, **of: str) -> float | None:
    """The quantile; None also if a bound is missing, since the others alone would be another distribution."""
    buckets = f"{name}_bucket"
    for scraped in (interval.before, interval.now):
        if any(not _has("le", has) for has, _ in scraped.of(buckets, **of)):
            return None
    return interval.quantile(name, share, **of)


def _engine(interval: Interval, engine: str, width: int) -> list[RenderableType]:
    now = interval.now
    if now.total("crossrail_engine_open", engine=engine) == 0:
        return [Text(f"engine {plain(engine)}: closed", "red")]
    failed = now.total("crossrail_transfers_total", engine=engine, outcome="failed")
    head = Text(
        f"engine {plain(engine)}: {_short(interval.rate('crossrail_transfers_total', engine=engine, outcome='done'))} "
        f"transfers/s, {now.total('crossrail_transfers_inflight', engine=engine):.0f} in flight, "
        f"{_short(interval.rate('crossrail_immediates_received_total', engine=engine))} counts/s in",
        "bold",
    )
    if failed:
        head.append(f", {failed:.0f} failed", "bold red")
    hidden = now.total("crossrail_peers_hidden", engine=engine)
    parts: list[RenderableType] = [head, _rails(interval, engine, width)]
    if any(_whole_of(now, "crossrail_peer_outstanding", engine=engine)):
        parts.append(_peers(interval, engine, width))
    if hidden:
        parts.append(Text(f"and {hidden:.0f} peers more", "dim"))
    return [*parts, Text()]


class _Column(NamedTuple):
    """of_width: shown on screens of at least so many columns."""

    title: str
    of_width: int = 0
    is_number: bool = True


_RAIL_COLUMNS = (
    _Column("rail", is_number=False), _Column("down", 45), _Column("GB/s"), _Column("works/s"), _Column("imm/s", 60),
    _Column("depth", 40),
    _Column("p50", 70), _Column("p99", 50), _Column("retried", 80), _Column("broken", 90),
)  # fmt: skip
_PEER_COLUMNS = (
    _Column("peer", is_number=False), _Column("state", 50, False), _Column("by", 60, False), _Column("GB/s"),
    _Column("works/s", 70), _Column("out", 40), _Column("queued", 80), _Column("p50", 100), _Column("p99", 90),
    _Column("failed", 45), _Column("retried", 110),
)  # fmt: skip


def _table(columns: tuple[_Column, ...], width: int) -> Table:
    table = plain_table()
    for column in columns:
        if column.of_width <= width:
            table.add_column(
                column.title,
                justify="right" if column.is_number else "left",
                no_wrap=True,
                overflow="crop" if column.is_number else "ellipsis",
            )
    return table


def _fitted(table: Table, width: int) -> Table:
    """Cuts words as far as needed to show all numbers whole."""
    widths = [max(cell_len(str(cell)) for cell in (column.header, *column.cells)) for column in table.columns]
    of_words = [index for index, column in enumerate(table.columns) if column.overflow == "ellipsis"]
    between = 2 * (len(widths) - 1)  # the padding of a column, and the line after it
    while sum(widths) + between > width:
        longest = max(of_words, key=widths.__getitem__)
        if widths[longest] <= _WORD_MIN:
            break
        widths[longest] -= 1
    for index in of_words:
        table.columns[index].max_width = widths[index]
    return table


def _add(table: Table, columns: tuple[_Column, ...], width: int, cells: list[str | Text]) -> None:
    shown = [cell for column, cell in zip(columns, cells, strict=True) if column.of_width <= width]
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in shown))


def _rails(interval: Interval, engine: str, width: int) -> Table:
    columns: tuple[_Column, ...] = _RAIL_COLUMNS
    if interval.now.total("crossrail_rail_down_paths", engine=engine):
        columns = tuple(column._replace(of_width=0) if column.title == "down" else column for column in columns)
    table = _table(columns, width)
    for has, _ in _whole_of(interval.now, "crossrail_rail_works_total", engine=engine):
        of = {"engine": engine, "transport": has["transport"], "rail": has["rail"]}
        down = next((_bad(value, "bold red") for _, value in interval.now.of("crossrail_rail_down_paths", **of)), "-")
        name = f"{plain(has['transport'])}:{plain(has['rail'])}"
        cells: list[str | Text] = [name, down, *_speeds(interval, "crossrail_rail", of)]
        # -: not reported.
        depth = next((f"{value:.0f}" for _, value in interval.now.of("crossrail_rail_depth", **of)), "-")
        cells += [depth, *_latencies(interval, "crossrail_rail", of)]
        retried = interval.now.total("crossrail_rail_retried_works_total", **of)
        broken = interval.now.total("crossrail_rail_broken_paths_total", **of)
        _add(table, columns, width, [*cells, _bad(retried, "yellow"), _bad(broken, "yellow")])
    return _fitted(table, width)


def _peers(interval: Interval, engine: str, width: int) -> Table:
    table = _table(_PEER_COLUMNS, width)
    now = interval.now
    # The busiest first: screens end.
    speeds = {
        has["peer"]: interval.rate("crossrail_peer_bytes_total", engine=engine, peer=has["peer"])
        for has, _ in _whole_of(now, "crossrail_peer_outstanding", engine=engine)
    }
    for peer in sorted(speeds, key=lambda name: (-speeds[name], name)):
        of = {"engine": engine, "peer": peer}
        states = now.values_of("crossrail_peer_state", "state", **of)
        style = next((_BAD_STATES[state] for state in states if state in _BAD_STATES), "")
        ways = now.values_of("crossrail_peer_path_bytes", "path", **of)
        ways = ways or now.values_of("crossrail_peer_transport", "transport", **of)
        speed, works, _ = _speeds(interval, "crossrail_peer", of)
        cells: list[str | Text] = [plain(peer), Text(plain(" ".join(states)), style), plain(" ".join(ways))]
        cells += [
            speed,
            works,
            f"{now.total('crossrail_peer_outstanding', **of):.0f}",
            f"{now.total('crossrail_peer_queued', **of):.0f}",
        ]
        cells += _latencies(interval, "crossrail_peer", of)
        failed = now.total("crossrail_peer_failed_transfers_total", **of)
        retried = now.total("crossrail_peer_retried_works_total", **of)
        _add(table, _PEER_COLUMNS, width, [*cells, _bad(failed, "red"), _bad(retried, "yellow")])
    return _fitted(table, width)


def _speeds(interval: Interval, prefix: str, of: dict[str, str]) -> list[str]:
    gb_per_s = interval.rate(f"{prefix}_bytes_total", **of) / 1e9
    works, imms = (_short(interval.rate(f"{prefix}_{what}_total", **of)) for what in ("works", "immediates"))
    return [f"{gb_per_s:.3f}" if gb_per_s else "0", works, imms]


def _latencies(interval: Interval, prefix: str, of: dict[str, str]) -> list[str]:
    return [_time(_quantile(interval, f"{prefix}_latency_seconds", share, **of)) for share in (0.5, 0.99)]


def _bad(count: float, style: str) -> Text:
    return Text(f"{count:.0f}", style if count else "")


# --- what is beside engines ---


def _updates(interval: Interval) -> list[str]:
    now = interval.now
    if "crossrail_weights_version" not in now:
        return []
    ended = {has["outcome"]: value for has, value in _whole_of(now, "crossrail_weights_updates_total")}
    done = ended.get("done", 0)
    mean_s = now.total("crossrail_weights_update_seconds_sum") / done if done else 0.0
    return [
        f"weights: version {now.total('crossrail_weights_version'):.0f}; {done:.0f} updates of {_time(mean_s)} on "
        f"average, {ended.get('failed', 0):.0f} failed"
    ]


def _rounds(interval: Interval) -> list[str]:
    now, lines = interval.now, []
    for model in now.values_of("crossrail_moe_rounds_total", "model"):
        of = {"model": model}
        p50, p99 = (_time(_quantile(interval, "crossrail_moe_round_seconds", share, **of)) for share in (0.5, 0.99))
        lines.append(
            f"moe {plain(model)}: {_short(interval.rate('crossrail_moe_rounds_total', **of))} rounds/s, p50 {p50}, "
            f"p99 {p99}, {100 * interval.rate('crossrail_moe_waited_seconds_total', **of):.0f} % waiting"
        )
    return lines


def _requests(interval: Interval) -> list[str]:
    now = interval.now
    if "crossrail_kv_requests" not in now:
        return []
    first_token = _time(_quantile(interval, "crossrail_kv_time_to_first_token_seconds", 0.5))
    return [
        f"kv router: {now.total('crossrail_kv_requests'):.0f} requests under way, "
        f"{_short(interval.rate('crossrail_kv_requests_ended_total'))}/s ended, first token after {first_token} (p50)"
    ]


# --- figures ---


def _short(value: float) -> str:
    """1234567 -> "1.23 M": three digits."""
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for limit, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= limit:
            return f"{seconds / limit:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0"
