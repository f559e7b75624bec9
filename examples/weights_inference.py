"""Infers with the weights that it has, while the next ones arrive beside them; weights_trainer.py sends them.

    $ export CROSSRAIL_SECRET=of-this-job    # in both shells
    $ python weights_inference.py 5841...
    version 1: outputs of size 0.40, after 1 batches
    version 2: outputs of size 1.02, after 104 batches
    ...

The trainer prints the command. Stop it with Ctrl-C.
"""

import asyncio
import contextlib
import sys
from contextlib import AsyncExitStack

import torch

from crossrail.weights import Reading, WeightMemory, WeightReceiver
from weights_trainer import SIZE, new_model, open_box


def infer(model: torch.nn.Module, reading: Reading, x: torch.Tensor) -> float:
    """A forward pass with the weights of one version, where they lie."""
    weights = {name: torch.from_numpy(reading.like(each.data)) for name, each in model.named_parameters()}
    with torch.no_grad():
        return float(torch.func.functional_call(model, weights, (x,)).mean())


async def main(stack: AsyncExitStack, controller: bytes) -> None:
    engine, box = await open_box(stack, "inference")
    model, x = new_model(), torch.randn(256, SIZE)
    memory = stack.enter_context(WeightMemory(engine, "target", 0))
    for name, parameter in model.named_parameters():
        memory.add(name, parameter.data)
    # spare: with twice the memory no reader waits for an update. Without it updates are in place, between readings.
    receiver = await stack.enter_async_context(WeightReceiver(box, memory, spare=True))
    await receiver.join(controller)
    await receiver.wait_version(1, timeout_s=60)

    version = batches = 0
    while True:
        async with receiver.reading() as reading:  # for one pass: the next update but one waits for it
            output = infer(model, reading, x)
            batches += 1
            if reading.version != version:
                print(f"version {reading.version}: outputs of size {output:.2f}, after {batches} batches", flush=True)
                version, batches = reading.version, 0
        await asyncio.sleep(0.001)  # until the next request


async def run(controller: bytes) -> None:
    async with AsyncExitStack() as stack:
        await main(stack, controller)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(bytes.fromhex(sys.argv[1])))
