"""A free port of this host, for servers that have to be given one."""

import os
import random
import socket

FIRST, LAST = 10_000, 32_000  # below the range from which the kernel assigns ports, as for every outgoing connection

_given: set[int] = set()


def free_port(neighbours: int = 0) -> int:
    """A free port of 127.0.0.1 with `neighbours` free ones after it. None is given out twice, nor to another xdist
    worker.
    """
    first, last = _slice()
    while True:
        port = random.SystemRandom().randrange(first, last - neighbours)
        wanted = range(port, port + neighbours + 1)
        if _given.isdisjoint(wanted) and all(map(_is_free, wanted)):
            _given.update(wanted)
            return port


def _slice() -> tuple[int, int]:
    """The range of ports of this worker."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = max(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), worker + 1)  # one that crashed has a successor
    width = (LAST - FIRST) // count
    return FIRST + worker * width, FIRST + (worker + 1) * width


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
