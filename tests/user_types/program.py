"""A program as a user writes it, never run: it has to pass `mypy --strict`, in ./dev check and against the built wheel.

What is wrong has a `type: ignore`, which is an error where nothing is ignored.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import crossrail as xr
from crossrail.topology import RailChoice, Topology, choose_rails


def transfers(engine: xr.Engine, target: xr.RegionDescriptor) -> int:
    region = engine.register(np.zeros(1 << 20, np.uint8))
    assert_type(region, xr.Region)
    transfer = engine.submit_write(region, target, imm=7)
    assert_type(transfer, xr.Transfer)
    transfer.wait(timeout_s=10)
    assert_type(transfer.done, bool)
    pages = np.arange(16)
    engine.submit_paged_writes(region, pages, target, pages, 4096, imm=7).wait(10)
    engine.submit_read(region, target).wait(10)
    assert_type(bytes(region.descriptor), bytes)
    return transfer.nbytes


def counts(engine: xr.Engine) -> None:
    counter = engine.imm_counter(7)
    assert_type(counter, xr.ImmCounter)
    counter.wait(16, timeout_s=10)
    assert_type(counter.poll(), int)
    with engine.submit_recvs(16, 256) as pool:
        assert_type(pool, xr.ReceivePool)


async def coroutine(engine: xr.Engine, target: xr.RegionDescriptor) -> None:
    region = engine.alloc(4096)
    await engine.submit_write(region, target, imm=1)
    await engine.imm_counter(1).wait_async(1, timeout_s=10)


def arrays(engine: xr.Engine) -> npt.NDArray[np.float32]:
    view: npt.NDArray[np.float32] = engine.alloc(4096).array("float32")
    return view


def failures(engine: xr.Engine, peer: xr.Address, transfer: xr.Transfer) -> str:
    try:
        transfer.wait(timeout_s=1)
    except xr.PeerLost as error:
        assert_type(error.peer, str)
        assert_type(error.error_code, str)
        return error.docs
    except xr.WaitTimeout as error:
        return f"{error.arrived} of {error.expected}"
    return str(engine.explain(peer))


def life() -> None:
    with xr.Engine("user", rails=2, transport="tcp") as engine:
        assert_type(engine.address, xr.Address)


async def asynchronous_life() -> None:
    async with xr.Engine("user") as engine:
        assert_type(engine, xr.Engine)


def mistakes(engine: xr.Engine, region: xr.Region) -> None:
    engine.submit_write(region, "descriptor")  # type: ignore[arg-type]
    engine.imm_counter("7")  # type: ignore[arg-type]
    engine.submit_write(region, region.descriptor, immediate=7)  # type: ignore[call-arg]
    xr.Engine("user", rails=2.5)  # type: ignore[arg-type]


def topology() -> RailChoice:
    return choose_rails(Topology.read(), "gpu0", limit=4)
