"""Where a request's time went: spans, as a Chrome trace and as a picture."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from crossrail.kv.messages import Span

_SPANS_MAX = 4096
_ROW, _LEFT, _WIDTH, _TOP = 22, 190, 900, 34
_COLOURS = {
    "request": "#404040", "queue": "#b0b0b0", "prefill": "#4878cf", "transfer": "#6acc65", "layer": "#6acc65",
    "tail": "#d65f5f",
}  # fmt: skip


class Timeline:
    """Spans of one request at one node. clock: a function without arguments, in seconds; times count from its
    construction, or from age_s before that.
    """

    def __init__(self, clock: Any, age_s: float = 0.0) -> None:
        self._clock = clock
        self._begun_s: float = clock() - age_s
        self.spans: list[Span] = []

    def now(self) -> float:
        """Seconds since the timeline's begin."""
        return float(self._clock()) - self._begun_s

    def since_begin(self, at_s: float) -> float:
        """A reading of the clock as seconds since the beginning."""
        return at_s - self._begun_s

    def add(self, name: str, begin_s: float, end_s: float | None = None) -> None:
        """end_s None: now. Only the first few thousand are kept, which is all that fits a message."""
        if len(self.spans) < _SPANS_MAX:
            end_s = self.now() if end_s is None else end_s
            self.spans.append(Span(name, begin_s, max(end_s - begin_s, 0.0)))

    def close(self) -> None:
        """Prepends a span of the whole time until now. Call it once, at the end."""
        self.spans.insert(0, Span("request", 0.0, self.now()))
        del self.spans[_SPANS_MAX:]

    def add_all(self, prefix: str, spans: Sequence[Span], begin_s: float) -> None:
        """Adds another node's spans, which began at begin_s on our timeline, as far as we know."""
        for span in spans[: _SPANS_MAX - len(self.spans)]:
            self.spans.append(Span(f"{prefix}{span.name}"[:128], begin_s + span.begin_s, span.length_s))


def chrome_trace(requests: Mapping[str, Sequence[Span]]) -> str:
    """JSON for chrome://tracing or Perfetto: one process for each request, by name, one row for each kind of span.

    A kind has further rows if its spans overlap: viewers drop spans that overlap without being nested.
    """
    events: list[dict[str, Any]] = []
    for pid, (request, spans) in enumerate(requests.items(), 1):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": request}})
        rows = ((kind, row) for kind, its in rows_of(spans).items() for row in _side_by_side(its))
        for tid, (kind, row) in enumerate(rows, 1):
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": kind}})
            events += [
                {
                    "ph": "X",
                    "pid": pid,
                    "tid": tid,
                    "name": span.name,
                    "ts": span.begin_s * 1e6,
                    "dur": span.length_s * 1e6,
                }
                for span in row
            ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _side_by_side(spans: Sequence[Span]) -> list[list[Span]]:
    """Distributes spans over as few rows as possible, so that no two in a row overlap."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.begin_s):
        free = (row for row in rows if row[-1].begin_s + row[-1].length_s <= span.begin_s)
        if (row := next(free, None)) is not None:
            row.append(span)
        else:
            rows.append([span])
    return rows


def picture(title: str, spans: Sequence[Span]) -> str:
    """An SVG: one row for each kind of span, time from left to right."""
    rows = rows_of(spans)
    total_s = max((span.begin_s + span.length_s for span in spans), default=0.0) or 1e-9
    height = _TOP + _ROW * len(rows) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="20" font-size="14">{html.escape(title)}: {total_s * 1e3:.1f} ms</text>',
    ]
    for index, (row, its) in enumerate(rows.items()):
        y = _TOP + _ROW * index
        parts.append(f'<text x="8" y="{y + 15}">{html.escape(row)}</text>')
        for span in its:
            x = _LEFT + span.begin_s / total_s * _WIDTH
            width = max(span.length_s / total_s * _WIDTH, 1.0)
            note = html.escape(f"{span.name}: {span.length_s * 1e3:.3f} ms from {span.begin_s * 1e3:.3f} ms on")
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 6}" fill="{_colour(row)}" '
                f'fill-opacity="0.8"><title>{note}</title></rect>'
            )
    for tick in range(6):
        x = _LEFT + tick / 5 * _WIDTH
        at_ms = f"{tick / 5 * total_s * 1e3:.1f} ms"
        parts.append(f'<text x="{x:.0f}" y="{height - 10}" text-anchor="middle">{at_ms}</text>')
    return "\n".join([*parts, "</svg>"])


def rows_of(spans: Sequence[Span]) -> dict[str, list[Span]]:
    """The spans of each row, in the order in which rows first appear."""
    rows: dict[str, list[Span]] = {}
    for span in spans:
        rows.setdefault(_row(span), []).append(span)
    return rows


def _row(span: Span) -> str:
    """Layers of all chunks share a row, as do chunks: whatever follows the last space is only a number."""
    name, _, number = span.name.rpartition(" ")
    return name if name and number.isdigit() else span.name


def _colour(row: str) -> str:
    kind = row.rpartition(": ")[2]  # without the node's role
    return _COLOURS.get(kind, "#956cb4")
