"""What people look at when they want to know what an engine did: metrics, recorded operations, traces.

with serve_metrics(engine):  # for Prometheus
    ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossrail.observe.metrics import EngineCollector
    from crossrail.observe.server import MetricsServer, serve_metrics
    from crossrail.observe.traffic import Traffic, read_traffic

__all__ = ["EngineCollector", "MetricsServer", "Traffic", "read_traffic", "serve_metrics"]

_HOMES = {
    "EngineCollector": "metrics",
    "MetricsServer": "server",
    "serve_metrics": "server",
    "Traffic": "traffic",
    "read_traffic": "traffic",
}


def __getattr__(name: str) -> Any:
    """Imported when first used: who only draws a trace need not wait for prometheus_client."""
    import importlib

    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
