"""A trainer of toys in a process of its own, one of a gloo group: python -m tests.weights.gloo_trainer SPEC.

It says {"joined": true}, then does what lines of JSON tell it: {"barrier": seconds, "imm": number} waits there,
{"publish": version} trains and publishes. To each it says {"done": ...} or {"failed": why}. It ends when its standard
input does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import crossrail as xr
from crossrail._options import SECRET_VARIABLE
from crossrail.cli.weights.play import say
from crossrail.control.wire import EngineWire
from crossrail.weights.services.messages import mailbox
from crossrail.weights.services.trainer import WeightTrainer
from crossrail.weights.step.torch_barrier import TorchBarrier
from crossrail.weights.toy import ToyModel, ToyTrainer

PATIENCE_S = 100.0


async def play(spec: dict[str, Any]) -> None:
    rank, count = spec["rank"], spec["count"]
    store = dist.FileStore(spec["store"], count)
    patience = timedelta(seconds=PATIENCE_S)
    await asyncio.to_thread(dist.init_process_group, "gloo", store=store, rank=rank, world_size=count, timeout=patience)
    engine = xr.Engine(f"trainer-{rank}", transport="shm")
    wire = EngineWire(engine)
    box = mailbox(wire, os.environb[SECRET_VARIABLE.encode()])
    box.start()
    toy = ToyTrainer(ToyModel(**spec["model"]), engine, rank, count)
    make_barrier = TorchBarrier.of(None)
    trainer = WeightTrainer(box, toy.memory, make_barrier=make_barrier)
    toy.train(0)
    await trainer.join(bytes.fromhex(spec["controller"]), PATIENCE_S)
    say(joined=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        try:
            if "barrier" in order:
                others = [engine.address] * (count - 1)  # it only counts them
                await make_barrier(engine, others, order["imm"]).wait(order["barrier"])
            else:
                toy.train(order["publish"])
                await trainer.publish(order["publish"], PATIENCE_S)
        except xr.CrossrailError as error:
            say(failed=f"{type(error).__name__}: {error}")
        else:
            say(done=True)
    await trainer.close()
    toy.memory.close()
    await box.close()
    wire.close()
    engine.close()


if __name__ == "__main__":
    asyncio.run(play(json.loads(sys.argv[1])))
    os._exit(0)  # gloo's threads need not be waited for: a peer may have been killed
