"""A port of this host for a server that has to be told one."""

import socket


def free_port() -> int:
    """Of 127.0.0.1. Free when it was looked at: whoever cannot bind it says so."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
