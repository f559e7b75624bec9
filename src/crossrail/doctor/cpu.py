"""Processors: how many this process really has, how fast they wake, and which memory is near."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from crossrail.doctor.finding import Finding, Fix, note, ok, warning
from crossrail.doctor.host import Host
from crossrail.doctor.remedies import listing, sudo, sysctl

_CPU = "/sys/devices/system/cpu"
_NODE = "/sys/devices/system/node"
_FAST_CLOCKS = {"tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter", "timebase", "tod"}
_CLOCK_SLOW_NS = 400
_WAKE_SLOW_US = 50
_STEAL_HIGH = 0.05
_THROTTLED_MUCH = 0.01  # of periods of 0.1 s: a stop in 10 s of work
_MEANS_ITSELF = ("intel_pstate", "amd-pstate-epp")  # drivers whose "powersave" follows the load


def count(host: Host) -> Iterator[Finding]:
    """Cores of the affinity mask."""
    check = "cpu.count"
    cpus = host.cpus()
    online = parse_list(host.read(f"{_CPU}/online") or "")
    of_all = f" of {len(online)}" if len(online) > len(cpus) else ""
    if len(cpus) == 1:
        yield warning(
            check,
            f"this process may run on one core only{of_all}",
            f"affinity: core {min(cpus)}",
            "the engine's worker and your code take turns: small writes wait for a time slice, milliseconds instead of "
            "microseconds",
            Fix("taskset -c 0-3 COMMAND"),
            Fix("docker run --cpuset-cpus=0-3 ...", "docker, podman"),
        )
    else:
        yield ok(check, f"{len(cpus)}{of_all} cores", "sched_getaffinity")
    load = (host.read("/proc/loadavg") or "").partition(" ")[0]
    if re.fullmatch(r"\d{1,6}\.\d\d", load) and float(load) > 1.5 * max(len(online), len(cpus)):
        yield note(
            "cpu.load",
            f"the machine is busy: load {load} on {max(len(online), len(cpus))} cores",
            "/proc/loadavg, mean of a minute",
            "latencies are those of the scheduler's queue; measure again when it is quiet",
            Fix("top"),
        )


def parse_list(text: str) -> list[int]:
    """0-3,8 -> [0, 1, 2, 3, 8]; empty for anything else."""
    if re.fullmatch(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", text) is None:
        return []
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


@dataclass(frozen=True)
class _Quota:
    """A CPU quota of one cgroup. throttled: periods in which the group was stopped."""

    cores: float
    seen: str
    throttled: int
    periods: int

    @property
    def share(self) -> float:
        """The share of periods that were cut short."""
        return self.throttled / self.periods if self.periods else 0.0


def quota(host: Host) -> Iterator[Finding]:
    """A limit on CPU time, after which everything stops until the next period."""
    check = "cpu.quota"
    files = host.control_files("cpu", "cpu.cfs_quota_us", "cpu.max")
    if not files and not host.sees_control_groups("cpu"):
        yield note(
            check,
            "whether a control group has a CPU quota is unknown",
            "/proc/self/cgroup, /sys/fs/cgroup: no group is in sight",
            "with a quota, threads that spin use it up; then all threads are stopped for up to 0.1 s",
        )
        return
    quotas = _quotas(host, files)
    if not quotas:
        yield ok(check, "no CPU quota", "cpu.max, cpu.cfs_quota_us")
        return
    smallest = min(quotas, key=lambda quota: quota.cores)
    worst = max(quotas, key=lambda quota: quota.share)
    cores = smallest.cores
    if worst.share >= _THROTTLED_MUCH:
        yield warning(
            check,
            f"the CPU quota of {worst.cores:g} cores stopped this container in {worst.share:.0%} of periods",
            worst.seen,
            "each time all threads are stopped for the rest of the period, up to 0.1 s: peers see it as frozen",
            *_quota_fixes(),
        )
    elif cores < min(2, len(host.cpus())) or cores < len(host.cpus()) / 2:
        yield note(
            check,
            f"a CPU quota of {cores:g} cores on {len(host.cpus())} of them",
            smallest.seen,
            "threads that spin use it up; then all threads are stopped for the rest of the period, up to 0.1 s",
            Fix('xr.Engine(polling="adaptive", spin_us=5)', "spin less"),
            *_quota_fixes(),
        )
    else:
        yield ok(check, f"CPU quota: {cores:g} cores", smallest.seen)


def _quota_fixes() -> tuple[Fix, ...]:
    return (
        Fix("docker update --cpus=0 CONTAINER", "docker; and --cpuset-cpus for cores of its own"),
        Fix(
            "resources: {limits: {cpu: 8}, requests: {cpu: 8}}  # whole numbers, equal",
            "kubernetes, static CPU manager",
        ),
    )


def _quotas(host: Host, files: list[tuple[str, str]]) -> list[_Quota]:
    """The quotas of our cgroup and all above it. Each group counts only its own quota: a parent's throttling is counted
    there.
    """
    found = []
    for path, text in files:
        folder, _, name = path.rpartition("/")
        words = text.split()
        if name == "cpu.cfs_quota_us":
            words.append(host.read(f"{folder}/cpu.cfs_period_us") or "")
        if len(words) == 2 and all(re.fullmatch(r"\d{1,12}", word) for word in words) and int(words[1]):
            throttled, periods = _throttling(host.read(f"{folder}/cpu.stat") or "")
            seen = f"{path} {' '.join(words)}; nr_throttled {throttled:,} of {periods:,}"
            found.append(_Quota(int(words[0]) / int(words[1]), seen, throttled, periods))
    return found


def _throttling(stat: str) -> tuple[int, int]:
    """(throttled, periods)."""
    counts = dict(re.findall(r"^(nr_throttled|nr_periods) (\d{1,18})$", stat, re.MULTILINE))
    return (int(counts["nr_throttled"]), int(counts["nr_periods"])) if len(counts) == 2 else (0, 0)


def governor(host: Host) -> Iterator[Finding]:
    """The driver and policy that set the clock speed."""
    check = "cpu.governor"
    slow, found = [], set()
    for name in host.names(_CPU):
        base = f"{_CPU}/{name}/cpufreq"
        word = host.read(f"{base}/scaling_governor") if re.fullmatch(r"cpu\d+", name) else None
        if word:
            found.add(word)
            if word != "performance" and host.read(f"{base}/scaling_driver") not in _MEANS_ITSELF:
                slow.append(name)
    if slow:
        yield note(
            check,
            f"{len(slow)} cores change their clock speed with the load",
            f"{_CPU}/*/cpufreq/scaling_governor: {listing(sorted(found))}",
            "after a pause a core needs milliseconds to speed up; short transfers run at the low clock",
            Fix(sudo(host, "cpupower frequency-set -g performance")),
        )
    elif found:
        yield ok(check, f"clock governor: {listing(sorted(found))}", f"{_CPU}/*/cpufreq/scaling_governor")


def sleep_states(host: Host) -> Iterator[Finding]:
    """How long a sleeping core takes to wake."""
    check = "cpu.sleep-states"
    deepest, worst_us = "", 0
    base = f"{_CPU}/cpu0/cpuidle"
    for state in host.names(base):
        latency_us = host.read_int(f"{base}/{state}/latency")
        if latency_us and latency_us > worst_us and host.read(f"{base}/{state}/disable") != "1":
            deepest, worst_us = host.read(f"{base}/{state}/name") or state, latency_us
    if worst_us > _WAKE_SLOW_US:
        yield note(
            check,
            f"idle cores sleep as deep as {deepest}: {worst_us} us to wake",
            f"{base}/*/latency",
            f"the first transfer after a pause takes up to {worst_us} us more on each side",
            Fix(sudo(host, f"cpupower idle-set -D {_WAKE_SLOW_US}"), "until the next boot"),
            Fix('xr.Engine(polling="spin")', "or give the worker a core that never sleeps"),
        )
    elif deepest:
        yield ok(check, f"idle cores wake within {worst_us} us", f"{base}/*/latency")


def clock(host: Host) -> Iterator[Finding]:
    """Reading the time happens in every wait."""
    check = "cpu.clock"
    base = "/sys/devices/system/clocksource/clocksource0"
    source, others = host.read(f"{base}/current_clocksource"), host.read(f"{base}/available_clocksource") or ""
    if not source:
        return
    cost_ns = host.clock_read_ns()
    seen = f"{base}/current_clocksource = {source}; one reading from Python took {cost_ns:.0f} ns"
    if source in _FAST_CLOCKS and cost_ns < _CLOCK_SLOW_NS:
        yield ok(check, f"clock {source}, {cost_ns:.0f} ns a reading", seen)
        return
    if source == "tsc":
        fix = Fix("", "the hypervisor traps or emulates it: another instance type, or a setting of the hypervisor")
    elif "tsc" in others.split():
        fix = Fix(f"echo tsc | {sudo(host, f'tee {base}/current_clocksource')}", "until the next boot")
    else:
        fix = Fix("dmesg | grep -i -E 'clocksource|tsc'", "why the kernel gave up the tsc")
    yield warning(
        check,
        f"reading the clock is slow: {source}, {cost_ns:.0f} ns",
        seen,
        "normal is 20 to 80 ns; every wait and every idle round of the worker reads it: latencies grow by microseconds",
        fix,
    )


def numa(host: Host) -> Iterator[Finding]:
    """Memory, cores and devices near each other; and a kernel that moves pages about."""
    nodes = [name for name in host.names(_NODE) if re.fullmatch(r"node\d+", name)]
    hardware = host.hardware
    devices = [(nic.name, nic.pci) for nic in hardware.nics if nic.pci]
    devices += [(f"GPU {gpu.address}", gpu.address) for gpu in hardware.gpus]
    if len(nodes) > 1 and host.read_int("/proc/sys/kernel/numa_balancing"):
        yield note(
            "cpu.numa-balancing",
            "the kernel moves pages between NUMA nodes automatically",
            f"kernel.numa_balancing on, {len(nodes)} nodes",
            "it unmaps pages to see who uses them: pauses in copies through shared memory; locked (RDMA) memory stays",
            *sysctl(host, "kernel.numa_balancing", "0"),
        )
    placed = {name: hardware.numa_node(address) for name, address in devices}
    unknown = [name for name, node in placed.items() if node < 0]
    if len(nodes) > 1 and unknown:
        yield warning(
            "cpu.numa-unknown",
            f"the NUMA node of {listing(unknown)} is unknown",
            "numa_node is -1: usual in virtual machines whose firmware says nothing",
            "workers cannot be pinned near their device; on the far node a 400 Gb/s card may lose a good part of "
            "its rate",
            Fix("xr.Engine(worker_cpu=N)", "pin manually, and measure with different N"),
        )
    ours = {node for node in nodes if set(parse_list(host.read(f"{_NODE}/{node}/cpulist") or "")) & host.cpus()}
    far = [name for name, node in placed.items() if node >= 0 and f"node{node}" not in ours]
    if len(nodes) > 1 and far:
        yield warning(
            "cpu.numa-far",
            f"no core of this process is on the node of {listing(far)}",
            f"allowed cores are on {listing(sorted(ours))}",
            "every byte crosses the link between the sockets",
            Fix(f"numactl --cpunodebind={placed[far[0]]} --membind={placed[far[0]]} COMMAND"),
        )
    if nodes and not unknown and not far:
        yield ok("cpu.numa", f"{len(nodes)} NUMA node(s)", _NODE)


def stolen(host: Host) -> Iterator[Finding]:
    """Time that the hypervisor gave to others."""
    words = (host.read("/proc/stat") or "").partition("\n")[0].split()
    if len(words) < 9 or words[0] != "cpu" or not all(word.isdecimal() for word in words[1:9]):
        return
    ticks = [int(word[:18]) for word in words[1:9]]
    share = ticks[7] / sum(ticks) if sum(ticks) else 0.0
    if share > _STEAL_HIGH:
        yield note(
            "cpu.steal",
            f"the hypervisor took {share:.0%} of this machine's time",
            "/proc/stat, steal since boot",
            "a core that is taken away for milliseconds looks like a slow or frozen peer",
            Fix("vmstat 1", "is it so now? Column st"),
        )
