"""A trainer in torch: sends the weights of every tenth step to whoever infers with them, and who goes on meanwhile.

    $ export CROSSRAIL_SECRET=of-this-job    # in both shells
    $ python weights_trainer.py
    run: python weights_inference.py 5841...
    version 1: loss 26.91, 67588 bytes in 2.4 ms
    ...

Run the command that it prints in a second shell. With more trainers each adds its own shard, and one of them, or a
process of its own, has the controller.
"""

import asyncio
import os
from contextlib import AsyncExitStack

import torch

import crossrail as xr
from crossrail.control.mailbox import Mailbox
from crossrail.control.wire import EngineWire
from crossrail.weights import WeightController, WeightMemory, WeightTrainer, messages

VERSIONS, STEPS, SIZE = 5, 10, 64


def new_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(SIZE, 4 * SIZE), torch.nn.ReLU(), torch.nn.Linear(4 * SIZE, 1))


async def open_box(stack: AsyncExitStack, name: str) -> tuple[xr.Engine, Mailbox]:
    """An engine, and how services talk over it."""
    engine = await stack.enter_async_context(xr.Engine(name))
    box = messages.mailbox(EngineWire(engine), os.environ["CROSSRAIL_SECRET"].encode())
    box.start()
    return engine, await stack.enter_async_context(box)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    for _ in range(STEPS):
        x = torch.randn(256, SIZE)
        loss = torch.nn.functional.mse_loss(model(x)[:, 0], x.square().sum(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


async def main(stack: AsyncExitStack) -> None:
    _, box = await open_box(stack, "controller")  # it says when an update begins and ends; no weights pass through it
    controller = WeightController(box)
    engine, box = await open_box(stack, "trainer")
    model = new_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # changes weights in place
    memory = stack.enter_context(WeightMemory(engine, "trainer", 0))
    for name, parameter in model.named_parameters():
        memory.add(name, parameter.data)  # sent from where it is, and where it has to stay
    trainer = await stack.enter_async_context(WeightTrainer(box, memory))
    await trainer.join(controller.address)
    print("run: python weights_inference.py", controller.address.hex(), flush=True)
    await controller.ready(trainers=[0], targets=[0], timeout_s=600)

    for version in range(1, VERSIONS + 1):
        loss = train(model, optimizer)
        update = asyncio.create_task(controller.update(version, timeout_s=60))
        await trainer.publish(version)  # until all have it: weights must not change before
        report = await update
        print(f"version {version}: loss {loss:.2f}, {report.written_bytes} bytes in {report.transfer_s * 1e3:.1f} ms")


async def run() -> None:
    async with AsyncExitStack() as stack:
        await main(stack)


if __name__ == "__main__":
    asyncio.run(run())
