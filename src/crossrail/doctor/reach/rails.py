"""The addresses of this machine that others could reach, with the interface of each."""

from __future__ import annotations

import re
import socket
import struct
from dataclasses import dataclass
from ipaddress import ip_address

from crossrail.doctor.hardware import Interface
from crossrail.doctor.host import Host

_RTM_GETADDR, _RTM_NEWADDR, _NLMSG_DONE, _NLMSG_ERROR = 22, 20, 3, 2
_NLM_F_REQUEST, _NLM_F_DUMP = 0x1, 0x300
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_HEADER = struct.Struct("=IHHII")
_ADDRESS_HEADER = struct.Struct("=BBBBI")
_ATTRIBUTE = struct.Struct("=HH")
_DEADLINE_S = 2.0
_RECEIVE_BYTES = 1 << 16
_RAILS_MAX = 16
# Bridges and pairs of container engines: addresses of this machine to itself. docker's are br- and twelve digits; br-ex
# is a node's own with Open vSwitch.
_INTERNAL = re.compile("(lo|docker|br-[0-9a-f]{12}$|virbr|veth|cni|cali|flannel|cilium|lxc|kube|podman)")


@dataclass(frozen=True)
class Rail:
    """One address. mbit_per_s: None when the driver does not say."""

    interface: str
    address: str
    mtu: int
    mbit_per_s: int | None

    @property
    def is_loopback(self) -> bool:
        """127/8, ::1."""
        return ip_address(self.address).is_loopback

    @property
    def is_ipv6(self) -> bool:
        """Which of both."""
        return ip_address(self.address).version == 6

    def __str__(self) -> str:
        return f"{self.interface} {self.address}"


def local_rails(host: Host, *, loopback: bool = False) -> list[Rail]:
    """Addresses of interfaces that are up, except link-local ones; loopback: only the loopback addresses."""
    interfaces = {interface.name: interface for interface in host.hardware.interfaces}
    rails = []
    for name, address in _addresses():
        parsed = ip_address(address)
        if parsed.is_link_local or parsed.is_loopback != loopback or (_INTERNAL.match(name) and not loopback):
            continue
        interface = interfaces.get(name, Interface(name, False, True, 65536, None, ""))
        rails.append(Rail(name, address, interface.mtu, interface.mbit_per_s))
    return rails[:_RAILS_MAX]


def _addresses() -> list[tuple[str, str]]:
    """(interface, address) of all, as rtnetlink(7) lists them."""
    found: list[tuple[str, str]] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(_DEADLINE_S)
        kernel.bind((0, 0))
        request = _ADDRESS_HEADER.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        size = _HEADER.size + len(request)
        kernel.send(_HEADER.pack(size, _RTM_GETADDR, _NLM_F_REQUEST | _NLM_F_DUMP, 1, 0) + request)
        while True:
            data = kernel.recv(_RECEIVE_BYTES)
            while len(data) >= _HEADER.size:
                length, kind, *_ = _HEADER.unpack_from(data)
                if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < _HEADER.size:
                    return found
                if kind == _RTM_NEWADDR:
                    found += _address(data[_HEADER.size : length])
                data = data[length + 3 & ~3 :]


def _address(message: bytes) -> list[tuple[str, str]]:
    family, _, _, _, index = _ADDRESS_HEADER.unpack_from(message)
    if family not in (socket.AF_INET, socket.AF_INET6):
        return []
    values: dict[int, bytes] = {}
    rest = message[_ADDRESS_HEADER.size :]
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        if length < _ATTRIBUTE.size:
            break
        values[kind] = rest[_ATTRIBUTE.size : length]
        rest = rest[length + 3 & ~3 :]
    packed = values.get(_IFA_LOCAL, values.get(_IFA_ADDRESS, b""))  # of a tunnel, ADDRESS is the other end
    try:
        return [(socket.if_indextoname(index), socket.inet_ntop(family, packed))]
    except (OSError, ValueError):
        return []
