"""The ports of the ranks on one host, when the user names one (for a firewall)."""

from __future__ import annotations

from collections.abc import Sequence


def port_of_rank(port: int, rank: int, rails: int | Sequence[str]) -> int:
    """The port for the engine of that rank, each of which has these rails. 0: any, as `port` says.

    Rails may share an address, and take one port after the other then: each rank has room for all of its own.
    """
    return port + rank * (rails if isinstance(rails, int) else len(rails)) if port else 0
