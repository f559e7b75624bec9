"""Your own code on simulated hosts: `pytest` runs this in milliseconds, `pytest --sim-runs 200` with 200 seeds."""

import asyncio
from collections.abc import Callable

import crossrail as xr
from crossrail.sim import World


async def push(sender: xr.Engine, source: xr.Region, target: Callable[[], xr.RegionDescriptor], imm: int) -> None:
    """Your own code: tries again if the peer was lost."""
    while True:
        try:
            return await sender.submit_write(source, target(), imm=imm)
        except xr.PeerLost:
            sender.forget_peer(target().owner)
            await asyncio.sleep(0.1)


async def test_push_survives_a_restart(sim_world: World) -> None:
    home = sim_world.host("decode")
    decoder = home.engine("decoder")
    region = decoder.alloc(1 << 20)
    sender = sim_world.host("prefill").engine("prefill", peer_timeout_s=2)
    source = sender.alloc(1 << 20)

    sim_world.kill(decoder)
    pushing = asyncio.create_task(push(sender, source, lambda: region.descriptor, 7))
    await asyncio.sleep(5)  # virtual time, which costs no real time

    decoder = home.engine("decoder")
    region = decoder.alloc(1 << 20)
    await decoder.imm_counter(7).wait_async(1, timeout_s=10)
    await pushing
