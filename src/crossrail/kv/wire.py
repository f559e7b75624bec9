"""How packets reach other nodes: as those of every service."""

from crossrail.control.wire import EngineWire, Unreachable, Wire

__all__ = ["EngineWire", "Unreachable", "Wire"]
