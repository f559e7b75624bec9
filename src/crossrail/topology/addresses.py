"""This machine's topology, with the IP addresses of its net devices."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from crossrail.topology.model import Topology


def read_this_machine() -> Topology:
    """Any thread; takes milliseconds."""
    return Topology.read(addresses=interface_addresses())


def interface_addresses() -> dict[str, list[str]]:
    """IP addresses by net device, in this network namespace. Anything unreadable is left out."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):
        for name, ip in _ipv4_addresses():
            found.setdefault(name, []).append(ip)
    with contextlib.suppress(OSError):
        for name, ip in _ipv6_addresses():
            found.setdefault(name, []).append(ip)
    return found


def _ipv4_addresses() -> list[tuple[str, str]]:
    """SIOCGIFCONF, netdevice(7): an array of struct ifreq, each a name of 16 bytes and a union with a sockaddr_in."""
    import array
    import fcntl
    import socket
    import struct

    siocgifconf = 0x8912
    ifreq_bytes = 40 if struct.calcsize("P") == 8 else 32
    ifreqs = array.array("B", bytes(1024 * ifreq_bytes))
    ifconf = struct.pack("iP", len(ifreqs), ifreqs.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        nbytes, _ = struct.unpack("iP", fcntl.ioctl(sock, siocgifconf, ifconf))
    found = []
    for at in range(0, nbytes, ifreq_bytes):
        ifreq = ifreqs[at : at + ifreq_bytes].tobytes()
        label = os.fsdecode(ifreq[:16].partition(b"\0")[0])
        found.append((label.partition(":")[0], socket.inet_ntoa(ifreq[20:24])))  # "eth0:1" is on eth0
    return found


def _ipv6_addresses() -> list[tuple[str, str]]:
    """/proc/net/if_inet6, proc_net(5): address, index, prefix, scope and flags in hexadecimal, then the name.

    Without link-local ones: every net device has one, and the engine listens on none of them.
    """
    import socket

    scope_link = b"20"
    lines = [line.split() for line in Path("/proc/net/if_inet6").read_bytes().splitlines()]
    return [
        (os.fsdecode(words[5]), socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0].decode())))
        for words in lines
        if len(words) == 6 and words[3] != scope_link
    ]
