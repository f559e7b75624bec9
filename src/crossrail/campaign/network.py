"""A network namespace for the campaign, whose rails can be taken down. Needs root and a kernel that allows it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess

_CLONE_NEWNET = 0x40000000
_IP_LIMIT_S = 30


class Network:
    """Where rails of tcp are. Without the rights for a namespace they are loopback addresses, which never go down."""

    def __init__(self, rails: int) -> None:
        self.addresses = [f"127.0.0.{1 + rail}" for rail in range(rails)]
        self.can_go_down = os.geteuid() == 0 and shutil.which("ip") is not None and _enter_own_namespace()
        if not self.can_go_down:
            return
        self.addresses = [f"10.{77 + rail}.0.1" for rail in range(rails)]
        _ip("link", "set", "lo", "up")
        for rail, address in enumerate(self.addresses):
            _ip("link", "add", f"rail{rail}", "type", "veth", "peer", "name", f"far{rail}")
            _ip("address", "add", f"{address}/24", "dev", f"rail{rail}")
            _ip("link", "set", f"far{rail}", "up")
            _ip("link", "set", f"rail{rail}", "up")

    def set_rail(self, rail: int, state: str) -> None:
        """state: "up", or "down": then its address is nowhere, and what is on the way to it is lost in silence."""
        _ip("link", "set", f"rail{rail}", state)


def _enter_own_namespace() -> bool:
    """For the rest of this process's life, and for its children. False where that is not allowed."""
    return bool(ctypes.CDLL(None).unshare(_CLONE_NEWNET) == 0)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=_IP_LIMIT_S, stdin=subprocess.DEVNULL)
