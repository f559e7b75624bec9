"""Code as a user writes it, never run: it has to pass `mypy --strict`, in ./dev check and against the built wheel.

What is wrong has a `type: ignore`, which is an error where nothing is ignored.
"""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import crossrail as xr
from crossrail import kv, moe, observe, sim, weights
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


def groups(engine: xr.Engine, targets: list[xr.RegionDescriptor]) -> None:
    group = engine.add_peer_group([target.owner for target in targets])
    assert_type(group, xr.PeerGroup)
    source = engine.alloc(4096)
    engine.submit_scatter(source, targets, lengths=64, src_offsets=0, dst_offsets=[0, 64], group=group).wait(1)
    assert_type(engine.submit_barrier(group, imm=3), xr.Transfer)
    engine.remove_peer_group(group)


async def messages(engine: xr.Engine, peer: xr.Address) -> None:
    engine.submit_send(peer, b"hello").add_done_callback(lambda transfer: print(transfer.status))
    pool = engine.submit_recvs(16, 256)
    message = await pool.recv_async(timeout_s=1)
    assert_type(message, xr.Message)
    assert_type(message.data, bytes)
    assert_type(message.peer, xr.Address)
    async for each in pool:
        assert_type(each, xr.Message)


def callbacks(engine: xr.Engine) -> None:
    def seen(event: xr.EngineEvent) -> None:
        logging.info("%s %s %s", event.kind, event.peer, event.detail)

    engine.on_event(seen)
    with engine.alloc_watcher(lambda old, new: print(old, new)) as watcher:
        assert_type(watcher, xr.Watcher)
        assert_type(watcher.array, npt.NDArray[np.uint64])
    counter = engine.alloc_imm()
    ticket = counter.on_count(4, lambda: None)
    assert_type(ticket, xr.CountTicket)
    assert_type(ticket.cancel(), bool)
    with counter.raise_flag() as flag:
        assert_type(flag, xr.CountFlag)
        assert_type(flag.given, int)
    counter.release()


def generations(engine: xr.Engine) -> xr.RegionDescriptor:
    with engine.alloc(1 << 16) as region:
        region.revoke(timeout_s=1)
        descriptor = region.renew()
        with region.poison(0, 4096) as poisoned:
            assert_type(poisoned, xr.Poisoned)
        try:
            poisoned.check()
        except xr.LateWrite as error:
            print(error)
        return xr.RegionDescriptor.from_bytes(bytes(descriptor))


def explained(engine: xr.Engine, peer: xr.Address) -> float:
    explanation = engine.explain(xr.Address.from_text(str(peer)))
    assert_type(explanation, xr.Explanation)
    assert_type(explanation.paths, tuple[xr.PathExplanation, ...])
    engine.require(peer, "tcp, rails>=2")
    assert_type(engine.dump(), str | None)
    xr.dump_on_signal()
    return 0.0 if explanation.heartbeat is None else explanation.heartbeat.rtt_s


def options() -> xr.Engine:
    tls = xr.TlsConfig(cert="a.pem", key="a.key", ca="ca.pem", verify="name")
    return xr.Engine("user", rails=["eth0"], port=7300, tls=tls, rdma=xr.RdmaOptions(gid_index=3), heartbeat_s=0.5)


def observed(engine: xr.Engine) -> str:
    traffic = observe.read_traffic(engine)
    assert_type(traffic, observe.Traffic)
    with observe.serve_metrics(engine, port=0) as server:
        assert_type(server, observe.MetricsServer)
        return server.url


def simulated() -> None:
    with sim.World(seed=7) as world:
        assert_type(world, sim.World)
        assert_type(world.host("a"), sim.Host)


def pages(layout: kv.KvLayout, other: kv.KvLayout) -> list[str]:
    try:
        kv.compatible(layout, other)
    except kv.LayoutMismatch as error:
        print(error)
    return kv.differences(layout, other)


def experts(engine: xr.Engine, group: moe.Group, x: npt.NDArray[np.float32], indices: npt.NDArray[np.int64]) -> None:
    with moe.AllToAll(
        engine, group, experts=8, hidden=64, top_k=2, max_tokens=16, dtype="float32", scale_block=None
    ) as exchange:
        dispatched = exchange.dispatch(x, None, indices)
        assert_type(dispatched, moe.Dispatched)


async def updated(controller: weights.WeightController, trainer: weights.WeightTrainer, n: int) -> None:
    assert_type(await controller.update(n, timeout_s=30), weights.UpdateReport)
    assert_type(await trainer.publish(n), weights.StepReport)


async def read(receiver: weights.WeightReceiver) -> int:
    async with receiver.reading() as reading:
        assert_type(reading, weights.Reading)
        return reading.version


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
