"""OpenTelemetry spans of requests: at the front, the decoder and the prefiller, each a child of the one before.

They are exported as the process has configured OpenTelemetry; where opentelemetry-api is missing or not configured, no
spans are made, and the caller's context is passed on unchanged. Contexts are W3C's `traceparent`
(https://www.w3.org/TR/trace-context/), in HTTP and in our messages.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import Span

try:
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError:
    _HAS_API = False
else:
    _HAS_API = True

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)


def checked(traceparent: str) -> str:
    """A context from outside; empty if it is malformed: as W3C specifies, a new trace then begins."""
    return traceparent if _TRACEPARENT.fullmatch(traceparent) else ""


class RequestSpan:
    """One node's work for a request. traceparent: context for those who do parts of it; may be empty.

    parent: the caller's context, or empty. attributes: of the span. Call end() once, from any thread.
    """

    def __init__(self, name: str, parent: str, attributes: dict[str, str | int]) -> None:
        self.traceparent = checked(parent)
        self._span: Span | None = None
        if not _HAS_API:
            return
        propagator = TraceContextTextMapPropagator()
        context = propagator.extract({"traceparent": self.traceparent} if self.traceparent else {})
        self._span = trace.get_tracer("crossrail.kv").start_span(name, context, attributes=attributes)
        carrier: dict[str, str] = {}
        propagator.inject(carrier, trace.set_span_in_context(self._span, context))
        self.traceparent = carrier.get("traceparent", self.traceparent)

    def end(self, error: str = "") -> None:
        """error: why it failed; empty: success."""
        if self._span is None:
            return
        if error:
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end()
