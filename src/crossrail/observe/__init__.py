"""How to see what an engine did: metrics, recorded operations, traces.

with serve_metrics(engine):  # for Prometheus
    ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossrail._lazy import lazily, listed

if TYPE_CHECKING:
    from crossrail.observe.metrics import EngineCollector
    from crossrail.observe.server import MetricsServer, serve_metrics
    from crossrail.observe.traffic import Traffic, read_traffic

__all__ = ["EngineCollector", "MetricsServer", "Traffic", "read_traffic", "serve_metrics"]

# Drawing a trace alone should not have to import prometheus_client.
__getattr__ = lazily(
    __name__,
    {
        "EngineCollector": "metrics",
        "MetricsServer": "server",
        "serve_metrics": "server",
        "Traffic": "traffic",
        "read_traffic": "traffic",
    },
)

__dir__ = listed(__name__, __all__, ["files"])
