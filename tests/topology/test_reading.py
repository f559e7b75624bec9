"""What is read from a tree: places, kinds, states, and what becomes of junk."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from crossrail import UsageError
from crossrail.topology import Cpu, Distance, Gpu, Host, Nic, PciAddress, PciFunction, Topology, addresses
from crossrail.topology.model import pci_distance
from crossrail.topology.sysfs import format_cpu_list, natural, parse_cpu_list
from tests.topology import trees
from tests.topology.conftest import Build
from tests.topology.trees import Machine, root


def nic(topology: Topology, name: str) -> Nic:
    (found,) = [nic for nic in topology.nics if nic.name == name]
    return found


def gpu(topology: Topology, index: int) -> Gpu:
    (found,) = [gpu for gpu in topology.gpus if gpu.index == index]
    return found


# --- whole machines ---


def test_p5_is_read_whole(build: Build) -> None:
    topology = build(trees.p5)

    assert [str(gpu.pci.address)[5:7] for gpu in topology.gpus] == ["53", "64", "75", "86", "97", "a8", "b9", "ca"]
    assert {gpu.model for gpu in topology.gpus} == {"NVIDIA H100 80GB HBM3"}
    assert topology.gpus[0].uuid == "GPU-00000053-0000-4000-8000-000000000000"
    efa = [nic for nic in topology.nics if nic.kind == "efa"]
    assert len(efa) == 32
    assert {(nic.speed_gbps, nic.state, nic.pci.driver) for nic in efa if nic.pci} == {(100.0, "up", "efa")}
    assert sorted(int(nic.rdma.uverbs.removeprefix("uverbs")) for nic in efa if nic.rdma) == list(range(32))
    assert [(node.id, format_cpu_list(node.cpus)) for node in topology.numa_nodes] == [
        (0, "0-47,96-143"),
        (1, "48-95,144-191"),
    ]
    assert topology.numa_nodes[0].distances == ((0, 10), (1, 32))
    assert topology.notes == ()


def test_rdma_port_is_read(build: Build) -> None:
    topology = build(trees.sriov_host)

    device = nic(topology, "mlx5_0")
    assert device.kind == "roce" and device.rdma is not None
    (port,) = device.rdma.ports
    assert (port.number, port.state, port.phys_state, port.link_layer) == (1, "ACTIVE", "LinkUp", "Ethernet")
    assert (port.rate_gbps, port.gid_count, port.net_devices) == (200.0, 1, ("ens1f0np0",))
    assert [d.name for d in device.net_devices] == ["ens1f0np0"]
    assert nic(topology, "mlx5_1").state == "port DOWN, Disabled"


def test_virtual_functions_know_their_physical_one(build: Build) -> None:
    topology = build(trees.sriov_host)

    physical, virtual = nic(topology, "mlx5_0").pci, nic(topology, "mlx5_2").pci
    assert physical is not None and virtual is not None
    assert (physical.vf_count, physical.physfn) == (3, None)
    assert (virtual.vf_count, virtual.physfn) == (0, physical.address)


def test_functions_lent_to_guests_are_no_nics(build: Build) -> None:
    topology = build(trees.sriov_host)

    names = [nic.name for nic in topology.nics]
    assert names == ["ens1f0npf0vf2", "mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "lo"]


def test_infiniband_device_and_its_ipoib_are_one_nic(build: Build) -> None:
    topology = build(trees.dgx)

    assert [d.name for d in nic(topology, "mlx5_0").net_devices] == ["ibp24s0"]
    assert "ibp24s0" not in {nic.name for nic in topology.nics}


def test_bond_below_an_rdma_device_belongs_to_it(build: Build) -> None:
    topology = build(trees.bonded)

    assert [d.name for d in nic(topology, "mlx5_bond_0").net_devices] == ["bond0"]
    assert nic(topology, "rxe0").kind == "soft-rdma"
    assert str(getattr(nic(topology, "rxe0").pci, "address", "")) == "0000:17:00.0"


def test_bond_alone_is_a_nic_at_its_first_member(build: Build) -> None:
    topology = build(trees.bonded, lag=False)

    bond = nic(topology, "bond0")
    assert (bond.kind, bond.speed_gbps, bond.net_devices[0].lowers) == (
        "bond",
        200.0,
        ("enp23s0f0np0", "enp23s0f1np1"),
    )
    assert str(getattr(bond.pci, "address", "")) == "0000:17:00.0"


def test_kinds_of_net_devices(build: Build) -> None:
    topology = build(trees.laptop)

    kinds = {device.name: (device.kind, device.flavour) for device in topology.net_devices}
    assert kinds == {
        "docker0": ("virtual", "bridge"),
        "enp0s31f6": ("ethernet", ""),
        "lo": ("loopback", ""),
        "veth1a2b3c": ("veth", "veth"),
        "wlp1s0": ("wireless", ""),
    }


def test_container_hides_gpus_and_nics(build: Build) -> None:
    topology = build(trees.container)

    assert [(gpu.name, gpu.index) for gpu in topology.gpus] == [
        ("0000:01:00.0", None),
        ("0000:11:00.0", None),
        ("gpu0", 0),
        ("gpu1", 1),
    ]
    unseen = [nic for nic in topology.nics if nic.kind == "no-driver"]
    assert len(unseen) == 4
    assert (unseen[0].name, unseen[0].state) == ("0000:02:00.0", "driver mlx5_core")


def test_gpu_known_to_the_driver_alone_has_no_place(machine: Machine) -> None:
    machine.driver_shows("0000:3b:00.0")

    topology = Topology.read(machine.sys)

    assert [(gpu.name, gpu.pci.root) for gpu in topology.gpus] == [("gpu0", "")]


def test_addresses_come_from_the_caller(machine: Machine) -> None:
    trees.cloud_vm(machine)

    topology = Topology.read(machine.sys, addresses={"eth0": ["10.0.0.7"], "gone0": ["10.0.0.8"]})

    assert {d.name: d.ip_addresses for d in topology.net_devices if d.ip_addresses} == {"eth0": ("10.0.0.7",)}


def test_this_machine_can_be_read() -> None:
    topology = Topology.read()

    assert topology.root == "/sys" and topology.notes == ()
    assert set(os.sched_getaffinity(0)) <= set(topology.cpus)
    assert {path.name for path in Path("/sys/class/net").iterdir() if path.is_dir()} == {
        device.name for device in topology.net_devices
    }


# --- distances ---


def test_distances_in_a_dgx(build: Build) -> None:
    topology = build(trees.dgx)

    def distance(name: str) -> Distance:
        return topology.distance(gpu(topology, 0), nic(topology, name))

    assert [distance(n) for n in ("mlx5_0", "mlx5_3", "mlx5_1", "mlx5_6")] == [
        Distance.PXB,
        Distance.NODE,
        Distance.NODE,
        Distance.SYS,
    ]


def test_distances_below_and_beside_a_switch(build: Build) -> None:
    topology = build(trees.apart)

    assert topology.distance(gpu(topology, 0), nic(topology, "mlx5_0")) is Distance.PHB
    assert topology.distance(gpu(topology, 0), nic(topology, "mlx5_9")) is Distance.NODE
    assert topology.distance(gpu(topology, 0), nic(topology, "mlx5_2")) is Distance.SYS
    assert topology.distance(topology.device("numa0"), nic(topology, "mlx5_0")) is Distance.NODE
    assert topology.distance(topology.device("cpu40"), nic(topology, "mlx5_0")) is Distance.SYS
    assert topology.distance(Host(), nic(topology, "mlx5_0")) is Distance.NODE


def test_ports_of_one_switch_are_pix(build: Build) -> None:
    topology = build(trees.hgx_pairs)

    assert topology.distance(gpu(topology, 0), nic(topology, "mlx5_1")) is Distance.PIX
    assert topology.distance(gpu(topology, 0), nic(topology, "mlx5_2")) is Distance.NODE


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [
        ("10:01 11:00 12:00", "10:01 11:00 12:01", Distance.PIX),  # two ports of one switch
        ("10:01", "10:01", Distance.PIX),  # two functions of one card
        ("10:01 11:00 12:00", "10:01 11:00 12:01 13:00 14:00", Distance.PXB),  # one behind a further switch
        ("10:01 11:00 12:00", "10:01 11:00 12:01 13:00", Distance.PXB),  # or behind a plain bridge
        ("10:01 11:00 12:00", "10:02 11:00 12:00", Distance.PHB),  # two root ports
        ("", "", Distance.PHB),  # a flat bus
    ],
)
def test_distances_by_bridges(one: str, other: str, distance: Distance) -> None:
    functions = []
    for index, way in enumerate((one, other)):
        bridges = tuple(address for word in way.split() if (address := PciAddress.parse(f"{word}.0")) is not None)
        functions.append(PciFunction(PciAddress(0, 0x90, index, 0), "pci0000:10", bridges))

    assert pci_distance(functions[0], functions[1]) is distance
    assert pci_distance(functions[1], functions[0]) is distance


def test_unknown_node_is_near_on_a_machine_of_one_node_and_far_on_others(machine: Machine) -> None:
    machine.net("ens5", machine.pci(root("0000:00") / "0000:00:05.0", trees.ETHERNET, trees.VIRTIO))
    machine.gpu(root("0000:80") / "0000:80:01.0")
    machine.numa("0-3")
    one = Topology.read(machine.sys)
    machine.numa("0-1", "2-3")
    two = Topology.read(machine.sys)

    assert one.distance(gpu(one, 0), nic(one, "ens5")) is Distance.NODE
    assert two.distance(gpu(two, 0), nic(two, "ens5")) is Distance.SYS


# --- names of devices ---


def test_devices_are_found_by_every_name(build: Build) -> None:
    topology = build(trees.p5)
    third = topology.gpus[2]

    for name in ("gpu2", "GPU2", "0000:75:00.0", "75:00.0", third.uuid):
        assert topology.device(name) == third
    assert topology.device("numa1") == topology.numa_nodes[1]
    assert topology.device("cpu12") == Cpu(topology.cpus[12])
    assert topology.device("host") == Host()


@pytest.mark.parametrize("name", ["gpu8", "", "numa2", "cpu192", "0000:76:00.0", "nic0", "rdmap79s0"])
def test_unknown_device_rejected_with_those_that_exist(build: Build, name: str) -> None:
    topology = build(trees.p5)

    with pytest.raises(UsageError, match=r"gpu0, gpu1.*numa1.*cpu0.*host"):
        topology.device(name)


def test_empty_name_is_not_that_of_a_gpu_without_a_uuid(build: Build) -> None:
    """As where the driver does not say one."""
    topology = build(trees.p5)
    nameless = replace(topology, gpus=tuple(replace(gpu, uuid="") for gpu in topology.gpus))
    for name in ("", " "):
        with pytest.raises(UsageError, match="is not known here"):
            nameless.device(name)


def test_ipv6_addresses_of_an_interface_of_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "if_inet6").write_bytes(b"20010db8000000000000000000000001 03 40 00 80 ra\xffil\n")
    monkeypatch.setattr(addresses, "Path", lambda path: tmp_path / Path(path).name)

    assert addresses._ipv6_addresses() == [("ra\udcffil", "2001:db8::1")]


def test_link_local_addresses_are_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every net device has one, so it says nothing of which of them IP goes by; the engine takes none either."""
    (tmp_path / "if_inet6").write_bytes(
        b"fe800000000000000000000000000001 02 40 20 80 eth0\n"
        b"fe800000000000000000000000000001 03 40 20 80 eth0.100\n"
        b"20010db8000000000000000000000001 03 40 00 80 eth0.100\n"
        b"00000000000000000000000000000001 01 80 10 80 lo\n"
    )
    monkeypatch.setattr(addresses, "Path", lambda path: tmp_path / Path(path).name)

    assert addresses._ipv6_addresses() == [("eth0.100", "2001:db8::1"), ("lo", "::1")]


def test_pci_addresses_survive_text() -> None:
    for text in ("0000:53:00.0", "10000:e1:1f.7", "0101:00:00.0"):
        assert str(PciAddress.parse(text)) == text
    assert PciAddress.parse("53:00.0") == PciAddress(0, 0x53, 0, 0)
    assert [PciAddress.parse(text) for text in ("", "53:00", "0000:53:00.8", "x0000:53:00.0")] == [None] * 4


# --- junk ---


def test_root_that_is_no_directory_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    for path in (tmp_path / "gone", tmp_path / "file"):
        with pytest.raises(UsageError, match=path.name):
            Topology.read(path)


def test_empty_tree_is_an_empty_topology_with_a_note(tmp_path: Path) -> None:
    topology = Topology.read(tmp_path)

    assert (topology.gpus, topology.nics, topology.numa_nodes, topology.cpus) == ((), (), (), ())
    assert len(topology.notes) == 1 and "no sysfs" in topology.notes[0]


def test_garbage_is_unknown_and_noted(build: Build) -> None:
    topology = build(trees.garbage)

    card = nic(topology, "mlx5_0")
    assert (card.kind, card.up, card.state, card.speed_gbps) == ("rdma", False, "state unknown", None)
    (device,) = card.net_devices
    assert (device.operstate, device.carrier, device.mtu, device.mac) == ("unknown", None, None, "")
    assert (topology.gpus[0].pci.numa, topology.gpus[0].uuid, topology.cpus) == (None, "", ())
    notes = "\n".join(topology.notes)
    for word in ("speed", "carrier", "mtu", "rate", "cpulist", "distance", "outside", "not-an-address", "numa_node"):
        assert word in notes
    assert all(note.isprintable() for note in topology.notes)


def test_files_that_refuse_to_be_read_are_unknown(machine: Machine) -> None:
    place = machine.pci(root("0000:00") / "0000:00:05.0", trees.ETHERNET, trees.MELLANOX)
    path = machine.net("ens5", place)
    os.mkfifo(path / "speed")
    (path / "mtu").unlink()
    (path / "mtu").mkdir()

    topology = Topology.read(machine.sys)

    assert (nic(topology, "ens5").speed_gbps, nic(topology, "ens5").net_devices[0].mtu) == (None, None)
    assert nic(topology, "ens5").up


def test_notes_do_not_grow_without_end(machine: Machine) -> None:
    for index in range(300):
        machine.net(f"eth{index}", mtu="x")

    assert len(Topology.read(machine.sys).notes) == 200


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0", (0,)),
        ("0-2,8", (0, 1, 2, 8)),
        ("3,1", (1, 3)),
        ("", None),
        ("2-1", None),
        ("0-", None),
        ("0-70000", None),
        ("a", None),
        ("-1", None),
    ],
)
def test_cpu_lists(text: str, cpus: tuple[int, ...] | None) -> None:
    assert parse_cpu_list(text) == cpus
    assert cpus is None or parse_cpu_list(format_cpu_list(cpus)) == cpus


def test_names_sort_as_people_count() -> None:
    assert sorted(["mlx5_10", "mlx5_2", "eth0", "mlx5"], key=natural) == ["eth0", "mlx5", "mlx5_2", "mlx5_10"]
