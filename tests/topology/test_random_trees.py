"""Trees of any shape, with any junk in them: nothing crashes, and every choice keeps its promises."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossrail.topology import Distance, RailChoice, Topology, choose_rails, describe, worker_cpus
from tests.topology import trees
from tests.topology.trees import Machine, Place, root, scratch

ON_DISK = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])

STATES = st.sampled_from(["4: ACTIVE", "4: ACTIVE", "1: DOWN", "2: INIT"])
SPEEDS = st.sampled_from([10, 100, 200, 400])
JUNK = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"", b"-1", b"0x", b"\x00", b"4: ", b"999999999999999999999", b"0-9999999", b"up\nup", b"nan"]),
)


@st.composite
def places(draw: st.DrawFn, machine: Machine, count: int) -> list[Place]:
    """Somewhere in a tree of up to three host bridges with up to two levels of switches."""
    found = []
    for index in range(count):
        bus = draw(st.integers(0, 2))
        place = root(f"0000:{bus * 0x40:02x}", draw(st.sampled_from([-1, 0, 1, 1, 7])))
        for level in range(draw(st.integers(0, 2))):
            switch = draw(st.integers(0, 1))
            name = f"0000:{bus * 0x40 + 1 + 2 * level + switch:02x}"
            place = (
                place
                / f"{name}:01.0"
                / f"{name}:02.0"
                / f"{name}:{3 + draw(st.integers(0, 3))}.0".replace(":3.", ":03.")
            )
        found.append(place / f"0000:{0x80 + index:02x}:00.0")
    return found


@st.composite
def machines(draw: st.DrawFn, top: Path) -> Machine:
    """GPUs and NICs of all kinds, anywhere."""
    machine = Machine(top)
    nodes = draw(st.integers(0, 3))
    if nodes:
        machine.numa(*(f"{4 * node}-{4 * node + 3}" for node in range(nodes)))
    gpus, nics = draw(st.integers(0, 5)), draw(st.integers(0, 8))
    spots = draw(places(machine, gpus + nics))
    for place in spots[:gpus]:
        machine.gpu(place)
    for index, place in enumerate(spots[gpus:]):
        add_nic(draw, machine, index, place, spots[gpus:])
    if draw(st.booleans()):
        machine.lo()
    if draw(st.booleans()):
        machine.net("veth0", iflink=draw(st.sampled_from([0, 1, 99])), master="eth0")
    return machine


def add_nic(draw: st.DrawFn, machine: Machine, index: int, place: Place, others: list[Place]) -> None:
    kind = draw(st.sampled_from(["efa", "infiniband", "roce", "ethernet", "bare", "rxe"]))
    if kind == "efa":
        machine.efa(f"efa_{index}", place, draw(SPEEDS))
    elif kind in ("infiniband", "roce"):
        layer = "InfiniBand" if kind == "infiniband" else "Ethernet"
        net = draw(st.sampled_from(["", f"ens{index}", "ens0"])) if index == 0 else f"ens{index}"
        machine.connectx(f"mlx5_{index}", place, net, draw(SPEEDS), layer=layer, state=draw(STATES))
    else:
        machine.pci(place, trees.ETHERNET, trees.INTEL, driver=draw(st.sampled_from(["", "e1000e", "vfio-pci"])))
        if kind == "ethernet":
            state = draw(st.sampled_from(["up", "up", "down", "unknown", "sideways"]))
            master = draw(st.sampled_from(["", "bond0", f"eth{index}", "eth0"]))
            machine.net(f"eth{index}", place, speed=draw(SPEEDS) * 1000, state=state, master=master)
        elif kind == "rxe":
            machine.rdma(f"rxe{index}", None, layer="Ethernet", gbps=draw(SPEEDS), parent=f"eth{index}")
    if draw(st.integers(0, 4)) == 0:
        machine.link(machine.dir(place) / "physfn", f"../{draw(st.sampled_from(others)).name}")


def scribble(draw: st.DrawFn, machine: Machine) -> None:
    """Junk in some files, and some files gone."""
    files = sorted(path for path in machine.sys.rglob("*") if path.is_file() and not path.is_symlink())
    for path in draw(st.lists(st.sampled_from(files), max_size=12, unique=True)) if files else []:
        if draw(st.booleans()):
            path.write_bytes(draw(JUNK))
        else:
            path.unlink()


def promises_hold(topology: Topology, choice: RailChoice) -> None:
    names = [c.nic.name for c in (*choice.rails, *choice.rejected)]
    assert sorted(names) == sorted(nic.name for nic in topology.nics)
    assert all(rail.nic.up for rail in choice.rails)
    lines = [choice.reason, *(c.reason for c in (*choice.rails, *choice.rejected))]
    assert all(line and line.isprintable() for line in lines)
    distances = [rail.distance for rail in choice.rails]
    assert distances == sorted(distances)
    assert len({rail.nic.speed_gbps for rail in choice.rails}) <= 1


def limits_keep_the_first(topology: Topology, limit: int) -> None:
    for device in (*topology.gpus, topology.device("host")):
        unlimited = [rail.nic for rail in choose_rails(topology, device).rails]
        assert [rail.nic for rail in choose_rails(topology, device, limit=limit).rails] == unlimited[:limit]


def named_nics_are_used(topology: Topology, names: set[str]) -> None:
    names.discard("")
    choice = choose_rails(topology, "host", only=names)
    assert {rail.nic.name for rail in choice.rails} == {n.name for n in topology.nics if n.up and n.names & names}


def every_choice(topology: Topology) -> list[RailChoice]:
    devices = [*topology.gpus, *topology.numa_nodes, topology.device("host")]
    return [choose_rails(topology, device) for device in devices]


@ON_DISK
@given(data=st.data())
def test_choices_on_any_machine_keep_their_promises(data: st.DataObject) -> None:
    with scratch() as top:
        machine = data.draw(machines(Path(top)))
        topology = Topology.read(machine.sys)

        assert Topology.read(machine.sys) == topology
    choices = every_choice(topology)
    assert every_choice(topology) == choices
    for choice in choices:
        promises_hold(topology, choice)
        workers = worker_cpus(topology, choice, affinity=[0, 5])
        assert set(workers.cpus) <= {0, 5} and workers.cpus and workers.reason
    assert len({nic.name for nic in topology.nics}) == len(topology.nics)
    limits_keep_the_first(topology, data.draw(st.integers(1, 4)))
    named_nics_are_used(topology, data.draw(st.sets(st.sampled_from([nic.name for nic in topology.nics] or [""]))))


@ON_DISK
@given(data=st.data())
def test_any_junk_in_any_file_is_survived(data: st.DataObject) -> None:
    with scratch() as top:
        machine = data.draw(machines(Path(top)))
        scribble(data.draw, machine)

        topology = Topology.read(machine.sys)

    for choice in every_choice(topology):
        promises_hold(topology, choice)
    assert describe(topology)["version"] == 1
    assert all(note.isprintable() for note in topology.notes)


@ON_DISK
@given(data=st.data())
def test_no_gpu_goes_without_while_rdma_is_up_and_none_idles_below_a_switch(data: st.DataObject) -> None:
    """Equal NICs: each GPU gets rails of the fewest hops, and each NIC below a GPU's root port serves someone."""
    with scratch() as top:
        machine = Machine(Path(top))
        gpus, nics = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 8))
        spots = data.draw(places(machine, gpus + nics))
        for place in spots[:gpus]:
            machine.gpu(place)
        for index, place in enumerate(spots[gpus:]):
            machine.efa(f"efa_{index}", place)
        topology = Topology.read(machine.sys)

    choices = {gpu: choose_rails(topology, gpu) for gpu in topology.gpus}

    assert all(choice.rails for choice in choices.values())
    used = {rail.nic.name for choice in choices.values() for rail in choice.rails}
    for nic in topology.nics:
        if any(topology.distance(gpu, nic) <= Distance.PXB for gpu in topology.gpus):
            assert nic.name in used
