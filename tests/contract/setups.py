"""Over what the contract cases run: backend, processes, rails and memory of both sides."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

import pytest

from crossrail import _core


@functools.cache
def why_not(transport: str) -> str:
    """Why this machine has no such backend; empty when it has. verbs: no active port; ofi:tcp: no libfabric."""
    kind, _, provider = transport.partition(":")
    return "" if kind in ("shm", "tcp", "sim") else _core._rdma_missing(kind, provider)


# Every backend present. A new backend is a word here, and passes every case unchanged.
BACKENDS = ("shm", "tcp", "ofi:tcp", "verbs", "sim")
TRANSPORTS = tuple(transport for transport in BACKENDS if not why_not(transport))
# Those that join processes.
REAL_TRANSPORTS = tuple(transport for transport in TRANSPORTS if transport != "sim")


# tcp under TLS, in one process: what differs is below all that the cases are about.
TLS = "tls"
_TLS_SETUPS = 2


@dataclass(frozen=True)
class Setup:
    transport: str
    processes: int
    rails_here: int
    rails_there: int
    memory_here: str
    memory_there: str
    private_path: str

    @property
    def kind(self) -> str:
        """As explain has it: "ofi" for "ofi:tcp", "tcp" for "tls"."""
        return "tcp" if self.transport == TLS else self.transport.partition(":")[0]

    @property
    def is_network(self) -> bool:
        return self.kind != "shm"

    def __str__(self) -> str:
        return (
            f"{self.transport}-{self.processes}proc-rails{self.rails_here}to{self.rails_there}"
            f"-{self.memory_here}to{self.memory_there}-{self.private_path}"
        )


Rails = tuple[int, int]
Memory = tuple[str, str, str]

MAPPED: Memory = ("mapped", "mapped", "auto")
PRIVATE: tuple[Memory, ...] = tuple(
    (here, there, path)
    for here, there in (("mapped", "private"), ("private", "mapped"), ("private", "private"))
    for path in ("staged", "cma")
)
ALL_MEMORY: tuple[Memory, ...] = (MAPPED, *PRIVATE, ("private", "private", "auto"))
SOME_MEMORY: tuple[Memory, ...] = (MAPPED, ("private", "private", "staged"), ("private", "private", "cma"))

ALL_RAILS: tuple[Rails, ...] = (
    (1, 1),
    (2, 2),
    (3, 3),
    (4, 4),
    (16, 16),
    (1, 4),
    (4, 1),
    (3, 5),
    (16, 1),
    (1, 16),
    (7, 16),
    (12, 8),
)
SOME_RAILS: tuple[Rails, ...] = ((1, 1), (4, 4), (4, 1), (3, 5))
EQUAL_RAILS: tuple[Rails, ...] = tuple((n, n) for n in range(1, 17))


def setup_list(rails: Iterable[Rails], memory: Iterable[Memory]) -> list[Setup]:
    rails, memory = list(rails), list(memory)
    # How private memory is reached is a question of shm alone.
    others = list(dict.fromkeys((here, there, "auto") for here, there, _ in memory))
    return [
        Setup(transport, processes, here, there, memory_here, memory_there, path)
        for transport in TRANSPORTS
        for processes, (here, there), (memory_here, memory_there, path) in product(
            (1,) if transport == "sim" else (1, 2), rails, memory if transport == "shm" else others
        )
    ]


def with_tls(setups: list[Setup]) -> list[Setup]:
    """The first ones of tcp once more under TLS."""
    of_tcp = [setup for setup in setups if setup.transport == "tcp" and setup.processes == 1]
    return setups + [replace(setup, transport=TLS) for setup in of_tcp[:_TLS_SETUPS]]


DEFAULT = setup_list([(1, 1), (4, 3)], [MAPPED, ("private", "private", "auto")])


def setups(rails: Iterable[Rails] = ((1, 1), (4, 3)), memory: Iterable[Memory] = (MAPPED,)) -> pytest.MarkDecorator:
    return pytest.mark.setups(setup_list(rails, memory))
