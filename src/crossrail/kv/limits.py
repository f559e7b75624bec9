"""Bounds shared by messages and options, for modules that need nothing else of either."""

from __future__ import annotations

SECONDS_MAX = 1e7  # more than the month that commands accept
