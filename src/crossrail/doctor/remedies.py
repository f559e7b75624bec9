"""Commands that many fixes need, adapted to this machine: its package manager, sudo or not, container or not."""

from __future__ import annotations

import re

from crossrail.doctor.finding import Fix
from crossrail.doctor.host import Host

_SYSCTL_FILE = "/etc/sysctl.d/90-crossrail.conf"
_APT = {"debian", "ubuntu"}


def sudo(host: Host, command: str) -> str:
    """The command as root runs it, or with sudo in front."""
    return command if host.uid == 0 else f"sudo {command}"


def distribution(host: Host) -> set[str]:
    """ID and ID_LIKE of os-release: {"ubuntu", "debian"}."""
    text = host.read("/etc/os-release") or ""
    return {
        word for match in re.finditer(r'^ID(?:_LIKE)?="?([a-z0-9._ -]+)"?$', text, re.M) for word in match[1].split()
    }


def install(host: Host, *, apt: str, dnf: str) -> Fix:
    """Packages of the distribution."""
    if distribution(host) & _APT:
        return Fix(sudo(host, f"apt-get install {apt}"))
    return Fix(sudo(host, f"dnf install {dnf}"))


def sysctl(host: Host, key: str, value: str) -> tuple[Fix, ...]:
    """Now, and for good."""
    if host.container and not key.startswith("net."):
        where = "on the host; a container cannot"
    else:
        where = "until the next boot"
    quoted = f"'{value}'" if " " in value else value
    line = f"{key} = {value}"
    return (
        Fix(sudo(host, f"sysctl -w {key}={quoted}"), where),
        Fix(f"echo '{line}' | {sudo(host, f'tee -a {_SYSCTL_FILE}')}", "for good"),
    )


def release(host: Host) -> tuple[str, float]:
    """("debian", 12.0); 0 when there is no number."""
    text = host.read("/etc/os-release") or ""
    name = re.search(r'^ID="?([a-z0-9._-]+)"?$', text, re.M)
    number = re.search(r'^VERSION_ID="?(\d{1,4}(?:\.\d{1,3})?)', text, re.M)
    return (name[1] if name else "", float(number[1]) if number else 0.0)


def size(nbytes: int | None) -> str:
    """8388608 -> "8 MiB"."""
    if nbytes is None:
        return "unlimited"
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.3g} TiB" if value < 1000 else f"{value:.0f} TiB"


def listing(names: list[str], most: int = 6) -> str:
    """ "a, b, c and 5 more"."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
