"""asyncio with deadlines and cancellation: what is late ends, and its memory is yours again.

    $ python deadlines.py
    in time: 64 done
    the client went away: 3 done, 61 cancelled
    no answer: 0 of 1 arrived
    the peer stands still: 3 peer-lost, 61 cancelled
    it goes on: 64 done

Each line is a batch of writes to another process. It is stopped for a while, as by a debugger.
"""

import asyncio
import contextlib
import multiprocessing as mp
import os
import signal
from collections import Counter
from multiprocessing.connection import Connection

import crossrail as xr

WRITES, NBYTES, ANSWER = 64, 4 << 20, 8
NETWORK = ["127.0.0.1"]  # over tcp: into memory that we share we would write although its owner stands still


def peer(pipe: Connection) -> None:
    with xr.Engine("peer", transport="tcp", rails=NETWORK) as engine:
        pool = engine.alloc(NBYTES)
        pipe.send(bytes(pool.descriptor))
        pipe.recv()  # until the other side has ended


async def settled(transfer: xr.Transfer) -> str:
    """done, cancelled, peer-lost ..."""
    with contextlib.suppress(xr.TransferError):  # which says why, and how far it came
        await transfer
    return transfer.status


async def push(what: str, engine: xr.Engine, target: xr.RegionDescriptor, timeout_s: float) -> None:
    """Writes; those that have not ended in time, or when this task is cancelled, are cancelled.

    It ends when nothing touches the source any more. What the peer has begun to take in, it ends first; if it stands
    still there, the engine's peer_timeout_s bounds that.
    """
    source = engine.alloc(NBYTES)
    transfers = [engine.submit_write(source, target) for _ in range(WRITES)]
    ends = asyncio.gather(*map(settled, transfers))
    try:
        await asyncio.wait([ends], timeout=timeout_s)
    finally:
        for transfer in transfers:
            transfer.cancel()  # what is done stays done
        statuses = Counter(await ends)
        print(f"{what}:", ", ".join(f"{count} {status}" for status, count in statuses.items()), flush=True)


async def main(descriptor: bytes, pid: int) -> None:
    target = xr.RegionDescriptor.from_bytes(descriptor)
    with xr.Engine("asker", transport="tcp", rails=NETWORK, peer_timeout_s=1) as engine:
        await push("in time", engine, target, 30)

        task = asyncio.create_task(push("the client went away", engine, target, 30))
        await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.wait([task])

        try:
            await engine.imm_counter(ANSWER).wait_async(1, timeout_s=0.2)
        except xr.WaitTimeout as error:
            print(f"no answer: {error.arrived} of {error.expected} arrived", flush=True)  # its text says where to look

        os.kill(pid, signal.SIGSTOP)
        try:
            await push("the peer stands still", engine, target, 0.2)
        finally:
            os.kill(pid, signal.SIGCONT)
        engine.forget_peer(target.owner)  # it was given up; from here on it is a peer as any other
        await push("it goes on", engine, target, 30)


if __name__ == "__main__":
    ours, theirs = mp.Pipe()
    process = mp.get_context("spawn").Process(target=peer, args=(theirs,), daemon=True)
    process.start()
    asyncio.run(main(ours.recv(), process.pid or 0))
    ours.send("we have ended")
    process.join()
    raise SystemExit(process.exitcode)
