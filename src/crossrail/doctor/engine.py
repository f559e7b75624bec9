"""crossrail itself: does it load, does every transport open, do bytes arrive?"""

from __future__ import annotations

from collections.abc import Iterator

from crossrail.doctor.finding import Finding, Fix, error, note, ok, warning
from crossrail.doctor.host import Host
from crossrail.doctor.probes import RdmaPort, Selftest, TransportTest
from crossrail.doctor.remedies import listing

TRANSPORTS = ("shm", "tcp", "ofi", "verbs")
_PYTHON_MIN = (3, 10)
_SLOW_GB_PER_S = 1.0
_UPGRADE = Fix("git pull && pip install .", "in the source folder, if a newer one has it")


def python(host: Host) -> Iterator[Finding]:
    """The interpreter."""
    version = ".".join(map(str, host.python))
    if host.python[:2] < _PYTHON_MIN:
        yield error(
            "crossrail.python",
            f"Python {version} is too old",
            host.executable,
            "crossrail needs 3.10 or newer",
            Fix("python3.12 -m venv venv && venv/bin/pip install .", "in the source folder"),
        )
    else:
        yield ok("crossrail.python", f"Python {version}", host.executable)


def selftest(host: Host) -> Iterator[Finding]:
    """Loads the native module, opens engines, writes 1 MiB between two processes."""
    result = host.run_selftest(TRANSPORTS)
    reinstall = Fix(f"{host.executable} -m pip install --force-reinstall .", "in the source folder")
    if result.error:
        yield error(
            "crossrail.native",
            "crossrail cannot be imported",
            result.error,
            "nothing of crossrail works, but this doctor",
            reinstall,
            Fix("./dev setup", "in a checkout"),
        )
        return
    yield from _versions(result, reinstall)
    misfit = next((test for test in result.transports if test.state == "misfit"), None)
    if misfit is not None:
        yield error(
            "crossrail.native",
            "the native module and the Python files do not fit: one of them is older",
            f"{misfit.detail}\n{result.native_file}",
            "no engine opens",
            reinstall,
            Fix("./dev setup", "in a checkout"),
        )
        return
    others = [test for test in result.transports if test.state == "absent" and not _is_for(test.transport, host)]
    if others:
        names = ", ".join(test.transport for test in others)
        yield note("crossrail.absent", f"not in this build, and nothing here for them: {names}", others[0].detail)
    for test in result.transports:
        if test not in others:
            yield _transport(host, test)
    yield from _rdma_rails(result)


def _rdma_rails(result: Selftest) -> Iterator[Finding]:
    """How the transports see the kernel's ports: an active port need not be usable as a rail."""
    check = "crossrail.rails"
    usable = [port for port in result.ports if not port.trouble]
    if usable:
        chosen = (
            f"an engine chooses {listing(list(result.chosen))} automatically"
            if result.chosen
            else ("none that an engine uses by default; rails=[...] names them")
        )
        yield ok(check, f"{len(usable)} RDMA rail(s): {listing([_port_text(port) for port in usable])}", chosen)
    # verbs does not see EFA devices, nor ofi verbs devices: nothing is wrong if the other transport has the device.
    names = {port.name.partition(":")[0].removesuffix("-rdm") for port in usable}
    troubled = [port for port in result.ports if port.trouble and port.name.partition(":")[0] not in names]
    if troubled:
        yield warning(
            "crossrail.no-rail",
            f"{len(troubled)} RDMA port(s) cannot be rails: {listing([port.name for port in troubled])}",
            "; ".join(f"{port.transport}, {port.name}: {port.trouble}" for port in troubled),
            "bytes go over the other rails, or over TCP",
            Fix("crossrail doctor --only rdma,limits", "what is wrong with them"),
        )


def _port_text(port: RdmaPort) -> str:
    place = ", ".join(text for text in (port.netdev, port.ip, "software" if port.is_software else "") if text)
    return f"{port.name} of {port.transport}{f' ({place})' if place else ''}"


def _versions(result: Selftest, reinstall: Fix) -> Iterator[Finding]:
    if result.installed_version and result.installed_version != result.version:
        yield warning(
            "crossrail.version",
            f"the native module is of {result.version}, the package of {result.installed_version}",
            f"{result.native_file}; {result.file}",
            "one of the two is a leftover of another installation: calls may not fit",
            reinstall,
            Fix("./dev setup", "in a checkout"),
        )
    else:
        yield ok("crossrail.version", f"crossrail {result.version}, the native module loads", result.native_file)


def _transport(host: Host, test: TransportTest) -> Finding:
    check = f"crossrail.{test.transport}"
    if test.state == "ok":
        rate = f"{test.gb_per_s:.1f} GB/s" if test.gb_per_s >= 1 else f"{test.gb_per_s:.2f} GB/s"
        title = f"{test.transport}: 1 MiB writes between two processes, {rate}"
        seen = "; ".join(("measured now, for 0.25 s, data compared", *test.ways, "`crossrail bench` measures properly"))
        if test.transport == "shm" and test.gb_per_s < _SLOW_GB_PER_S:
            fix = Fix("crossrail bench --quick", "measure properly, next to the machine's limits")
            return warning(check, title, seen, "copies in memory run at 10 GB/s and more on an idle machine", fix)
        return ok(check, title, seen)
    if not _is_for(test.transport, host):
        return note(check, f"{test.transport}: cannot be opened, for want of a device", test.detail)
    if test.state == "absent":
        names = listing([nic.name for nic in host.hardware.nics])
        cost = "bytes go another way than over these NICs"
        title = f"{test.transport}: not in this build, though there is {names}"
        return warning(check, title, test.detail, cost, _UPGRADE)
    title = f"{test.transport}: " + ("no end" if test.state == "unfinished" else "does not work")
    alone = f"{host.executable} -m crossrail.doctor.selftest {test.transport}"
    return error(
        check, title, test.detail, "no transfer goes this way", Fix(alone, "the test alone, with all it prints")
    )


def _is_for(transport: str, host: Host) -> bool:
    """Whether this machine has the transport's hardware. Without it the transport cannot open, which is no fault."""
    kinds = {nic.kind for nic in host.hardware.nics}
    if transport == "ofi":
        return "efa" in kinds
    return transport != "verbs" or bool(kinds - {"efa"})
