"""One process of `crossrail weights demo` and `bench`: a trainer, or an inference rank that checks what it gets.

It says what it does as lines of JSON on its standard output, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import crossrail as xr
from crossrail._options import SECRET_VARIABLE
from crossrail._parent import end_with_parent
from crossrail.cli.text import said_of
from crossrail.cli.weights.common import opened_mailbox
from crossrail.control.mailbox import Mailbox
from crossrail.errors import CrossrailError
from crossrail.weights.errors import UpdateFailed
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.services.receiver import WeightReceiver
from crossrail.weights.services.trainer import WeightTrainer
from crossrail.weights.toy import ToyModel, ToyTarget, ToyTrainer

_ROLE_TIMEOUT_S = 600.0  # our parent gives up before, and then our input ends


def say(**words: Any) -> None:
    """Prints one line for our parent process."""
    print(json.dumps(words), flush=True)


def main(play: Callable[[dict[str, Any], xr.Engine, Mailbox], Coroutine[Any, Any, None]]) -> None:
    """The main of such a process, whose argument is what is to be played, as JSON."""
    end_with_parent()
    logging.getLogger("crossrail").setLevel(logging.ERROR)  # our parent says what became of a peer
    try:
        asyncio.run(_play(play, json.loads(sys.argv[1])))
    except CrossrailError as error:
        sys.exit(said_of(error))


async def _play(play: Callable[[dict[str, Any], xr.Engine, Mailbox], Coroutine[Any, Any, None]], spec: Any) -> None:
    name, secret = f"{spec['role']}-{spec['rank']}", os.environb[SECRET_VARIABLE.encode()]
    async with opened_mailbox(name, secret, transport=spec["transport"]) as (engine, box):
        await play(spec, engine, box)


async def _play_toy(spec: dict[str, Any], engine: xr.Engine, box: Mailbox) -> None:
    working = asyncio.ensure_future((_train if spec["role"] == "trainer" else _look)(spec, engine, box))
    ended = asyncio.ensure_future(_stdin_closed())
    try:
        await asyncio.wait([working, ended], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        await ended
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def _train(spec: dict[str, Any], engine: xr.Engine, box: Mailbox) -> None:
    player = ToyTrainer(ToyModel(**spec["model"]), engine, spec["rank"], spec["count"])
    trainer = WeightTrainer(box, player.memory, spec["tmp_bytes_max"])
    try:
        player.train(spec["first"])
        await trainer.join(bytes.fromhex(spec["controller"]), _ROLE_TIMEOUT_S)
        say(joined=True)
        version = spec["first"]
        while version <= spec["last"]:
            if spec["checks"]:
                player.train(version)
            try:
                await trainer.publish(version, _ROLE_TIMEOUT_S)
                version += 1
            except UpdateFailed as error:
                say(failed=str(error))
    finally:
        await trainer.close()
        _close(player.memory)


async def _look(spec: dict[str, Any], engine: xr.Engine, box: Mailbox) -> None:
    player = ToyTarget(ToyModel(**spec["model"]), engine, spec["rank"], spec["kind"])
    receiver = WeightReceiver(box, player.memory, spare=spec["spare"])
    try:
        await receiver.join(bytes.fromhex(spec["controller"]), _ROLE_TIMEOUT_S)
        say(joined=True)
        for version in range(spec["first"], spec["last"] + 1):
            await receiver.wait_version(version, _ROLE_TIMEOUT_S)
            if not spec["checks"]:
                continue
            async with receiver.reading() as reading:
                begun = time.perf_counter()
                wrong = list(player.mismatches(reading.version, reading.like))
                say(version=reading.version, wrong=wrong, seconds=time.perf_counter() - begun)
    finally:
        await receiver.close()
        _close(player.memory)


def _close(memory: WeightMemory) -> None:
    memory.close()
    for region in memory.regions:
        region.close()


async def _stdin_closed() -> None:
    loop = asyncio.get_running_loop()
    closed = loop.create_future()

    def read() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            closed.set_result(None)

    loop.add_reader(0, read)
    await closed


if __name__ == "__main__":
    main(_play_toy)
