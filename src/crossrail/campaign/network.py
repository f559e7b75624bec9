"""A network namespace for the campaign, whose rails can be taken down. Needs root and a kernel that allows it."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
from typing import Any

RAILS = 2
_CLONE_NEWNET = 0x40000000
_IP_LIMIT_S = 30


class Network:
    """Where tcp rails are. Without the right to create a namespace they are loopback addresses, which never go down.

    Used for shm too: engines in different network namespaces would not meet.
    """

    def __init__(self) -> None:
        self.addresses = [f"127.0.0.{1 + rail}" for rail in range(RAILS)]
        self.can_go_down = os.geteuid() == 0 and shutil.which("ip") is not None and _enter_own_namespace()
        if not self.can_go_down:
            return
        self.addresses = [f"10.{77 + rail}.0.1" for rail in range(RAILS)]
        _ip("link", "set", "lo", "up")
        for rail, address in enumerate(self.addresses):
            _ip("link", "add", f"rail{rail}", "type", "veth", "peer", "name", f"far{rail}")
            _ip("address", "add", f"{address}/24", "dev", f"rail{rail}")
            _ip("link", "set", f"far{rail}", "up")
            _ip("link", "set", f"rail{rail}", "up")

    def engine_options(self, transport: str, draw: random.Random) -> dict[str, Any]:
        """Options of an engine over this transport. A death or a cut rail is noticed within seconds."""
        common: dict[str, Any] = {"transport": transport, "heartbeat_s": 0.5, "connect_timeout_s": 5.0}
        if transport == "tcp":
            return common | {"rails": self.addresses, "peer_timeout_s": 3.0}
        return common | {"rails": RAILS, "private_path": draw.choice(["auto", "staged", "cma"])}

    def set_rail(self, rail: int, state: str) -> None:
        """state: "up", or "down": then its address is nowhere, and what is on the way to it is lost in silence."""
        _ip("link", "set", f"rail{rail}", state)


def _enter_own_namespace() -> bool:
    """For the rest of this process's life, and for its children. False if that is not allowed."""
    return bool(ctypes.CDLL(None).unshare(_CLONE_NEWNET) == 0)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=_IP_LIMIT_S, stdin=subprocess.DEVNULL)
