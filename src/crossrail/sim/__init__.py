"""Whole systems in one process, on simulated hosts, NICs and faults, with a virtual clock: docs/simulator.md."""
