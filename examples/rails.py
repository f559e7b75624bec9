"""Four rails over tcp, one of which is cut while it carries bytes: the others take over, and nothing counts twice.

    $ python rails.py
    before: 27% (broke 0 times), 26% (broke 0 times), 22% (broke 0 times), 25% (broke 0 times)
    rail 2 is cut: 1 connections, with writes under way
    after: 28% (broke 0 times), 26% (broke 0 times), 20% (broke 1 times), 26% (broke 0 times)
    64 writes arrived, each once, and all bytes are right

Rails are network interfaces; on one host, addresses of loopback do. What is cut are connections. To see a rail that
stays away, take an interface down (`ip link set eth1 down`): it is used again as soon as it is back.
"""

import multiprocessing as mp
import os
import socket
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

import crossrail as xr
from crossrail.observe import read_traffic

RAILS = ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"]
WRITES, NBYTES, IMM, CUT = 64, 4 << 20, 7, 2


def receive(pipe: Connection) -> None:
    with xr.Engine("receiver", transport="tcp", rails=RAILS) as engine:
        pool = engine.alloc(WRITES * NBYTES)
        pipe.send(bytes(pool.descriptor))
        counter = engine.imm_counter(IMM)
        counter.wait(WRITES, timeout_s=60)
        pipe.recv()  # until all of the sender's writes have ended
        assert counter.poll() == 0, "something counted twice"
        assert (pool.array("uint32").reshape(WRITES, -1) == np.arange(WRITES)[:, None]).all()
        print(f"{WRITES} writes arrived, each once, and all bytes are right")


def cut(ip: str) -> int:
    """Ends the connections of this process that use this address, as if the network had. How many there were."""
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        try:
            with socket.socket(fileno=os.dup(int(fd.name))) as same:
                if same.family == socket.AF_INET and same.getpeername()[0] == ip:
                    same.shutdown(socket.SHUT_RDWR)
                    found += 1
        except OSError:  # no socket, or not connected
            continue
    return found


def shares(engine: xr.Engine) -> str:
    """Of all bytes so far, by rail, and how often each broke."""
    counts = [rail.counts for rail in read_traffic(engine).rails]
    total = sum(each.bytes for each in counts)
    return ", ".join(f"{each.bytes / total:.0%} (broke {each.broken} times)" for each in counts)


if __name__ == "__main__":
    ours, theirs = mp.Pipe()
    process = mp.get_context("spawn").Process(target=receive, args=(theirs,), daemon=True)
    process.start()
    with xr.Engine("sender", transport="tcp", rails=RAILS) as engine:
        source = engine.register(np.repeat(np.arange(WRITES, dtype=np.uint32), NBYTES // 4))
        target = xr.RegionDescriptor.from_bytes(ours.recv())

        def write(i: int) -> xr.Transfer:
            at = i * NBYTES
            return engine.submit_write(source, target, NBYTES, src_offset=at, dst_offset=at, imm=IMM)

        transfers = [write(i) for i in range(WRITES // 2)]
        transfers[WRITES // 4].wait(timeout_s=60)
        print("before:", shares(engine))
        print(f"rail {CUT} is cut: {cut(RAILS[CUT])} connections, with writes under way")
        transfers += [write(i) for i in range(WRITES // 2, WRITES)]
        for transfer in transfers:
            transfer.wait(timeout_s=60)
        print("after:", shares(engine), flush=True)
        ours.send("all have ended")
        process.join()
    raise SystemExit(process.exitcode)
