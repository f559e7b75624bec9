"""The kernel's TCP settings, and what they allow: bytes in flight, connections at once."""

from __future__ import annotations

from collections.abc import Iterator

from crossrail.doctor.finding import Finding, note, ok, warning
from crossrail.doctor.host import Host
from crossrail.doctor.remedies import size, sysctl

_IPV4 = "/proc/sys/net/ipv4"
_WINDOW_LOW_BYTES = 1 << 20
_WINDOW_GOOD_BYTES = 4 << 20
_WINDOW_WANTED = "4096 131072 67108864"
_BACKLOG_GOOD = 512
_PORTS_GOOD = 16_000
_MEMORY_LOW_BYTES = 128 << 20
_MEMORY_SHARE = 32  # the kernel's own choice is a twentieth
_FAST_CONTROLS = ("cubic", "reno", "dctcp", "htcp")


def windows(host: Host) -> Iterator[Finding]:
    """The largest send and receive buffers: what one stream can have in flight."""
    good: dict[str, int] = {}
    for name in ("tcp_rmem", "tcp_wmem"):
        values = host.read_ints(f"{_IPV4}/{name}")
        if len(values) != 3 or values[2] <= 0:
            continue
        most = values[2]
        # Half of a receive buffer is kept for overhead; what is left is the window.
        window = most // 2 if name == "tcp_rmem" else most
        if most >= _WINDOW_GOOD_BYTES:
            good[f"{name} {size(most)}"] = window
            continue
        make = warning if most < _WINDOW_LOW_BYTES else note
        yield make(
            f"tcp.{name.replace('_', '-')}",
            f"{name} ends at {size(most)}",
            f"net.ipv4.{name} = {' '.join(map(str, values))}",
            f"one stream moves at most {_rates(window)}",
            *sysctl(host, f"net.ipv4.{name}", _WINDOW_WANTED),
        )
    if good:
        title = f"buffers grow to {' and '.join(good)}: one stream can do {_rates(min(good.values()))}"
        yield ok("tcp.windows", title, f"{_IPV4}/tcp_rmem, tcp_wmem")
    if host.read_int(f"{_IPV4}/tcp_window_scaling") == 0:
        yield warning(
            "tcp.window-scaling",
            "TCP window scaling is switched off",
            "net.ipv4.tcp_window_scaling = 0",
            "64 KiB in flight: one stream moves at most 0.66 GB/s at a round trip of 0.1 ms",
            *sysctl(host, "net.ipv4.tcp_window_scaling", "1"),
        )


def _rates(window_bytes: int) -> str:
    """What the window allows on a short and on a longer path."""
    near, far = window_bytes / 1e-4 / 1e9, window_bytes / 1e-3 / 1e9
    return f"{_figure(near)} GB/s at a round trip of 0.1 ms, {_figure(far)} GB/s at 1 ms"


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def buffer_caps(host: Host) -> Iterator[Finding]:
    """The buffer sizes that programs get if they ask for them. The engine does not."""
    caps = {name: host.read_int(f"/proc/sys/net/core/{name}") for name in ("rmem_max", "wmem_max")}
    known = [f"{name} {size(value)}" for name, value in caps.items() if value is not None]
    if known:
        title = f"{', '.join(known)}: no bound for crossrail, which leaves its sockets to the kernel's tuning"
        yield ok("tcp.buffer-caps", title, "/proc/sys/net/core")


def memory(host: Host) -> Iterator[Finding]:
    """The memory that all sockets together may use."""
    check = "tcp.memory"
    limits = host.read_ints(f"{_IPV4}/tcp_mem")
    if len(limits) != 3:
        return
    pressure_bytes, most_bytes = limits[1] * host.page_bytes, limits[2] * host.page_bytes
    used_bytes = _socket_pages(host) * host.page_bytes
    seen = f"net.ipv4.tcp_mem = {' '.join(map(str, limits))} pages; in use {size(used_bytes)}"
    pages = host.memory_bytes // host.page_bytes
    fixes = sysctl(host, "net.ipv4.tcp_mem", f"{pages // 16} {pages // 8} {pages // 4}") if pages else ()
    if used_bytes > pressure_bytes:
        yield warning(
            check, f"TCP's memory is short: {size(used_bytes)} in use", seen, "buffers are being shrunk now", *fixes
        )
    elif pressure_bytes < _MEMORY_LOW_BYTES and pressure_bytes < host.memory_bytes // _MEMORY_SHARE:
        yield note(
            check,
            f"TCP shrinks buffers beyond {size(pressure_bytes)} in all",
            seen,
            f"with 1,000 connections that is {size(pressure_bytes // 1000)} each",
            *fixes,
        )
    else:
        yield ok(check, f"TCP may use {size(most_bytes)} in all", seen)


def _socket_pages(host: Host) -> int:
    for line in (host.read("/proc/net/sockstat") or "").splitlines():
        words = line.split()
        if words[:1] == ["TCP:"] and "mem" in words[:-1]:
            text = words[words.index("mem") + 1]
            return int(text) if text.isdecimal() and len(text) < 16 else 0
    return 0


def congestion(host: Host) -> Iterator[Finding]:
    """Algorithms for the open internet pace what a data centre need not pace."""
    check = "tcp.congestion-control"
    chosen = host.read(f"{_IPV4}/tcp_congestion_control")
    if not chosen:
        return
    if chosen in _FAST_CONTROLS:
        yield ok(check, f"congestion control {chosen}", "net.ipv4.tcp_congestion_control")
        return
    if chosen.startswith("bbr"):
        cost = (
            "made for long paths: it paces each stream, and gives up bandwidth within a rack (over loopback of a "
            "2-core VM: "
            "3.4 GB/s, cubic 7.0). Within a host the engine's sockets do without it, between hosts they take it"
        )
    else:
        cost = "not measured by us; cubic is the kernel's default"
    yield note(
        check,
        f"congestion control {chosen}",
        f"net.ipv4.tcp_congestion_control = {chosen}",
        cost,
        *sysctl(host, "net.ipv4.tcp_congestion_control", "cubic"),
    )


def bursts(host: Host) -> Iterator[Finding]:
    """Transfers come in bursts with pauses between."""
    check = "tcp.slow-start-after-idle"
    value = host.read_int(f"{_IPV4}/tcp_slow_start_after_idle")
    if value == 1:
        yield note(
            check,
            "TCP starts slowly again after every pause",
            "net.ipv4.tcp_slow_start_after_idle = 1",
            "after 0.2 s and more without data a stream begins with some 10 packets: a transfer of 1 MiB then "
            "takes about 6 more round trips (0.6 ms at 0.1 ms)",
            *sysctl(host, "net.ipv4.tcp_slow_start_after_idle", "0"),
        )
    elif value == 0:
        yield ok(check, "TCP keeps its window over pauses", "net.ipv4.tcp_slow_start_after_idle = 0")


def connections(host: Host) -> Iterator[Finding]:
    """A thousand peers that connect at once."""
    backlog = host.read_int("/proc/sys/net/core/somaxconn")
    if backlog is not None and backlog < _BACKLOG_GOOD:
        yield note(
            "tcp.somaxconn",
            f"at most {backlog} connections may wait to be accepted",
            f"net.core.somaxconn = {backlog}",
            "when more peers than that connect in one moment, the others retry after 1 s, 3 s, 7 s",
            *sysctl(host, "net.core.somaxconn", "4096"),
        )
    elif backlog is not None:
        yield ok("tcp.somaxconn", f"{backlog:,} connections may wait to be accepted", "net.core.somaxconn")
    ports = host.read_ints(f"{_IPV4}/ip_local_port_range")
    if len(ports) == 2:
        count = ports[1] - ports[0] + 1
        seen = f"net.ipv4.ip_local_port_range = {ports[0]} {ports[1]}"
        if count < _PORTS_GOOD:
            yield warning(
                "tcp.ports",
                f"only {max(count, 0):,} local ports for outgoing connections",
                seen,
                "1,000 peers with 4 rails and two connections each need 8,000, and a closed one is blocked for 60 s",
                *sysctl(host, "net.ipv4.ip_local_port_range", "32768 60999"),
            )
        else:
            yield ok("tcp.ports", f"{count:,} local ports for outgoing connections", seen)
