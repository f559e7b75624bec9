"""`crossrail weights load`: a checkpoint on disk reaches inference ranks of other processes, bit for bit."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import crossrail as xr
from crossrail._options import SECRET_VARIABLE
from crossrail.cli.weights import commands
from crossrail.cli.weights.players import Player, Players
from crossrail.control.wire import EngineWire
from crossrail.weights import WeightReceiver, messages
from crossrail.weights.inventory import checkpoint
from crossrail.weights.toy import ToyModel, ToyTarget, weights
from tests.weights.safetensors_file import write

pytestmark = pytest.mark.no_sanitizer  # starts an interpreter for each reader and each rank

SECRET = "of these tests"
PATIENCE_S = 100.0
MODEL = ToyModel(layers=1, hidden=128, intermediate=128, experts=2, vocabulary=256)
VERSION = 3


async def start_load(*arguments: object, secret: str = SECRET) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "crossrail", "weights", "load", *map(str, arguments),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=os.environ | {SECRET_VARIABLE: secret},
    )  # fmt: skip


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    return process.returncode, out.decode(), err.decode()


def save(folder: Path) -> None:
    """In two files, with a tensor that no rank wants."""
    tensors = {name: weights(name, shape, VERSION) for name, shape in MODEL.shapes().items()}
    names = sorted(tensors)
    write(folder / "a.safetensors", {name: tensors[name] for name in names[::2]})
    rest = {name: tensors[name] for name in names[1::2]}
    write(folder / "b.safetensors", rest | {"mtp.extra": np.zeros(8, np.uint16)})


@pytest.mark.timeout(150)
@pytest.mark.parametrize("readers", [1, 2])
async def test_ranks_have_the_checkpoint(tmp_path: Path, readers: int) -> None:
    save(tmp_path)
    told = tmp_path / "controller"
    common = (tmp_path, "--ignore", "mtp.*", "--version", VERSION, "--transport", "shm")
    players = Players(SECRET)
    lead = await start_load(*common, "--targets", 2, "--reader", f"0/{readers}", "--address-file", told)
    loads = [lead]
    try:
        while not told.exists():
            assert lead.returncode is None, await ended(lead)
            await asyncio.sleep(0.05)
        for index in range(1, readers):
            loads.append(await start_load(*common, "--reader", f"{index}/{readers}", "--controller", told))
        address = told.read_text().strip()
        ranks = [
            Player("target", rank, MODEL, address, VERSION, VERSION, kind=kind, transport="shm")
            for rank, kind in enumerate(("fused", "fp8"))
        ]
        await asyncio.gather(*(players.start(rank) for rank in ranks))
        outcomes = await asyncio.gather(*map(ended, loads))
        for rank in ranks:
            said = await players.said(rank.name, "version", PATIENCE_S)
            assert (said["version"], said["wrong"]) == (VERSION, [])
    finally:
        for load in loads:
            if load.returncode is None:
                load.kill()
                await load.wait()
        await players.close()
    assert [code for code, _, _ in outcomes] == [0] * readers, outcomes
    assert f"ok: version {VERSION} is at 2 inference ranks" in outcomes[0][1]
    assert not told.exists()


@pytest.mark.timeout(150)
async def test_rank_that_died_before_the_last_one_came_is_named(tmp_path: Path) -> None:
    save(tmp_path)
    told = tmp_path / "controller"
    players = Players(SECRET)
    load = await start_load(
        tmp_path,
        "--ignore",
        "mtp.*",
        "--version",
        VERSION,
        "--transport",
        "shm",
        "--targets",
        2,
        "--address-file",
        told,
    )
    try:
        while not told.exists():
            assert load.returncode is None, await ended(load)
            await asyncio.sleep(0.05)
        dies, stays = (
            Player("target", rank, MODEL, told.read_text().strip(), VERSION, VERSION, kind="fused", transport="shm")
            for rank in range(2)
        )
        await players.start(dies)
        await players.kill(dies.name)
        await players.start(stays)
        code, _, err = await ended(load)
    finally:
        if load.returncode is None:
            load.kill()
            await load.wait()
        await players.close()
    assert (code, "may not be at inference rank 0" in err) == (1, True), err


async def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    save(tmp_path)
    code, out, err = await ended(await start_load(tmp_path, "--targets", 2, "--wait-s", 0.5, "--transport", "shm"))
    assert code == 1
    assert "controller: " in out
    assert "not there within 0.5 s: inference rank 0, inference rank 1" in err


async def test_needs_a_secret_and_an_address_that_fit(tmp_path: Path) -> None:
    save(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # or /dev/null, which would be gone
    cases = {
        "a secret that all nodes share is needed": await start_load(tmp_path, secret=""),
        "the others need its address": await start_load(tmp_path, "--reader", "1/2"),
        "is not an index and a number": await start_load(tmp_path, "--reader", "2/2"),
        "with at most 65536 readers": await start_load(tmp_path, "--reader", "0/300000000000"),
        "300000000000 is not in the range": await start_load(tmp_path, "--targets", "300000000000"),
        "there is no folder": await start_load(tmp_path, "--address-file", tmp_path / "none" / "controller"),
        "a device or a pipe, must be a file": await start_load(tmp_path, "--address-file", pipe, "--wait-s", 0.5),
        "no tensor of the checkpoint is left": await start_load(tmp_path, "--ignore", "*"),
    }
    for why, process in cases.items():
        code, _, err = await ended(process)
        assert (code, why in err) == (2, True), err
    assert pipe.is_fifo()


@pytest.mark.timeout(150)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
async def test_update_of_a_load_that_is_ended_is_aborted(tmp_path: Path, number: signal.Signals) -> None:
    save(tmp_path)
    told = tmp_path / "controller"
    load = await start_load(tmp_path, "--ignore", "mtp.*", "--transport", "shm", "--address-file", told)
    engine = xr.Engine("rank", transport="shm")
    wire = EngineWire(engine)
    box = messages.mailbox(wire, SECRET.encode())
    box.start()
    target = ToyTarget(MODEL, engine, 0, "plain")
    is_paused, goes_on = asyncio.Event(), asyncio.Event()

    async def pause(_version: int) -> None:
        is_paused.set()
        await goes_on.wait()

    receiver = WeightReceiver(box, target.memory, pause=pause)
    try:
        while not told.exists():
            assert load.returncode is None, await ended(load)
            await asyncio.sleep(0.05)
        await receiver.join(bytes.fromhex(told.read_text()), PATIENCE_S)
        await asyncio.wait_for(is_paused.wait(), PATIENCE_S)
        load.send_signal(number)
        with pytest.raises(xr.CrossrailError, match="the update was cancelled"):
            await receiver.receive(VERSION, PATIENCE_S, failures=0)
        goes_on.set()
        code, _, err = await ended(load)
        assert (code, told.exists()) == (128 + number, False), err
    finally:
        if load.returncode is None:
            load.kill()
            await load.wait()
        goes_on.set()
        await receiver.close()
        await box.close()
        wire.close()
        target.memory.close()
        engine.close()


@pytest.mark.timeout(150)
async def test_tensor_of_an_unknown_type_is_named_and_may_be_ignored(tmp_path: Path) -> None:
    save(tmp_path)
    write(tmp_path / "c.safetensors", {"mtp.packed": np.zeros(4, np.uint16)}, dtype="F4", shape=[16])
    code, _, err = await ended(await start_load(tmp_path))
    assert (code, "'mtp.packed' is of F4" in " ".join(err.split())) == (2, True), err
    code, _, err = await ended(await start_load(tmp_path, "--ignore", "mtp.*", "--wait-s", 0.5, "--transport", "shm"))
    assert (code, "not there within 0.5 s: inference rank 0" in err) == (1, True), err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
async def test_address_file_goes_with_a_load_that_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    save(tmp_path)
    told = tmp_path / "controller"
    load = await start_load(tmp_path, "--ignore", "mtp.*", "--transport", "shm", "--address-file", told)
    try:
        while not told.exists():
            assert load.returncode is None, await ended(load)
            await asyncio.sleep(0.05)
        load.send_signal(number)
        code, _, err = await ended(load)
    finally:
        if load.returncode is None:
            load.kill()
            await load.wait()
    assert code == 128 + number
    assert ("interrupted" if number is signal.SIGINT else f"ended by {number.name}") in err
    assert not told.exists()


def test_option_knows_as_many_readers_as_a_checkpoint() -> None:
    assert commands.READERS_MAX == checkpoint.READERS_MAX
