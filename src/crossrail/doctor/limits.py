"""Limits of the process: locked pages, files, threads, address space, shared memory, huge pages, control groups."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass

from crossrail.doctor.finding import Finding, Fix, error, note, ok, warning
from crossrail.doctor.host import Host
from crossrail.doctor.remedies import size, sudo, sysctl

CAP_IPC_LOCK = 14
_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 21, 24

_MEMLOCK_LOW_BYTES = 1 << 30
_FILES_LOW = 4096
_THREADS_LOW = 256
_USERS_THREADS_LOW = 1024
_SHM_LOW_BYTES = 1 << 30
_HEADROOM_LOW_BYTES = 2 << 30
_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes "none" as a number near 2**63


def memlock(host: Host) -> Iterator[Finding]:
    """Registered memory is locked memory, with RDMA."""
    check = "limits.memlock"
    soft, hard = host.rlimit(resource.RLIMIT_MEMLOCK)
    exempt = host.is_capable(CAP_IPC_LOCK)
    seen = f"RLIMIT_MEMLOCK soft {size(soft)}, hard {size(hard)}; CAP_IPC_LOCK {'held' if exempt else 'not held'}"
    if soft is None:
        yield ok(check, "locked memory: unlimited", seen)
    elif not host.hardware.rdma:
        yield ok(check, f"locked memory: {size(soft)}; only RDMA locks memory, and there is no RDMA device", seen)
    elif exempt:
        yield ok(check, f"locked memory: {size(soft)}, which CAP_IPC_LOCK overrides", seen)
    elif 0 < host.memory_bytes * _rails(host) <= soft:
        yield ok(check, f"locked memory: {size(soft)}, enough for all that this machine has", seen)
    else:
        make = error if soft < _MEMLOCK_LOW_BYTES else warning
        yield make(
            check,
            f"only {size(soft)} of memory may be locked",
            seen,
            f'registering more than {size(soft)} in this process fails with ENOMEM ("Cannot allocate memory"), however '
            "much is free: often at the first large pool, and not at start-up; a region counts once for each RDMA rail",
            *_memlock_fixes(host, hard),
        )


def _rails(host: Host) -> int:
    """How often a region may be registered: the kernel counts its pages each time (ib_umem_get, pinned_vm)."""
    return max(len({port.device for port in host.hardware.rail_ports}), 1)


def _memlock_fixes(host: Host, hard: int | None) -> Iterator[Fix]:
    if hard is None:
        yield Fix("ulimit -l unlimited", "in this shell")
    if not host.container:
        lines = r"'* soft memlock unlimited\n* hard memlock unlimited\n'"
        file = "/etc/security/limits.d/90-crossrail.conf"
        yield Fix(f"printf {lines} | " + sudo(host, f"tee {file}"), "logins; then log in again")
        yield Fix(sudo(host, "systemctl edit NAME.service"), "a systemd service: [Service] LimitMEMLOCK=infinity")
    if host.container != "kubernetes":
        yield Fix("docker run --ulimit memlock=-1:-1 ...", "docker, podman")
    if host.container in ("", "kubernetes"):
        yield Fix("securityContext: {capabilities: {add: [IPC_LOCK]}}", "kubernetes: in the container's spec")
        yield Fix(
            "sudo systemctl edit containerd.service",
            "kubernetes: or on each node [Service] LimitMEMLOCK=infinity, and restart it",
        )


def open_files(host: Host) -> Iterator[Finding]:
    """Every connection is a file."""
    check = "limits.open-files"
    soft, hard = host.rlimit(resource.RLIMIT_NOFILE)
    seen = f"RLIMIT_NOFILE soft {_count(soft)}, hard {_count(hard)}"
    if soft is None or soft >= _FILES_LOW:
        yield ok(check, f"open files: {_count(soft)}", seen)
        return
    reachable = hard is None or hard >= _FILES_LOW
    yield warning(
        check,
        f"only {soft:,} files may be open",
        seen,
        f"a peer takes about 3 over shared memory, up to 4 per pair of rails over TCP: some {soft // 4:,} peers, then "
        'connecting fails with EMFILE ("Too many open files")',
        Fix(f"ulimit -n {65536 if hard is None else min(hard, 65536)}", "in this shell")
        if reachable
        else Fix(sudo(host, "prlimit --pid $$ --nofile=65536"), "in this shell"),
        Fix(sudo(host, "systemctl edit NAME.service"), "a systemd service: [Service] LimitNOFILE=65536"),
        Fix("docker run --ulimit nofile=65536:65536 ...", "docker, podman"),
    )


def _count(value: int | None) -> str:
    return "unlimited" if value is None else f"{value:,}"


def threads(host: Host) -> Iterator[Finding]:
    """Each engine has threads, which count as processes do: those of a control group, and those of the user."""
    check = "limits.threads"
    cost = (
        "an engine takes 2 or 3 threads, and libraries of linear algebra one per core; where none is left, opening one "
        'fails with EAGAIN ("Resource temporarily unavailable")'
    )
    groups = _thread_limits(host)
    soft, hard = host.rlimit(resource.RLIMIT_NPROC)
    is_root = host.uid == 0 and not host.in_user_namespace
    if is_root or host.is_capable(_CAP_SYS_RESOURCE) or host.is_capable(_CAP_SYS_ADMIN):
        soft = None  # the kernel asks them nothing
    if groups and (tightest := min(groups, key=lambda group: group.left)).left < _THREADS_LOW:
        yield warning(
            check,
            f"the control group has room for {max(tightest.left, 0):,} more threads",
            f"{tightest.path}: {tightest.limit:,}, in use {tightest.used:,}",
            cost,
            Fix("docker run --pids-limit=-1 ...", "docker, podman"),
            Fix("podPidsLimit: -1", "kubernetes: in the kubelet's configuration"),
            Fix(sudo(host, "systemctl edit NAME.service"), "a systemd service: [Service] TasksMax=infinity"),
        )
    elif soft is not None and soft < _USERS_THREADS_LOW:
        reachable = hard is None or hard >= _USERS_THREADS_LOW
        yield warning(
            check,
            f"this user may have only {soft:,} threads, of all its processes together",
            f"RLIMIT_NPROC soft {_count(soft)}, hard {_count(hard)}",
            cost,
            Fix(f"ulimit -u {'unlimited' if hard is None else hard}", "in this shell")
            if reachable
            else Fix(sudo(host, "prlimit --pid $$ --nproc=unlimited"), "in this shell"),
            Fix(sudo(host, "systemctl edit NAME.service"), "a systemd service: [Service] LimitNPROC=infinity"),
        )
    else:
        of_group = f"{tightest.left:,} more in the control group" if groups else "no limit of a control group in sight"
        yield ok(check, f"threads: {of_group}, {_count(soft)} for the user", "pids.max, RLIMIT_NPROC")


@dataclass(frozen=True)
class _ThreadLimit:
    """The limit of a control group on threads, and how many it and all below have. path: its file."""

    path: str
    limit: int
    used: int

    @property
    def left(self) -> int:
        return self.limit - self.used


def _thread_limits(host: Host) -> list[_ThreadLimit]:
    return [
        _ThreadLimit(path, int(text), host.read_int(f"{path.rpartition('/')[0]}/pids.current") or 0)
        for path, text in host.control_files("pids", "pids.max", "pids.max")
        if text.isdecimal() and len(text) < 20
    ]


def address_space(host: Host) -> Iterator[Finding]:
    """What is mapped counts, touched or not."""
    check = "limits.address-space"
    soft, hard = host.rlimit(resource.RLIMIT_AS)
    seen = f"RLIMIT_AS soft {size(soft)}, hard {size(hard)}"
    if soft is None:
        yield ok(check, "address space: unlimited", seen)
        return
    yield warning(
        check,
        f"a process may have only {size(soft)} of address space",
        seen,
        "all that is mapped counts, touched or not: a process with crossrail has some 200 MiB, each thread 8 MiB and "
        "more, CUDA hundreds of GiB; beyond the limit engine.alloc fails with ENOMEM and threads with EAGAIN, however "
        "much memory is free",
        Fix("ulimit -v unlimited", "in this shell")
        if hard is None
        else Fix(sudo(host, "prlimit --pid $$ --as=unlimited"), "in this shell"),
        Fix(sudo(host, "systemctl edit NAME.service"), "a systemd service: [Service] LimitAS=infinity"),
    )


def shared_memory(host: Host) -> Iterator[Finding]:
    """/dev/shm: not ours, but of what runs beside us in the same container."""
    check = "limits.dev-shm"
    space = host.space("/dev/shm") if host.exists("/dev/shm") else None
    fixes = (
        Fix("docker run --shm-size=16g ...", "docker, podman"),
        Fix("volumes: [{name: shm, emptyDir: {medium: Memory}}]", "kubernetes; mounted at /dev/shm"),
        Fix(sudo(host, "mount -o remount,size=50% /dev/shm"), "on a host"),
    )
    others = "crossrail uses none of it (memfd); NCCL, torch's data loaders and libfabric's shm do"
    if space is None:
        yield note(check, "no /dev/shm", "/dev/shm is not there", others, *fixes)
    elif space.total_bytes < _SHM_LOW_BYTES:
        yield note(
            check,
            f"/dev/shm holds only {size(space.total_bytes)}",
            f"{size(space.free_bytes)} free",
            f'{others}, and end with "Bus error" when it is full',
            *fixes,
        )
    elif space.free_bytes < space.total_bytes // 20:
        yield note(
            check,
            f"/dev/shm is nearly full: {size(space.free_bytes)} of {size(space.total_bytes)} left",
            "statvfs(/dev/shm)",
            f"{others}. Files of programs that were killed stay there until somebody removes them",
            Fix("ls -lt /dev/shm", "what lies there"),
        )
    else:
        yield ok(check, f"/dev/shm: {size(space.free_bytes)} of {size(space.total_bytes)} free", "statvfs(/dev/shm)")


def huge_pages(host: Host) -> Iterator[Finding]:
    """Transparent huge pages, for private memory and for engine.alloc."""
    base = "/sys/kernel/mm/transparent_hugepage"
    private, shared = _chosen(host, f"{base}/enabled"), _chosen(host, f"{base}/shmem_enabled")
    cost = (
        "many page-table look-ups when pages are small and scattered: on a 2-core VM, shuffled copies of 1 KiB "
        "and 8 KiB were 11 to 17 % slower without huge pages, of 64 KiB 3 to 8 %"
    )
    if shared in ("never", "deny"):
        yield note(
            "limits.huge-pages-shared",
            "no huge pages for engine.alloc memory",
            f"{base}/shmem_enabled = {shared}; the engine asks for them (MADV_HUGEPAGE) and is not heard",
            cost,
            Fix(f"echo advise | {sudo(host, f'tee {base}/shmem_enabled')}", "until the next boot"),
        )
    elif shared:
        yield ok("limits.huge-pages-shared", f"huge pages for engine.alloc memory: {shared}", f"{base}/shmem_enabled")
    if private == "never":
        yield note(
            "limits.huge-pages",
            "no transparent huge pages",
            f"{base}/enabled = never",
            cost,
            Fix(f"echo madvise | {sudo(host, f'tee {base}/enabled')}", "until the next boot"),
        )
    elif private:
        yield ok("limits.huge-pages", f"transparent huge pages: {private}", f"{base}/enabled")


def _chosen(host: Host, path: str) -> str:
    """The word in brackets."""
    match = re.search(r"\[([a-z_+]{1,20})\]", host.read(path) or "")
    return match[1] if match else ""


def overcommit(host: Host) -> Iterator[Finding]:
    """Strict accounting refuses what nobody touches."""
    check = "limits.overcommit"
    mode = host.read_int("/proc/sys/vm/overcommit_memory")
    if mode == 2:
        limit, used = host.meminfo("CommitLimit"), host.meminfo("Committed_AS")
        yield note(
            check,
            f"memory is accounted strictly: {size(max(limit - used, 0))} can still be promised",
            f"vm.overcommit_memory = 2; CommitLimit {size(limit)}, Committed_AS {size(used)}",
            "large pools fail with ENOMEM while memory is free; CUDA reserves hundreds of GiB of addresses",
            *sysctl(host, "vm.overcommit_memory", "0"),
        )
    elif mode is not None:
        yield ok(check, "memory may be promised before it is used", f"vm.overcommit_memory = {mode}")


def memory_group(host: Host) -> Iterator[Finding]:
    """The cgroups' memory limits, against which shared memory counts too. Reports the group with the least room."""
    check = "limits.memory-group"
    limits = memory_limits(host)
    if limits is None and not host.sees_control_groups("memory"):
        yield note(
            check,
            "whether a control group limits memory is unknown",
            "/proc/self/cgroup, /sys/fs/cgroup: no group is in sight",
            "beyond a limit the kernel kills a process (exit code 137)",
        )
        return
    if not limits:
        yield ok(check, "no memory limit of a control group", "memory.max, memory.limit_in_bytes")
        return
    tightest = min(limits, key=lambda limit: limit.left_bytes)
    seen = (
        f"{tightest.path}: {size(tightest.limit_bytes)}, in use {size(tightest.used_bytes)} and "
        f"{size(tightest.cache_bytes)} of page cache that can be dropped"
    )
    if tightest.left_bytes < _HEADROOM_LOW_BYTES:
        yield warning(
            check,
            f"the memory limit leaves {size(max(tightest.left_bytes, 0))}",
            seen,
            "engine.alloc memory is charged to the process that touches it first; beyond the limit the kernel kills a "
            "process (exit code 137) and its peers lose it",
            Fix("docker run --memory=64g ...", "docker, podman"),
            Fix("resources: {limits: {memory: 64Gi}}", "kubernetes"),
        )
    else:
        title = f"memory limit {size(tightest.limit_bytes)}, of which {size(tightest.used_bytes)} are used"
        yield ok(check, title, seen)


def memory_limits(host: Host) -> list[MemoryLimit] | None:
    """The memory limits of this process's groups. None: their files are not visible."""
    files = host.control_files("memory", "memory.limit_in_bytes", "memory.max")
    if not files:
        return None
    return [
        MemoryLimit(path, int(text), *_usage(host, path))
        for path, text in files
        if text.isdecimal() and len(text) < 20 and int(text) < _NO_LIMIT_BYTES
    ]


@dataclass(frozen=True)
class MemoryLimit:
    """The limit of a cgroup, and the usage of it and all below. used_bytes: without cache_bytes, which the kernel
    reclaims before it kills.
    """

    path: str
    limit_bytes: int
    used_bytes: int
    cache_bytes: int

    @property
    def left_bytes(self) -> int:
        """Negative where the limit was lowered below what is used."""
        return self.limit_bytes - self.used_bytes


def _usage(host: Host, limit_path: str) -> tuple[int, int]:
    """(used, inactive page cache) in bytes, for the cgroup whose limit is in that file."""
    folder, _, name = limit_path.rpartition("/")
    is_v1 = name == "memory.limit_in_bytes"
    charged = host.read_int(f"{folder}/{'memory.usage_in_bytes' if is_v1 else 'memory.current'}") or 0
    field = "total_inactive_file" if is_v1 else "inactive_file"
    match = re.search(rf"^{field} (\d{{1,19}})$", host.read(f"{folder}/memory.stat") or "", re.MULTILINE)
    cache = min(int(match[1]), charged) if match else 0
    return charged - cache, cache
