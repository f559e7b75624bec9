"""What joins a `crossrail weights load --targets 8`: a process with all of them. Argument: its address file."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import numpy as np

import crossrail as xr
from crossrail.control.wire import EngineWire
from crossrail.weights import WeightMemory, WeightReceiver, messages

RANKS = 8


async def main(controller: bytes) -> None:
    receivers = []
    for rank in range(RANKS):
        engine = xr.Engine(f"rank-{rank}")
        box = messages.mailbox(EngineWire(engine), os.environ["CROSSRAIL_SECRET"].encode())
        box.start()
        memory = WeightMemory(engine, "target", rank)
        memory.add("w", np.zeros(64, np.uint16), dtype="bfloat16")
        receivers.append(WeightReceiver(box, memory))
    await asyncio.gather(*(receiver.join(controller) for receiver in receivers))
    # Until it is ended: a rank that leaves while its answer is on the way would be taken for lost.
    await asyncio.Event().wait()


asyncio.run(main(bytes.fromhex(Path(sys.argv[1]).read_text())))
