"""A long and lossy cable between two netdevs: `python -m tests.support.cable DELAY_MS LOSS MTU SEED NETDEV NETDEV`.

Forwards whole packets between them until it is killed, each after DELAY_MS. It silently drops a share LOSS of them, and
those of more than MTU bytes. The kernel's netem could lose and delay, too; many kernels are built without it.
"""

import ctypes
import random
import select
import signal
import socket
import sys
import time
from collections import deque

ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_VNET_HDR = 15  # packets travel with what checksums and cuts they still lack
PACKET_OUTGOING = 4
PR_SET_PDEATHSIG = 1
PACKET_BYTES_MAX = 1 << 17
HEAD_BYTES = 10 + 14  # of what the kernel says of a packet, and of Ethernet


class End:
    def __init__(self, netdev: str) -> None:
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self.socket.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self.socket.bind((netdev, ETH_P_ALL))
        self.socket.setblocking(False)
        self.due: deque[tuple[float, bytes]] = deque()  # packets to send here, and when

    def receive(self) -> list[bytes]:
        packets = []
        while True:
            try:
                packet, address = self.socket.recvfrom(PACKET_BYTES_MAX)
            except BlockingIOError:
                return packets
            except OSError:  # the link is down
                return packets
            if address[2] != PACKET_OUTGOING:
                packets.append(packet)

    def send_due(self, now: float) -> None:
        while self.due and self.due[0][0] <= now:
            try:
                self.socket.send(self.due.popleft()[1])
            except OSError:  # the link is down, or full: lost
                pass


def relay(delay_s: float, loss: float, mtu: int, seed: int, ends: tuple[End, End]) -> None:
    chance = random.Random(seed)
    while True:
        now = time.monotonic()
        wait_s = min((end.due[0][0] - now for end in ends if end.due), default=1.0)
        select.select([end.socket for end in ends], [], [], max(wait_s, 0))
        now = time.monotonic()
        for end, other in (ends, ends[::-1]):
            packets = [packet for packet in end.receive() if len(packet) - HEAD_BYTES <= mtu]
            other.due.extend((now + delay_s, packet) for packet in packets if chance.random() >= loss)
            end.send_due(now)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # never outlive the tests
    delay_ms, loss, mtu, seed, one, two = sys.argv[1:]
    ends = (End(one), End(two))
    print("ready", flush=True)
    relay(float(delay_ms) / 1000, float(loss), int(mtu), int(seed), ends)


if __name__ == "__main__":
    main()
