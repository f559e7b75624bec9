"""Containers: what this process is isolated from, and what of that crossrail needs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from crossrail.doctor.finding import Finding, Fix, note, ok, warning
from crossrail.doctor.hardware import NET
from crossrail.doctor.host import Host, errno_name
from crossrail.doctor.limits import CAP_IPC_LOCK
from crossrail.doctor.remedies import listing, sysctl

_CAPABILITIES = {"IPC_LOCK": CAP_IPC_LOCK, "SYS_PTRACE": 19, "NET_RAW": 13}
_YAMA = {0: "any process of the same user", 1: "descendants only", 2: "administrators only", 3: "nobody"}
_SECCOMP_FILTER = 2


def kind(host: Host) -> Iterator[Finding]:
    """The kind of environment this runs in, and its capabilities."""
    held = [name for name, bit in _CAPABILITIES.items() if host.capabilities >> bit & 1]
    where = f"in a container ({host.container})" if host.container else "not in a container, as far as can be seen"
    seen = "/.dockerenv, /run/.containerenv, /proc/1/cgroup, environment"
    yield ok("container.kind", where, seen)
    lacking = [name for name in _CAPABILITIES if name not in held]
    namespace = (
        "; in a user namespace of its own, where they do not count for drivers" if host.in_user_namespace else ""
    )
    yield ok(
        "container.capabilities",
        f"capabilities: {listing(held) or 'none of those that RDMA programs ask for'}{namespace}",
        f"CapEff of /proc/self/status; not held: {listing(lacking) or 'none'}. Shared memory and TCP need no "
        "capability; RDMA needs IPC_LOCK where locked memory is limited",
    )


def network(host: Host) -> Iterator[Finding]:
    """A separate network namespace: other containers then count as other hosts."""
    check = "container.network"
    own = {host.read_int(f"{NET}/{name}/ifindex") for name in host.names(NET)}
    linked = [name for name in host.names(NET) if _leads_outside(host, name, own)]
    physical = [name for name in host.names(NET) if name != "lo" and host.exists(f"{NET}/{name}/device")]
    if linked and not physical:
        yield note(
            check,
            f"a network namespace of its own: {listing(linked)} leads to a bridge",
            f"{NET}: no hardware below any interface, iflink points outside",
            "processes outside this container cannot be reached through shared memory, even on the same host (they "
            "meet at a socket of the network namespace); TCP passes a bridge and maybe address translation",
            Fix("docker run --network=host ...", "docker, podman; or --network=container:NAME for two that talk"),
            Fix("hostNetwork: true", "kubernetes"),
        )
    elif host.container:
        yield ok(check, "the network interfaces are those of the machine", NET)


def _leads_outside(host: Host, name: str, own: set[int | None]) -> bool:
    """Whether it is one end of a veth pair whose other end is outside of this namespace."""
    base = f"{NET}/{name}"
    other = host.read_int(f"{base}/iflink")
    return not host.exists(f"{base}/device") and other is not None and other != 0 and other not in own


def attach(host: Host) -> Iterator[Finding]:
    """Cross-memory attach: one way of moving memory that the peer cannot map. Tried, not guessed."""
    check = "container.attach"
    scope = host.read_int("/proc/sys/kernel/yama/ptrace_scope")
    match = re.search(r"^Seccomp:\s*(\d)", host.read("/proc/self/status") or "", re.MULTILINE)
    filtered = match is not None and int(match[1]) == _SECCOMP_FILTER
    seen = (
        f"yama ptrace_scope {'absent' if scope is None else scope} ({_YAMA.get(scope or 0, 'unknown')}), "
        f"seccomp filter {'on' if filtered else 'off'}"
    )
    code = host.attach_errno()
    if code == 0:
        yield ok(check, "processes of this user may read each other's memory (process_vm_readv)", seen)
        return
    fixes: list[Fix] = [Fix("engine.alloc(nbytes)", "or allocate targets so, and none of this matters")]
    if filtered and not scope:
        fixes.append(
            Fix("docker run --cap-add=SYS_PTRACE ...", "docker, podman; its seccomp filter then lets the call pass")
        )
    if scope:
        fixes += sysctl(host, "kernel.yama.ptrace_scope", "0")
    yield note(
        check,
        "no cross-memory attach between processes",
        f"{seen}; process_vm_readv: {'not answered' if code is None else errno_name(code)}",
        "private memory (numpy, torch) is then always staged, with two copies in a pipeline: on a 2-core VM that "
        "was the faster way anyhow (16 GB/s against 8 GB/s)",
        *fixes,
    )


def kernel(host: Host) -> Iterator[Finding]:
    """The features of newer kernels that we use."""
    check = "container.kernel"
    version = host.kernel
    if version == (0, 0):
        return
    if version < (5, 3):
        yield warning(
            check,
            f"kernel {host.kernel_text} has no pidfd",
            "/proc/sys/kernel/osrelease",
            "a peer's death is then seen by its socket alone: later, when a forked child of it holds the socket open",
            Fix("", "a kernel of 5.3 or newer"),
        )
    elif version < (5, 14):
        yield note(
            check,
            f"kernel {host.kernel_text} faults memory in page by page",
            "/proc/sys/kernel/osrelease; MADV_POPULATE_WRITE came with 5.14",
            "engine.alloc(populate=True) leaves the work to the first write: the first pass over a pool is slower",
            Fix("", "a kernel of 5.14 or newer"),
        )
    else:
        yield ok(check, f"kernel {host.kernel_text}", "/proc/sys/kernel/osrelease")
