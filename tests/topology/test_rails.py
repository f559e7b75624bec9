"""Which NICs are chosen on machines that exist, and what is said of the others."""

from __future__ import annotations

import pytest

from crossrail import UsageError
from crossrail.default_rails import core_near
from crossrail.topology import RailChoice, Topology, choose_rails, worker_cpus
from crossrail.topology.rails import left_out
from crossrail.topology.sysfs import format_cpu_list
from tests.topology import trees
from tests.topology.conftest import Build
from tests.topology.trees import Machine, root


def rails(choice: RailChoice) -> list[str]:
    return [rail.nic.name for rail in choice.rails]


def reason(choice: RailChoice, name: str) -> str:
    (found,) = [c.reason for c in (*choice.rails, *choice.rejected) if c.nic.name == name]
    return found


def rails_by_gpu(topology: Topology) -> list[list[str]]:
    return [rails(choose_rails(topology, gpu)) for gpu in topology.gpus]


# --- machines ---


def test_p5_gives_each_gpu_the_four_efa_of_its_switch(build: Build) -> None:
    topology = build(trees.p5)

    assert rails_by_gpu(topology) == [
        [f"rdmap{bus}s0" for bus in range(first, first + 4)] for first in (79, 96, 113, 130, 147, 164, 181, 198)
    ]
    choice = choose_rails(topology, "gpu4")
    assert choice.reason == "same PCIe switch, 4 × 100 Gb/s"
    assert reason(choice, "rdmap79s0") == "farther: SYS, not PIX"
    assert reason(choice, "rdmap164s0") == "farther: NODE, not PIX"
    assert reason(choice, "ens5") == "no RDMA, other NICs have it"


def test_p5_host_memory_of_a_node_gets_all_sixteen_of_it(build: Build) -> None:
    topology = build(trees.p5)

    assert len(rails(choose_rails(topology, "numa1"))) == 16
    assert rails(choose_rails(topology, "cpu50")) == rails(choose_rails(topology, "numa1"))
    assert len(rails(choose_rails(topology, "host"))) == 32


def test_p5_over_ip_takes_the_net_device_of_the_switch(build: Build) -> None:
    topology = build(trees.p5)

    choice = choose_rails(topology, "gpu1", need="ip")

    assert rails(choice) == ["enp88s0"]
    assert reason(choice, "rdmap96s0") == "no net device"


def test_p5en_gives_each_gpu_two(build: Build) -> None:
    topology = build(trees.p5en)

    assert rails_by_gpu(topology) == [
        [f"rdmap{bus}s0", f"rdmap{bus + 1}s0"] for bus in (79, 96, 113, 130, 147, 164, 181, 198)
    ]
    assert choose_rails(topology, "gpu0").reason == "same PCIe switch, 2 × 200 Gb/s"


def test_p4d_pairs_of_gpus_share_the_nic_of_their_bus(build: Build) -> None:
    topology = build(trees.p4d)

    names = ["rdmap16s27", "rdmap32s27", "rdmap144s27", "rdmap160s27"]
    assert rails_by_gpu(topology) == [[name] for name in names for _ in range(2)]
    assert reason(choose_rails(topology, "gpu1"), "rdmap16s27") == "same PCIe host bridge, shared with gpu0"


def test_dgx_gives_each_gpu_its_compute_nic_and_leaves_storage_out(build: Build) -> None:
    topology = build(trees.dgx)

    assert rails_by_gpu(topology) == [[name] for name in trees.DGX_NAMES]
    choice = choose_rails(topology, "gpu0")
    assert reason(choice, "mlx5_1") == "farther: NODE, not PXB; under no GPU's switch"
    assert reason(choice, "eno3") == "no RDMA, other NICs have it"
    assert rails(choose_rails(topology, "numa0")) == ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5"]
    assert reason(choose_rails(topology, "numa0"), "mlx5_2") == "under no GPU's switch, unlike others"


def test_dgx_storage_nics_are_there_for_who_names_them(build: Build) -> None:
    topology = build(trees.dgx)

    choice = choose_rails(topology, "gpu0", only=["mlx5_1", "ibp41s0f1", "0000:18:00.0"])

    assert rails(choice) == ["mlx5_0", "mlx5_1", "mlx5_2"]
    assert reason(choice, "mlx5_3") == "not among those named"


def test_dgx_with_a_dead_nic_borrows_one_of_the_same_socket(build: Build) -> None:
    topology = build(trees.dgx, down=("mlx5_4",))

    choice = choose_rails(topology, "gpu2")

    assert rails(choice) == ["mlx5_0"]
    assert choice.reason == "same NUMA node, 400 Gb/s; nearer, but not usable: mlx5_4"
    assert reason(choice, "mlx5_0") == "same NUMA node, shared with gpu0"
    assert reason(choice, "mlx5_4") == "port DOWN, Disabled"
    assert reason(choice, "mlx5_1") == "under no GPU's switch, unlike others: for storage or management, by its place"
    assert rails(choose_rails(topology, "gpu0")) == ["mlx5_0"]


def test_dgx_with_two_dead_nics_borrows_from_different_gpus(build: Build) -> None:
    topology = build(trees.dgx, down=("mlx5_4", "mlx5_5"))

    assert rails_by_gpu(topology)[:4] == [["mlx5_0"], ["mlx5_3"], ["mlx5_0"], ["mlx5_3"]]


def test_p5_with_a_dead_switch_borrows_one_nic_of_each_neighbour(machine: Machine) -> None:
    trees.p5(machine)
    for bus in (79, 80, 81, 82):
        (path,) = machine.sys.glob(f"devices/pci*/*/*/*/*/infiniband/rdmap{bus}s0/ports/1")
        machine.write(path, state="1: DOWN")

    assert rails_by_gpu(Topology.read(machine.sys))[0] == ["rdmap96s0", "rdmap113s0", "rdmap130s0"]


def test_dgx_over_ip_uses_what_has_an_address(machine: Machine) -> None:
    trees.dgx(machine)
    bare = Topology.read(machine.sys)
    addressed = Topology.read(machine.sys, addresses={"eno3": ["10.0.0.3"], "lo": ["127.0.0.1"]})

    assert rails(choose_rails(bare, "gpu0", need="ip")) == ["mlx5_0"]  # IPoIB, for all that sysfs knows
    assert rails(choose_rails(addressed, "gpu0", need="ip")) == ["eno3"]
    assert reason(choose_rails(addressed, "gpu0", need="ip"), "mlx5_0") == "no IP address"
    assert rails(choose_rails(addressed, "gpu0")) == ["mlx5_0"]


def test_two_gpus_and_two_nics_of_a_switch_take_one_each(build: Build) -> None:
    topology = build(trees.hgx_pairs)

    assert rails_by_gpu(topology) == [[f"mlx5_{index}"] for index in range(8)]
    assert reason(choose_rails(topology, "gpu0"), "mlx5_1") == "left to gpu1"


def test_azure_deals_by_order_where_only_the_node_is_known(build: Build) -> None:
    topology = build(trees.azure_ndv5)

    assert rails_by_gpu(topology) == [[f"mlx5_ib{index}"] for index in range(8)]
    assert reason(choose_rails(topology, "gpu0"), "mlx5_an0") == "80 Gb/s, where the fastest has 400"
    over_ip = choose_rails(topology, "gpu0", need="ip")
    assert rails(over_ip) == ["eth0"]
    assert reason(over_ip, "mlx5_an0") == "part of eth0"
    assert reason(choose_rails(topology, "gpu0", need="verbs"), "eth0") == "no verbs RDMA device"


@pytest.mark.parametrize("kind", ["virtio", "ena"])
def test_cloud_vm_uses_its_one_nic(build: Build, kind: str) -> None:
    topology = build(trees.cloud_vm, kind=kind)

    choice = choose_rails(topology, "host")

    assert rails(choice) == ["eth0"]
    assert choice.reason == "the only NIC to use, speed unknown"
    assert (reason(choice, "docker0"), reason(choice, "lo")) == ("down", "loopback")


def test_vm_without_topology_uses_all_of_the_fastest_for_every_gpu(build: Build) -> None:
    topology = build(trees.flat_vm)

    assert rails_by_gpu(topology) == [["mlx5_0", "mlx5_1"]] * 2
    choice = choose_rails(topology, "gpu1")
    assert choice.reason == "no topology to go by: every GPU uses all of them"
    assert reason(choice, "mlx5_2") == "100 Gb/s, where the others here have 400"


def test_virtual_functions_stand_back_behind_their_physical_one(build: Build) -> None:
    choice = choose_rails(build(trees.sriov_host), "numa0")

    assert rails(choice) == ["mlx5_0"]
    assert reason(choice, "mlx5_2") == "virtual function: shares the port of mlx5_0, which is used"
    assert reason(choice, "ens1f0npf0vf2") == "switch side of a virtual function"


def test_one_virtual_function_stands_in_for_a_physical_one_that_is_down(build: Build) -> None:
    choice = choose_rails(build(trees.sriov_host, pf_up=False), "numa0")

    assert rails(choice) == ["mlx5_2"]
    assert reason(choice, "mlx5_3") == "virtual function: shares the port of mlx5_2, which is used"


def test_gpus_and_nics_under_different_switches_meet_at_the_host_bridge(build: Build) -> None:
    topology = build(trees.apart)

    assert rails_by_gpu(topology) == [["mlx5_0"], ["mlx5_1"], ["mlx5_2"], ["mlx5_3"]]
    assert reason(choose_rails(topology, "gpu0"), "mlx5_9") == "farther: NODE, not PHB"


def test_laptop_uses_wifi_and_says_so(build: Build) -> None:
    topology = build(trees.laptop)

    choice = choose_rails(topology, "host")

    assert rails(choice) == ["wlp1s0"]
    assert choice.reason == "the only NIC to use, speed unknown; Wi-Fi, as nothing wired is up"
    assert reason(choice, "veth1a2b3c") == "virtual (veth)"
    assert reason(choice, "docker0") == "virtual (bridge)"


def test_container_uses_its_veth_for_want_of_hardware(build: Build) -> None:
    topology = build(trees.container)

    choice = choose_rails(topology, "gpu0")

    assert rails(choice) == ["eth0"]
    assert "hardware is out of sight" in choice.reason and "0000:22:00.0" in choice.reason
    assert reason(choice, "0000:22:00.0") == "driver mlx5_core, but no device visible here"


def test_pod_with_rdma_devices_and_a_veth_uses_each_for_its_purpose(machine: Machine) -> None:
    machine.efa("rdmap79s0", root("0000:44", 0) / "0000:44:00.0")
    machine.net("eth0", iflink=77)
    topology = Topology.read(machine.sys)

    assert rails(choose_rails(topology, "host")) == ["rdmap79s0"]
    assert rails(choose_rails(topology, "host", need="ip")) == ["eth0"]


def test_bond_is_used_in_place_of_its_members(build: Build) -> None:
    choice = choose_rails(build(trees.bonded, lag=False), "host")

    assert rails(choice) == ["bond0"]
    assert reason(choice, "enp23s0f1np1") == "part of bond0"
    assert reason(choice, "bond0.100") == "virtual (vlan)"
    assert reason(choice, "rxe0") == "software RDMA on enp23s0f0np0"


def test_rdma_device_of_a_bond_is_used_in_place_of_all_below(build: Build) -> None:
    topology = build(trees.bonded)

    choice = choose_rails(topology, "host")

    assert rails(choice) == ["mlx5_bond_0"]
    assert reason(choice, "enp23s0f0np0") == "part of bond0, which mlx5_bond_0 uses"
    assert rails(choose_rails(topology, "host", only=["rxe0"])) == ["rxe0"]
    assert rails(choose_rails(topology, "host", only="bond0.100", need="ip")) == ["bond0.100"]


def vlans(machine: Machine, *names: str) -> None:
    """Above eth0, on the second of two NUMA nodes."""
    machine.numa("0-7", "8-15")
    place = machine.pci(root("0000:80", 1) / "0000:80:03.0", trees.ETHERNET, trees.MELLANOX, driver="mlx5_core")
    machine.net("eth0", place)
    for name in names:
        machine.net(name, uevent="DEVTYPE=vlan", lowers=("eth0",))


def test_vlan_is_where_the_hardware_below_is(machine: Machine) -> None:
    vlans(machine, "eth0.100")
    topology = Topology.read(machine.sys)

    choice = choose_rails(topology, "host", only=["eth0.100"])

    assert core_near(topology, choice, range(16)) == (8, "the rails are on numa1")
    assert rails(choose_rails(topology, "host", only=["0000:80:03.0"])) == ["eth0"], "the address is the NIC's alone"


def test_vlan_of_a_bond_is_where_its_first_member_is(build: Build) -> None:
    topology = build(trees.bonded)

    places = {nic.name: nic.pci for nic in topology.nics}

    assert places["bond0.100"] is not None
    assert places["bond0.100"] == places["enp23s0f0np0"]


def test_vlan_stands_in_for_a_nic_without_an_address(machine: Machine) -> None:
    vlans(machine, "eth0.100", "eth0.200")
    topology = Topology.read(machine.sys, addresses={"eth0.100": ["10.0.0.1"], "eth0.200": ["10.0.1.1"]})

    choice = choose_rails(topology, "host", need="ip")

    assert rails(choice) == ["eth0.100"]
    assert reason(choice, "eth0") == "no IP address"
    assert reason(choice, "eth0.200") == "on the same port as eth0.100"
    assert core_near(topology, choice, range(16))[0] == 8


def test_vlan_beside_an_address_of_the_nic_is_no_rail(machine: Machine) -> None:
    vlans(machine, "eth0.100")
    topology = Topology.read(machine.sys, addresses={"eth0": ["10.0.0.1"], "eth0.100": ["10.0.1.1"]})

    choice = choose_rails(topology, "host", need="ip")

    assert rails(choice) == ["eth0"]
    assert reason(choice, "eth0.100") == "virtual (vlan)"


def test_bridge_that_has_the_address_of_its_hardware_stands_in(machine: Machine) -> None:
    vlans(machine)
    (machine.net("br0", lowers=("eth0",)) / "bridge").mkdir()
    (machine.net("docker0") / "bridge").mkdir()
    topology = Topology.read(machine.sys, addresses={"br0": ["10.0.0.1"], "docker0": ["172.17.0.1"]})

    assert rails(choose_rails(topology, "host", need="ip")) == ["br0"]


def test_devices_that_stand_on_each_other_in_a_circle(machine: Machine) -> None:
    for name, lower in (("a.1", "b.1"), ("b.1", "a.1")):
        machine.net(name, uevent="DEVTYPE=vlan", lowers=(lower,))
    topology = Topology.read(machine.sys, addresses={"a.1": ["10.0.0.1"]})

    assert rails(choose_rails(topology, "host", need="ip")) == ["a.1"]


def test_tunnel_with_an_address_when_nothing_else_is_up(machine: Machine) -> None:
    """As in containers of rootless podman. The engine takes it, too."""
    machine.lo()
    machine.write(machine.net("tap0"), tun_flags="0x1002")
    machine.net("wg0")

    choice = choose_rails(
        Topology.read(machine.sys, addresses={"tap0": ["10.0.2.100"], "lo": ["127.0.0.1"]}), "host", need="ip"
    )

    assert rails(choice) == ["tap0"]
    assert choice.reason.endswith("virtual, as nothing else is up")
    assert reason(choice, "lo") == "loopback"


def test_loopback_when_nothing_else_is_up(machine: Machine) -> None:
    machine.lo()
    machine.net("eth0", machine.pci(root("0000:00") / "0000:00:03.0", trees.ETHERNET, trees.VIRTIO), state="down")

    choice = choose_rails(Topology.read(machine.sys), "host")

    assert rails(choice) == ["lo"]
    assert choice.reason == "loopback: nothing else is up, so peers on this host alone"


def test_no_nic_at_all_is_said(machine: Machine) -> None:
    choice = choose_rails(Topology.read(machine.sys), "host")

    assert (choice.rails, choice.rejected, choice.reason) == ((), (), "there is no NIC")


def test_garbage_is_not_chosen(build: Build) -> None:
    choice = choose_rails(build(trees.garbage), "gpu0")

    assert rails(choice) == []
    assert choice.reason == "no NIC to use"
    assert reason(choice, "mlx5_0") == "state unknown"


# --- rules ---


def test_slower_port_of_the_same_switch_is_left_out(machine: Machine) -> None:
    port = machine.bridge(root("0000:10", 0) / "0000:10:01.0")
    ports = machine.switch(port / "0000:11:00.0", *(f"0000:12:{i:02x}.0" for i in range(4)))
    machine.gpu(ports[0] / "0000:13:00.0")
    for index, gbps in enumerate((200, 400, 400)):
        machine.connectx(f"mlx5_{index}", ports[1 + index] / f"0000:{14 + index}:00.0", gbps=gbps)

    choice = choose_rails(Topology.read(machine.sys), "gpu0")

    assert rails(choice) == ["mlx5_1", "mlx5_2"]
    assert reason(choice, "mlx5_0") == "200 Gb/s, where the others here have 400"


def test_near_port_of_a_quarter_of_the_speed_is_preferred_but_not_a_management_port(machine: Machine) -> None:
    machine.numa("0-3", "4-7")
    near, far = root("0000:10", 0), root("0000:80", 1)
    machine.gpu(machine.bridge(near / "0000:10:01.0") / "0000:11:00.0")
    machine.connectx("mlx5_0", machine.bridge(near / "0000:10:02.0") / "0000:12:00.0", gbps=100)
    machine.connectx("mlx5_1", machine.bridge(near / "0000:10:03.0") / "0000:13:00.0", gbps=25)
    machine.connectx("mlx5_2", machine.bridge(far / "0000:80:01.0") / "0000:81:00.0", gbps=400)
    topology = Topology.read(machine.sys)

    assert rails(choose_rails(topology, "gpu0")) == ["mlx5_0"]
    assert reason(choose_rails(topology, "gpu0"), "mlx5_1") == "25 Gb/s, where the fastest has 400"


def test_nearer_node_of_the_same_socket_is_preferred(machine: Machine) -> None:
    machine.numa("0-1", "2-3", "4-5")
    for node, distances in enumerate(("10 12 32", "12 10 32", "32 32 10")):
        machine.write(machine.sys / f"devices/system/node/node{node}", distance=distances)
    machine.gpu(root("0000:10", 0) / "0000:10:01.0")
    machine.connectx("mlx5_0", root("0000:80", 2) / "0000:80:01.0")
    machine.connectx("mlx5_1", root("0000:90", 1) / "0000:90:01.0")

    choice = choose_rails(Topology.read(machine.sys), "gpu0")

    assert rails(choice) == ["mlx5_1"]
    assert reason(choice, "mlx5_0") == "farther: NUMA distance 32, not 12"


@pytest.mark.parametrize(("gpus", "nics"), [(1, 1), (2, 1), (2, 3), (3, 2), (4, 4), (3, 8), (8, 3)])
def test_gpus_of_a_switch_share_its_nics_fairly(machine: Machine, gpus: int, nics: int) -> None:
    port = machine.bridge(root("0000:10", 0) / "0000:10:01.0")
    ports = machine.switch(port / "0000:11:00.0", *(f"0000:12:{i:02x}.0" for i in range(gpus + nics)))
    for index in range(gpus):
        machine.gpu(ports[index] / f"0000:{0x20 + index:02x}:00.0")
    for index in range(nics):
        machine.connectx(f"mlx5_{index}", ports[gpus + index] / f"0000:{0x40 + index:02x}:00.0")

    shares = rails_by_gpu(Topology.read(machine.sys))

    used = [name for share in shares for name in share]
    assert set(used) == {f"mlx5_{index}" for index in range(nics)}
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    uses = [used.count(name) for name in set(used)]
    assert max(uses) - min(uses) <= 1


def test_hidden_gpus_keep_their_nics(machine: Machine) -> None:
    trees.hgx_pairs(machine)
    machine.driver_shows("0000:14:00.0")

    topology = Topology.read(machine.sys)

    assert rails(choose_rails(topology, "gpu0")) == ["mlx5_1"]  # as without the container


def test_usb_link_to_the_management_controller_is_not_taken_for_a_nic(machine: Machine) -> None:
    host = root("0000:00", 0)
    machine.net("eno1", machine.pci(host / "0000:00:19.0", trees.ETHERNET, trees.INTEL), speed=1000)
    controller = machine.pci(host / "0000:00:14.0", 0x0C0330, trees.INTEL)
    machine.net("enxb03af2b6059f", controller / "usb1/1-14/1-14:2.0", speed=10000)

    choice = choose_rails(Topology.read(machine.sys), "host")

    assert rails(choice) == ["eno1"]
    assert reason(choice, "enxb03af2b6059f") == "USB, wired NICs are up"


def test_limit_keeps_the_best(build: Build) -> None:
    topology = build(trees.p5)

    choice = choose_rails(topology, "gpu0", limit=2)

    assert rails(choice) == ["rdmap79s0", "rdmap80s0"]
    assert reason(choice, "rdmap81s0") == "past the limit of 2"


def test_named_nic_that_is_down_is_not_used(build: Build) -> None:
    choice = choose_rails(build(trees.sriov_host), "numa0", only=["mlx5_1", "mlx5_3"])

    assert rails(choice) == ["mlx5_3"]
    assert reason(choice, "mlx5_1") == "port DOWN, Disabled"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limit": 0}, "limit=0"),
        ({"limit": -1}, "at least 1"),
        ({"only": ["mlx5_77"]}, "mlx5_77"),
        ({"only": "mlx5_77"}, "mlx5_77: no such NIC"),
        ({"need": "fast"}, "efa, verbs, ip"),
    ],
)
def test_nonsense_rejected(build: Build, options: dict[str, object], words: str) -> None:
    topology = build(trees.cloud_vm)

    with pytest.raises(UsageError, match=words):
        choose_rails(topology, "host", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", [0, None, ["gpu0"]])
def test_what_is_no_device_is_rejected(build: Build, device: object) -> None:
    with pytest.raises(UsageError, match=f"its name as text, not {type(device).__name__}"):
        choose_rails(build(trees.cloud_vm), device)  # type: ignore[arg-type]


# --- cores ---


def test_worker_cpus_are_those_of_the_rails_node(build: Build) -> None:
    topology = build(trees.p5)

    workers = worker_cpus(topology, choose_rails(topology, "gpu5"))

    assert (format_cpu_list(workers.cpus), workers.reason) == ("48-95,144-191", "the rails are on numa1")


def test_worker_cpus_of_rails_on_two_nodes_are_of_both(build: Build) -> None:
    topology = build(trees.p5)

    workers = worker_cpus(topology, choose_rails(topology, "host"), affinity=[1, 50, 200])

    assert (workers.cpus, workers.reason) == ((1, 50), "the rails are on numa0, numa1")


def test_worker_cpus_keep_to_the_affinity(build: Build) -> None:
    topology = build(trees.p5)
    choice = choose_rails(topology, "gpu0")

    assert worker_cpus(topology, choice, affinity=range(40, 60)).cpus == tuple(range(40, 48))
    none_near = worker_cpus(topology, choice, affinity=[48, 49])
    assert none_near.cpus == (48, 49)
    assert none_near.reason == "the rails are on numa0, but this process may use none of its cores 0-47,96-143"


def test_worker_cpus_where_no_node_is_known_are_any(build: Build) -> None:
    topology = build(trees.flat_vm)

    workers = worker_cpus(topology, choose_rails(topology, "gpu0"), affinity=[3, 1])

    assert (workers.cpus, workers.reason) == ((1, 3), "the rails' NUMA node is unknown: any core")
    assert worker_cpus(topology, choose_rails(topology, "gpu0")).cpus == topology.cpus


def test_worker_cpus_without_rails_are_any(build: Build) -> None:
    topology = build(trees.garbage)

    assert worker_cpus(topology, choose_rails(topology, "gpu0"), affinity=[0]).cpus == (0,)


def test_worker_cpus_of_a_node_that_is_memory_alone_are_of_the_nearest_with_cores(machine: Machine) -> None:
    machine.numa("0-3", "4-7", "")
    machine.write(machine.sys / "devices/system/node/node2", distance="40 20 10")
    machine.connectx("mlx5_0", root("0000:10", 2) / "0000:10:01.0")
    topology = Topology.read(machine.sys)

    assert worker_cpus(topology, choose_rails(topology, "host")).cpus == (4, 5, 6, 7)


# --- what nobody takes ---


def test_storage_and_management_are_left_out_for_every_device(build: Build) -> None:
    topology = build(trees.dgx)

    reasons = left_out(topology)

    chosen = {name for gpu in rails_by_gpu(topology) for name in gpu} | set(rails(choose_rails(topology, "host")))
    assert chosen.isdisjoint(reasons)
    assert {nic.name for nic in topology.nics if nic.up} == chosen | reasons.keys()


def test_a_rail_that_is_down_or_slower_is_missed_and_not_left_out(machine: Machine) -> None:
    for index, (gbps, state) in enumerate(((400, "4: ACTIVE"), (100, "4: ACTIVE"), (400, "1: DOWN"))):
        place = machine.pci(
            root("0000:00") / f"0000:00:0{index + 3}.0", trees.ETHERNET, trees.MELLANOX, driver="mlx5_core"
        )
        machine.rdma(f"mlx5_{index}", place, layer="InfiniBand", gbps=gbps, state=state)

    assert left_out(Topology.read(machine.sys)) == {}
