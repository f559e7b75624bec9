"""The libraries that can be measured, each configured as its documentation recommends for two processes of one host."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Sequence

from crossrail.cli.bench.peers.base import Offer
from crossrail.cli.bench.peers.pair import mpiexec
from crossrail.errors import UsageError

_HERE = "crossrail.cli.bench.peers"
_POLLED = "polled by the caller, no progress thread"
# What all offers of NIXL have in common.
_nixl = functools.partial(
    Offer,
    factory=f"{_HERE}.nixl:Nixl",
    kind="write",
    needs=("nixl_cu12|nixl_cu13",),
    distributions=("nixl-cu12", "nixl-cu13"),
    install="pip install nixl-cu12",
)
_ucxx = functools.partial(
    Offer,
    factory=f"{_HERE}.ucxx:Ucxx",
    kind="send/recv",
    notes=f"tagged; {_POLLED}; no lists: a send for each page",
    needs=("ucxx",),
    distributions=("ucxx-cu12", "libucx-cu12", "ucxx-cu13", "libucx-cu13"),
    install="pip install ucxx-cu12 (Python 3.11 or newer)",
)
_mpi = functools.partial(
    Offer,
    needs=("mpi4py", "mpiexec"),
    distributions=("mpich", "mpi4py"),
    install="pip install mpich mpi4py",
    launcher="mpiexec",
)
# MPICH uses shared memory between processes of one host unless told not to; the rest selects libfabric's tcp, the
# provider of ofi:tcp.
_MPI_TCP = {
    "MPIR_CVAR_NOLOCAL": "1",
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    "FI_PROVIDER": "tcp",
    "FI_TCP_IFACE": "lo",
}
# Off by default: persistent connections, and a queue that accepts a batch of 4096 pages (otherwise it is refused).
_MOONCAKE = {
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
}
_UCX_SHM = {"UCX_TLS": "sm,self"}
_UCX_TCP = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}


def _own(name: str, transport: str, notes: str, *, private: bool = False) -> Offer:
    return Offer(
        name=name,
        title=f"crossrail, {transport}{', ordinary memory' if private else ''}",
        factory=f"{_HERE}.own:Crossrail",
        kind="write",
        notes=notes,
        needs=(f"transport {transport}",),
        distributions=("crossrail",),
        install="pip install 'crossrail[libfabric]'" if transport.startswith("ofi") else "",
        options={"transport": transport, "private": private},
    )


def _nixl_ucx(name: str, over: str, *, prepared: bool = True) -> Offer:
    shm = over == "shm"
    return _nixl(
        name=name,
        title=f"NIXL, UCX {over}{'' if prepared else ', transfers remade'}",
        notes=f"{'prepared transfers posted again' if prepared else 'a transfer made for each write'}; {_POLLED}"
        + ("; error handling off, which UCX's shared memory needs" if shm else ""),
        # UCX has no shared memory for endpoints with its peer error handling, NIXL's default.
        options={
            "backend": "UCX",
            "parameters": {"ucx_error_handling_mode": "none" if shm else "peer"},
            "prepared": prepared,
        },
        environment=_UCX_SHM if shm else _UCX_TCP,
    )


OFFERS: tuple[Offer, ...] = (
    Offer(
        name="memcpy",
        title="one thread's memcpy",
        factory=f"{_HERE}.limits:Memcpy",
        kind="copy",
        notes="within one process, called from Python as the others are",
        is_limit=True,
    ),
    Offer(
        name="socket",
        title="a bare TCP socket",
        factory=f"{_HERE}.limits:Socket",
        kind="stream",
        notes="Python's socket, blocking; no window: the kernel's buffers are",
    ),
    _own("crossrail-shm", "shm", "memory of the engine, which the other process maps"),
    _own("crossrail-shm-private", "shm", "any memory of the process, as the other libraries take it", private=True),
    _own("crossrail-tcp", "tcp", "one rail on 127.0.0.1"),
    _own("crossrail-ofi-tcp", "ofi:tcp", "libfabric's tcp provider, one rail on 127.0.0.1"),
    _nixl_ucx("nixl-ucx-shm", "shm"),
    _nixl_ucx("nixl-ucx-shm-each", "shm", prepared=False),
    _nixl_ucx("nixl-ucx-tcp", "tcp"),
    _nixl(
        name="nixl-libfabric",
        title="NIXL, libfabric tcp",
        notes=f"prepared transfers posted again; {_POLLED}",
        options={"backend": "LIBFABRIC", "parameters": {}},
        environment={"FI_PROVIDER": "tcp"},
    ),
    _ucxx(
        name="ucxx-shm",
        title="UCXX, shm",
        environment=_UCX_SHM,
    ),
    _ucxx(
        name="ucxx-tcp",
        title="UCXX, tcp",
        environment=_UCX_TCP,
    ),
    Offer(
        name="mooncake-tcp",
        title="Mooncake, tcp",
        factory=f"{_HERE}.mooncake:Mooncake",
        kind="write",
        notes="its own threads, pooled connections; messages are seen by looking at memory",
        environment=_MOONCAKE,
        needs=("mooncake",),
        distributions=("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
        install="pip install mooncake-transfer-engine-non-cuda; it needs the system's libibverbs, libcurl and libnuma",
    ),
    _mpi(
        name="mpich-shm",
        title="MPICH, put in shared window",
        factory=f"{_HERE}.mpich:MpiPut",
        kind="write",
        notes="MPI_Rput, memory of MPI_Win_allocate; no lists: a put for each page",
    ),
    _mpi(
        name="mpich-shm-send",
        title="MPICH, shm",
        factory=f"{_HERE}.mpich:MpiSend",
        kind="send/recv",
        notes="any memory of the process; no lists: a send for each page",
    ),
    _mpi(
        name="mpich-tcp",
        title="MPICH, libfabric tcp",
        factory=f"{_HERE}.mpich:MpiSend",
        kind="send/recv",
        notes="MPICH's shared memory turned off; no lists: a send for each page",
        environment=_MPI_TCP,
    ),
    Offer(
        name="gloo",
        title="torch gloo",
        factory=f"{_HERE}.gloo:Gloo",
        kind="send/recv",
        notes="its own thread; no lists: a send for each page",
        needs=("torch",),
        distributions=("torch",),
        install="pip install torch (the CPU build is enough)",
        environment={"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    ),
)


def missing(offer: Offer) -> str:
    """The missing needs of an offer; empty if none is missing. Imports nothing of others."""
    return ", ".join(need for need in offer.needs if not _is_there(need))


@functools.cache
def _is_there(need: str) -> bool:
    if need == "mpiexec":
        return mpiexec() is not None
    if need.startswith("transport "):
        kind, _, provider = need.removeprefix("transport ").partition(":")
        return kind in ("shm", "tcp") or _has_rdma(kind, provider)
    return any(importlib.util.find_spec(name) is not None for name in need.split("|"))


def _has_rdma(kind: str, provider: str) -> bool:
    from crossrail import _core, _libfabric

    _libfabric.announce()
    return not _core._rdma_missing(kind, provider)


def versions(offer: Offer) -> str:
    """The versions of its distributions that are installed: "mpich 5.0.2, mpi4py 4.1.2"."""
    found = []
    for name in offer.distributions:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def choose(names: Sequence[str]) -> list[Offer]:
    """The offers named (or by the beginning of their names), all without names. UsageError if one fits nothing."""
    for name in names:
        if not any(_fits(offer, name) for offer in OFFERS):
            raise UsageError(f"--only {name} fits none; there are {', '.join(offer.name for offer in OFFERS)}")
    return [offer for offer in OFFERS if not names or offer.is_limit or any(_fits(offer, name) for name in names)]


def _fits(offer: Offer, name: str) -> bool:
    return offer.name == name or offer.name.startswith(f"{name}-")
