"""Only in the virtual machine that ./dev vm makes, where these may pull the cables of its NICs."""

import os
import subprocess
from collections.abc import Iterator

import pytest

# Elsewhere they are not there: a skip would be counted.
collect_ignore_glob = [] if "CROSSRAIL_VM" in os.environ else ["test_*.py"]


class Cables:
    """What is between NIC i (rxeI on nicI) and the switch: its port of the switch."""

    def __init__(self) -> None:
        self._down: set[int] = set()
        self._spoilt: set[int] = set()

    def pull(self, index: int) -> None:
        self._down.add(index)
        run("ip", "link", "set", f"port{index}", "down")

    def plug(self, index: int) -> None:
        run("ip", "link", "set", f"port{index}", "up")
        self._down.discard(index)

    def spoil(self, index: int, *netem: str) -> None:
        """What arrives at NIC `index` from now on suffers this of tc's netem."""
        run("tc", "qdisc", "replace", "dev", f"port{index}", "root", "netem", *netem)
        self._spoilt.add(index)

    def repair(self) -> None:
        for index in list(self._down):
            self.plug(index)
        for index in self._spoilt:
            run("tc", "qdisc", "del", "dev", f"port{index}", "root")
        self._spoilt.clear()


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=20)


@pytest.fixture
def cables() -> Iterator[Cables]:
    cables = Cables()
    yield cables
    cables.repair()
