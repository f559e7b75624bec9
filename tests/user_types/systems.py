"""As program.py: a user's own code on crossrail.kv, crossrail.weights, crossrail.sim and crossrail.topology."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import crossrail as xr
from crossrail import kv, sim, topology, weights
from crossrail.control.mailbox import Mailbox
from crossrail.control.wire import EngineWire
from crossrail.kv import Decoder, Prefiller, RankMemory, Router
from crossrail.kv.messages import Sampling, mailbox
from crossrail.kv.model import Cache, Logits, Model, Pages, Tokenizer, Tokens, check_vocabulary

# --- kv as a library ---


def layouts() -> kv.KvLayout:
    layout = kv.KvLayout(layers=2, pages=8, page_tokens=16, kv_heads=8, head_dim=64, dtype="bfloat16", order="NHD")
    assert_type(layout.to_wire()["tp"] is not None, bool)
    plan = kv.plan_transfer(layout, layout)
    assert_type(plan, kv.TransferPlan)
    assert_type(kv.expected_count(layout, layout, 0, 100, tail=True), int)
    for write in plan.writes(np.arange(8), np.arange(8), plan.ready(100, 0, 0, 100)):
        assert_type(write, kv.PageWrites)
        assert_type(write.src_pages, npt.NDArray[np.uint32])
    return kv.KvLayout.from_wire(layout.to_wire())


def pools(tokens: Sequence[int]) -> dict[kv.PageState, int]:
    pool = kv.PagePool(64, page_tokens=16)
    names = kv.page_hashes(tokens, 16, salt=b"adapter")
    assert_type(names, npt.NDArray[np.uint8])
    try:
        lease = pool.reserve(4, "request-1", names=names)
    except kv.NoPages as error:
        assert_type(error.wanted - error.available, int)
        return pool.report().pages
    assert_type(lease.pages, npt.NDArray[np.uint32])
    lease.release()
    mine = np.full(4, kv.NOT_YET, np.uint32)
    assert_type(kv.foreign_lease("request-2", mine, 16), kv.PageLease)
    return pool.report().pages


async def sent(engine: xr.Engine, layout: kv.KvLayout, target: kv.KvTarget, lease: kv.PageLease) -> None:
    sender = kv.KvSender(layout, {rank: kv.RankMemory.alloc(engine, layout) for rank in range(layout.tp)})
    job = sender.open(target, lease)
    assert_type(job, kv.SendJob)
    step = sender.begin_step([(job, target.tokens)])
    assert_type(step, kv.Step)
    sender.layer_done()
    await job.finish(timeout_s=10)
    await job.cancel("no longer wanted", timeout_s=1)
    assert_type([time.at_s for time in job.written], list[float])
    await sender.close()


async def received(engine: xr.Engine, layout: kv.KvLayout, buffers: list[npt.NDArray[np.uint8]]) -> None:
    memory = kv.RankMemory.register(engine, layout, buffers)
    receiver = kv.KvReceiver(layout, [memory], kv.PagePool(layout.pages, layout.page_tokens))
    reception = receiver.reserve("request-1", 100, room_tokens=20)
    assert_type(reception.dispatch(layout, writer="prefill/1"), kv.KvTarget)

    async def ask() -> None: ...

    try:
        await reception.arrived(timeout_s=30)
    except (xr.WaitTimeout, kv.SurplusCount):
        await reception.withdraw(ask, timeout_s=5)
        await receiver.fence("prefill/1", timeout_s=5)
    assert_type(reception.state, kv.PageState)
    reception.release()
    receiver.close()


# --- kv's services, with a model of one's own ---


class Adder:
    """A Model, checked as such where it is given to a node."""

    def __init__(self, layout: kv.KvLayout) -> None:
        self.name = "adder-1"
        self.layout = layout
        self.end_tokens: frozenset[int] = frozenset()
        self.tail_bytes = 1

    def check(self, prompt: Tokens, max_tokens: int) -> None:
        check_vocabulary(prompt, 100)

    async def prefill(
        self, cache: Cache, tokens: Tokens, start: int, pages: Pages, layer_done: Callable[[], None]
    ) -> bytes:
        for layer in cache[0]:
            layer[:, pages] = tokens[start]
            layer_done()
        return b"-"

    async def step(self, cache: Cache, token: int, position: int, pages: Pages, tail: bytes) -> tuple[Logits, bytes]:
        cache[0][0][:, pages[position // self.layout.page_tokens]] = token
        return np.zeros(100, np.float32), tail


class Bytes:
    """A Tokenizer."""

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode()


async def services(engine: xr.Engine, layout: kv.KvLayout, secret: bytes) -> list[int]:
    wire = EngineWire(engine)
    router = Router("router", mailbox(wire, secret))
    router.start()
    model: Model = Adder(layout)
    tokenizer: Tokenizer = Bytes()

    async def find_router() -> bytes:
        return wire.address

    memory = {0: RankMemory.alloc(engine, layout)}
    nodes = [kind("node", mailbox(wire, secret), model, memory, [find_router]) for kind in (Prefiller, Decoder)]
    tokens: list[int] = []
    async for chunk in router.complete(tokenizer.encode("hello"), Sampling(max_tokens=4)):
        tokens += chunk.tokens
    for node in nodes:
        await node.close()
    await router.close()
    return tokens


# --- weights ---


async def trained(engine: xr.Engine, controller: bytes, secret: bytes) -> weights.StepReport:
    memory = weights.WeightMemory(engine, "trainer", 0)
    memory.add("layers.0.up", np.zeros((64, 64), np.float32), dtype="bfloat16", mesh="dp")
    assert_type(memory.inventory(), weights.Inventory)
    trainer = weights.WeightTrainer(weights.messages.mailbox(EngineWire(engine), secret), memory, tmp_bytes_max=1 << 20)
    await trainer.join(controller, timeout_s=30)
    report = await trainer.publish(1)
    assert_type(report.total_s, float)
    await trainer.leave()
    return report


async def inferred(receiver: weights.WeightReceiver, array: npt.NDArray[np.float32]) -> None:
    try:
        await receiver.wait_version(3, timeout_s=60)
    except weights.TornWeights as error:
        print(error.docs)
    async with receiver.reading(timeout_s=5) as reading:
        print(reading.version, reading.like(array))
    assert_type(receiver.version, int)
    await receiver.close()


async def controlled(mailbox: Mailbox) -> None:
    options = weights.ControllerOptions(progress_s=1, straggler_ratio=2.0)
    controller = weights.WeightController(mailbox, weights.PlanOptions(gather="needed"), options)
    await controller.ready([0, 1], [0], timeout_s=60)
    try:
        report = await controller.update(1, on_progress=print)
    except weights.UpdateFailed as error:
        assert_type(error.version, int)
    else:
        assert_type(report.steps, dict[int, weights.StepReport])


def planned(inventories: list[weights.Inventory], file: Path) -> weights.Plan:
    try:
        plan = weights.make_plan(inventories[:1], inventories[1:], weights.PlanOptions(ignore=("*.bias",)))
        weights.check_plan(plan, inventories[:1], inventories[1:])
    except weights.PlanError as error:
        raise SystemExit(str(error)) from None
    plan.save(file)
    holding = weights.Holding.whole("w", "float32", [2, 2], region=0, offset=0)
    assert_type(holding, weights.Holding)
    region = weights.RegionInfo(descriptor=b"", nbytes=16)
    assert_type(weights.Inventory.of("target", 0, [region], [holding]).to_bytes(), bytes)
    return weights.Plan.load(file)


# --- simulated worlds ---


async def pushed(world: sim.World) -> float:
    nic = sim.NicProfile("mine", gbps=100, latency_us=2, ordered=True)
    a, b = (world.host(name, nic=nic, local=sim.LocalProfile(gbps=800)) for name in "ab")
    source, target = a.engine("a").alloc(4096), b.engine("b", rails=1).alloc(4096)
    world.rail_down(b, 0, at_s=1e-6, for_s=1e-3)
    world.partition([a], [b], for_s=1e-3)
    world.freeze(b, for_s=0.1)
    world.fail_works(a, chance=0.1, count=3)
    world.lose_datagrams(0.1)
    await a.engines[0].submit_write(source, target.descriptor, imm=1)
    return world.now_s


def worlds() -> str:
    assert_type(sim.run(pushed, seed=3, limit_s=60), float)
    with sim.World(seed=7, keep_log=True) as world:
        host = world.host("a", nic="2xefa200")
        world.kill(host, at_s=1)
        assert_type(world.run(until=lambda: world.now_s > 2), bool)
        assert_type(world.stats["arrivals"], int)
        assert_type(sim.current(), sim.World)
        loop = world.event_loop(limit_s=1)
        assert_type(loop, sim.SimEventLoop)
        loop.close()
        return "\n".join(world.log)


def fitted(file: Path) -> sim.NicProfile:
    return sim.from_bench(file)


# --- topology ---


def rails_of(root: Path) -> list[str]:
    machine = topology.Topology.read(root, addresses={"eth0": ["10.0.0.1"]})
    for gpu in machine.gpus:
        assert_type(gpu, topology.Gpu)
        choice = topology.choose_rails(machine, gpu, only=["mlx5_0"], need="verbs")
        assert_type(choice.rails, tuple[topology.Candidate, ...])
        assert_type(topology.worker_cpus(machine, choice).cpus, tuple[topology.CpuId, ...])
        assert_type(machine.distance(gpu, choice.rails[0].nic), topology.Distance)
        if choice.rails[0].distance <= topology.Distance.PXB and gpu.pci.numa is not None:
            assert_type(machine.node(gpu.pci.numa), topology.NumaNode | None)
    for nic in machine.nics:
        assert_type(nic.speed_gbps, float | None)
        assert_type(nic.kind, topology.NicKind)
        if nic.rdma is not None and nic.rdma.port is not None:
            assert_type(nic.rdma.port.up, bool)
    device: topology.Device = machine.device("gpu0")
    print(topology.describe(machine, [device])["version"], topology.PciAddress.parse("0000:01:00.0"))
    return [nic.name for nic in machine.nics if nic.up]


def mistakes(layout: kv.KvLayout, machine: topology.Topology, world: sim.World) -> None:
    kv.KvLayout(layers=2, pages=8, page_tokens=16, kv_heads=8, head_dim=64, dtype="f", order="XYZ")  # type: ignore[arg-type]
    kv.plan_transfer(layout, "layout")  # type: ignore[arg-type]
    topology.choose_rails(machine, "gpu0", need="wifi")  # type: ignore[arg-type]
    weights.PlanOptions(gather="some")  # type: ignore[arg-type]
    world.host("a", nic=100)  # type: ignore[arg-type]
