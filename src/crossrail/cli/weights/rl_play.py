"""One process of `crossrail weights rl`: a shard that trains, or an inference rank that generates.

It gets commands as lines of JSON on its standard input, answers likewise on its standard output, and ends when its
input does.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

import crossrail as xr
from crossrail.cli.weights.play import main, say
from crossrail.control.mailbox import Mailbox
from crossrail.weights.rl.task import CONFIG, Rollout
from crossrail.weights.services.reading import Reading
from crossrail.weights.services.receiver import WeightReceiver
from crossrail.weights.services.trainer import WeightTrainer

_TIMEOUT_S = 300.0  # our parent gives up before
_LINE_BYTES_MAX = 1 << 24


async def _play(spec: dict[str, Any], engine: xr.Engine, box: Mailbox) -> None:
    import torch

    torch.set_num_threads(1)  # all processes share this machine's cores
    await (_train if spec["role"] == "trainer" else _serve)(spec, engine, box)


async def _train(spec: dict[str, Any], engine: xr.Engine, box: Mailbox) -> None:
    from crossrail.weights.rl.policy import PolicyTrainer  # the others need no transformers

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, "train") as thread:  # collectives block, and the loop has to answer the controller
        policy = await loop.run_in_executor(
            thread, PolicyTrainer, spec["rank"], spec["count"], Path(spec["meeting"]), spec["seed"]
        )
        memory = policy.memory(engine)
        trainer = WeightTrainer(box, memory, tmp_bytes_max=16 << 20)
        try:
            await trainer.join(bytes.fromhex(spec["controller"]), _TIMEOUT_S)
            say(joined=True)
            async for told in _told():
                said = {}
                if told["rollouts"]:
                    rollouts = msgspec.convert(told["rollouts"], list[Rollout])
                    said = (await loop.run_in_executor(thread, policy.learn, rollouts))._asdict()
                await loop.run_in_executor(thread, policy.save, Path(told["checkpoint"]))
                say(ready=told["version"], **said)
                await trainer.publish(told["version"], _TIMEOUT_S)
        finally:
            await trainer.close()
            memory.close()
            await loop.run_in_executor(thread, policy.close)


async def _serve(spec: dict[str, Any], engine: xr.Engine, box: Mailbox) -> None:
    from crossrail.weights.rl.serving import Served

    served = Served(CONFIG, engine, spec["rank"], spec["tp"], spec["quantised"])
    # One kind is updated in place, the other while its old weights could still be used.
    receiver = WeightReceiver(box, served.memory, spare=spec["quantised"])
    try:
        await receiver.join(bytes.fromhex(spec["controller"]), _TIMEOUT_S)
        say(joined=True)
        async for told in _told():
            async with receiver.reading(_TIMEOUT_S) as reading:
                say(**await asyncio.to_thread(_generate, served, reading, told))
    finally:
        await receiver.close()
        served.close()


def _generate(served: Any, reading: Reading, told: dict[str, Any]) -> dict[str, Any]:
    import safetensors.torch

    from crossrail.weights.rl.conversion import converted, mismatches

    checkpoint = safetensors.torch.load_file(Path(told["checkpoint"]) / "model.safetensors")
    wanted = converted(checkpoint, CONFIG, served.tp, served.quantised)
    wrong = mismatches(wanted, served.tensors, reading.like)
    rollouts = served.policy(reading.like).rollouts(told["count"], told["seed"])
    return {
        "version": reading.version,
        "tensors": len(served.tensors),
        "wrong": wrong,
        "rollouts": msgspec.to_builtins(rollouts),
    }


async def _told() -> AsyncIterator[dict[str, Any]]:
    """The commands on our standard input, until it ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(_LINE_BYTES_MAX)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        while line := await reader.readline():
            yield json.loads(line)
    finally:
        transport.close()


if __name__ == "__main__":
    main(_play)
