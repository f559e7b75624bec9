"""Paths of the dashboard and alert rules that come with crossrail.

python -c "from crossrail.observe.files import DASHBOARD; print(DASHBOARD)"
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["ALERTS", "DASHBOARD"]

_DATA = Path(__file__).with_name("data")

DASHBOARD = _DATA / "dashboard.json"
"""For Grafana 10 or newer: import it, and choose the Prometheus it is to ask."""

ALERTS = _DATA / "alerts.yml"
"""Rules for Prometheus."""
