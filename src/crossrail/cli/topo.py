"""`crossrail topo`: where GPUs and NICs are, which NICs serve which device, and why."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from crossrail.cli.console import in_one_piece, open_console
from crossrail.cli.json_output import is_alone, json_option, write_json
from crossrail.cli.tables import Fitted, plain_table
from crossrail.cli.text import format_count
from crossrail.default_rails import default_rails
from crossrail.errors import UsageError
from crossrail.topology import (
    Candidate,
    Device,
    Gpu,
    Need,
    Nic,
    PciFunction,
    RailChoice,
    Topology,
    choose_rails,
    describe,
    worker_cpus,
)
from crossrail.topology.describe import usual_devices
from crossrail.topology.sysfs import format_cpu_list, natural

_PIPE_COLUMNS = 100
_CORES_COLUMNS = 20  # two ranges of three digits each
_NAMES_COLUMNS = 44  # four names such as rdmap113s0
_OTHER_COLUMNS = 56  # of a line of the tree, beside the names
_KIND_COLUMNS = 11
_NOTES_SHOWN = 8
_KINDS = {
    "efa": "EFA",
    "infiniband": "InfiniBand",
    "roce": "RoCE",
    "rdma": "RDMA",
    "soft-rdma": "soft RDMA",
    "ethernet": "Ethernet",
    "wireless": "Wi-Fi",
    "usb": "USB",
    "no-driver": "no device",
}
_NOT_HARDWARE = ("virtual", "loopback", "veth", "representor", "soft-rdma")


# --- the tree ---


@dataclass
class _Branch:
    """A NUMA node, host bridge or switch, and what hangs below it."""

    label: str
    below: dict[str, _Branch] = field(default_factory=dict)
    gpus: list[Gpu] = field(default_factory=list)
    nics: list[Nic] = field(default_factory=list)

    def at(self, label: str) -> _Branch:
        return self.below.setdefault(label, _Branch(label))

    def joined(self) -> _Branch:
        """Without levels whose only content is the next one."""
        branch = self
        while len(branch.below) == 1 and not branch.gpus and not branch.nics:
            (only,) = branch.below.values()
            branch = _Branch(f"{branch.label} › {only.label}", only.below, only.gpus, only.nics)
        return branch


def _forest(topology: Topology) -> list[_Branch]:
    """Devices by NUMA node; those on no known node come last."""
    trunks = {
        node.id: _Branch(f"{node.name}  CPUs {format_cpu_list(node.cpus) or 'none'}") for node in topology.numa_nodes
    }
    lost = _Branch("NUMA node unknown" if topology.numa_nodes else "this machine")

    def trunk_of(device: Gpu | Nic) -> _Branch:
        node = topology.node_of(device)
        return lost if node is None else trunks[node.id]

    for gpu in topology.gpus:
        _place(trunk_of(gpu), gpu.pci).gpus.append(gpu)
    for nic in topology.nics:
        if nic.kind not in _NOT_HARDWARE:
            _place(trunk_of(nic), nic.pci).nics.append(nic)
    return [*trunks.values(), *([lost] if lost.below or lost.gpus or lost.nics or not trunks else [])]


def _place(trunk: _Branch, pci: PciFunction | None) -> _Branch:
    if pci is None or not pci.root:
        return trunk
    branch = trunk.at(pci.root)
    for switch in pci.switches:
        branch = branch.at(f"switch {switch}")
    return branch


class _Painter:
    """Draws branches. users: by NIC name, the GPUs whose rail it is: "gpu0, gpu1"."""

    def __init__(self, forest: Sequence[_Branch], users: Mapping[str, str], columns: int) -> None:
        """columns: of the console; where they are few, lists of names are cut short."""
        self._users = users
        self._cut = max(_NAMES_COLUMNS // 2, min(_NAMES_COLUMNS, columns - _OTHER_COLUMNS))
        self._names_columns = max((self._widest(branch) for branch in forest), default=0)

    def _widest(self, branch: _Branch) -> int:
        here = (len(_names(nics, self._cut)) for nics in self._alike(branch.nics))
        return max((*here, *(self._widest(child) for child in branch.below.values())), default=0)

    def tree(self, trunk: _Branch) -> Tree:
        """The node with everything below it."""
        tree = Tree(Text(trunk.label, style="bold"), guide_style="dim")
        self._draw(trunk, tree)
        return tree

    def _draw(self, branch: _Branch, tree: Tree) -> None:
        for gpu in branch.gpus:
            tree.add(_gpu_line(gpu))
        for nics in self._alike(branch.nics):
            tree.add(self._nics_line(nics))
        for child in branch.below.values():
            joined = child.joined()
            self._draw(joined, tree.add(Text(joined.label, style="dim")))

    def _alike(self, nics: Iterable[Nic]) -> list[list[Nic]]:
        """Devices of one kind, speed, state and use, in one line."""
        groups: dict[object, list[Nic]] = {}
        for nic in nics:
            key = (nic.kind, nic.speed_gbps, nic.state, _is_virtual_function(nic), self._users.get(nic.name))
            groups.setdefault(key, []).append(nic)
        return list(groups.values())

    def _nics_line(self, nics: Sequence[Nic]) -> Text:
        first = nics[0]
        line = Text(f"{_kind(first):<{_KIND_COLUMNS}} ", style="cyan")
        line.append(f"{_names(nics, self._cut):<{self._names_columns}}  ", style="default")
        line.append(f"{_speeds(nics):>13}  ", style="default")
        line.append(first.state, style="green" if first.up else "red")
        if first.name in self._users:
            line.append("  → ", style="dim").append(self._users[first.name], style="bold green")
        functions = sum(nic.pci.vf_count for nic in nics if nic.pci is not None)
        if functions:
            line.append(f", {format_count(functions, 'virtual function')}", style="dim")
        if _is_virtual_function(first):
            line.append(", virtual function", style="dim")
        return line


def _gpu_line(gpu: Gpu) -> Text:
    line = Text(f"{'GPU' if gpu.index is None else gpu.name:<{_KIND_COLUMNS}} ", style="bold green")
    line.append(str(gpu.pci.address), style="not bold default")
    about = "not visible to this process" if gpu.index is None else gpu.model
    return line.append(f"  {about}" if about else "", style="not bold dim")


def _is_virtual_function(nic: Nic) -> bool:
    return nic.pci is not None and nic.pci.physfn is not None


def _kind(nic: Nic) -> str:
    return _KINDS.get(nic.kind, nic.kind)


def _speed(nic: Nic) -> str:
    return "speed unknown" if nic.speed_gbps is None else f"{nic.speed_gbps:g} Gb/s"


def _speeds(nics: Sequence[Nic]) -> str:
    if nics[0].kind == "no-driver":
        return ""
    return f"{len(nics)} × {_speed(nics[0])}" if len(nics) > 1 and nics[0].speed_gbps is not None else _speed(nics[0])


def _names(nics: Sequence[Nic], columns: int) -> str:
    """All names if they fit, else the first and the last."""
    if len(nics) > 1:
        return _list_names([nic.name for nic in nics], columns)
    beside = [device.name for device in nics[0].net_devices if device.name != nics[0].name]
    return f"{nics[0].name} ({', '.join(beside)})" if beside else nics[0].name


def _list_names(names: Sequence[str], columns: int) -> str:
    text = " ".join(names)
    return text if len(text) <= columns else f"{names[0]} … {names[-1]} ({len(names)})"


def _print_tree(console: Console, topology: Topology, choices: Sequence[RailChoice]) -> None:
    forest = _forest(topology)
    painter = _Painter(forest, _users(choices), console.width)
    for trunk in forest:
        console.print(painter.tree(trunk))


def _users(choices: Sequence[RailChoice]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for choice in choices:
        if isinstance(choice.device, Gpu):
            for rail in choice.rails:
                found.setdefault(rail.nic.name, []).append(choice.device.name)
    return {name: ", ".join(gpus) if len(gpus) <= 3 else f"{len(gpus)} GPUs" for name, gpus in found.items()}


def _headline(topology: Topology) -> Text:
    hardware = [nic for nic in topology.nics if nic.kind not in _NOT_HARDWARE]
    kinds = Counter(_kind(nic) for nic in hardware)
    parts = [
        format_count(len(topology.numa_nodes), "NUMA node"),
        format_count(len(topology.gpus), "GPU"),
        format_count(len(hardware), "NIC"),
    ]
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    line = Text.assemble(("crossrail topo", "bold"), f"  {', '.join(parts)}{f': {counts}' if counts else ''}")
    if topology.root != "/sys":
        line.append(f"\nread from {topology.root}", style="dim")
    return line.append("\n")


# --- the choices ---


def _print_choices(
    console: Console, topology: Topology, choices: Sequence[RailChoice], affinity: set[int] | None
) -> None:
    table = plain_table()
    table.add_column("rails of", style="bold green", no_wrap=True)
    table.add_column("NICs", overflow="fold")
    table.add_column("why", style="dim")
    table.add_column("worker cores", overflow="fold")
    for choice in choices:
        names = _list_names([rail.nic.name for rail in choice.rails], _NAMES_COLUMNS) if choice.rails else "none"
        cores = worker_cpus(topology, choice, affinity).cpus
        style = "" if choice.rails else "red"
        table.add_row(choice.device.name, Text(names, style), Text(choice.reason), _core_list(cores))
    console.print()
    console.print(Fitted(table))
    _print_left_out(console, choices)


def _core_list(cpus: tuple[int, ...]) -> str:
    """A list of cores that wraps between numbers, not within them."""
    text = format_cpu_list(cpus)
    return text if len(text) <= _CORES_COLUMNS else text.replace(",", ", ")


def _print_left_out(console: Console, choices: Sequence[RailChoice]) -> None:
    """NICs that no device uses, by the reason that the nearest device gives."""
    used = {rail.nic.name for choice in choices for rail in choice.rails}
    reasons: dict[str, Candidate] = {}
    for candidate in (c for choice in choices for c in choice.rejected if c.nic.name not in used):
        known = reasons.get(candidate.nic.name)
        if known is None or candidate.distance < known.distance:
            reasons[candidate.nic.name] = candidate
    if reasons:
        console.print()
        console.print(Fitted(_reasons_table("used by none", reasons.values())))


def _reasons_table(title: str, candidates: Iterable[Candidate]) -> Table:
    table = plain_table()
    table.add_column(title, overflow="fold", max_width=_NAMES_COLUMNS + 2)
    table.add_column("why", style="dim")
    for reason, names in _by_reason(candidates).items():
        table.add_row(Text(_list_names(names, 2 * _NAMES_COLUMNS)), Text(reason))
    return table


def _by_reason(candidates: Iterable[Candidate]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.reason, []).append(candidate.nic.name)
    return {reason: sorted(names, key=natural) for reason, names in groups.items()}


def _print_choice(console: Console, topology: Topology, choice: RailChoice, affinity: set[int] | None) -> None:
    """Everything about one device."""
    device = choice.device
    place = f" ({device.pci.address})" if isinstance(device, Gpu) else ""
    workers = worker_cpus(topology, choice, affinity)
    console.print(Text.assemble(("Rails of ", "bold"), (device.name, "bold green"), f"{place}: {choice.reason}"))
    console.print(Text(f"worker cores: {_core_list(workers.cpus) or 'unknown'} ({workers.reason})\n"))
    table = plain_table()
    for header in ("rail", "kind", "speed", "distance", "why"):
        table.add_column(header, justify="right" if header == "speed" else "left")
    for rail in choice.rails:
        nic = rail.nic
        why = Text(rail.reason, "dim")
        table.add_row(Text(_names([nic], 0), "green"), _kind(nic), _speed(nic), rail.distance.name, why)
    if choice.rails:
        console.print(Fitted(table))
        console.print()
    if choice.rejected:
        console.print(Fitted(_reasons_table("left out", choice.rejected)))


# --- the command ---


def _read(root: Path | None) -> Topology:
    if root is None:
        return Topology.read()
    if not root.is_dir():
        raise UsageError(f"--root {root} is not a directory")
    tree = root / "sys" if (root / "sys").is_dir() else root
    if not any((tree / name).is_dir() for name in ("class", "bus", "devices")):
        raise UsageError(f"--root {root} holds no sysfs tree: neither sys/, nor class/, bus/ or devices/ themselves")
    return Topology.read(tree)


def _show(
    topology: Topology, devices: Sequence[Device], chosen: bool, need: Need | None, affinity: set[int] | None
) -> None:
    console = open_console(pipe_columns=_PIPE_COLUMNS)
    choices = [choose_rails(topology, device, need=need) for device in devices]
    if chosen:
        _print_choice(console, topology, choices[0], affinity)
    else:
        console.print(_headline(topology))
        _print_tree(console, topology, choices)
        _print_choices(console, topology, choices, affinity)
    if topology.notes:
        console.print()
    for note in topology.notes[:_NOTES_SHOWN]:
        console.print(Text(f"note: {note}", "yellow"), soft_wrap=True)
    if len(topology.notes) > _NOTES_SHOWN:
        console.print(Text(f"note: and {len(topology.notes) - _NOTES_SHOWN} more; --json has all", "yellow"))


@click.command("topo")
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    help="A recorded tree: a directory with sys/ and proc/, or a sysfs itself [default: this machine].",
)
@json_option("all of it, `version` 1,")
@click.option("--device", "name", help="Only this device, in full: gpu0, a PCI address, numa1, cpu12 or host.")
@click.option(
    "--need",
    type=click.Choice(["efa", "verbs", "ip"]),
    help="Only NICs that offer this [default: RDMA if there is any, else IP].",
)
@in_one_piece()
def command(root: Path | None, json_path: Path | None, name: str | None, need: str | None) -> None:
    """Show the GPUs and NICs, which NICs serve which device, and why.

    Distances are named as by `nvidia-smi topo`: PIX, one PCIe switch; PXB, several; PHB, one host bridge; NODE, one
    NUMA node; SYS, anything else.
    """
    topology = _read(root)
    devices = usual_devices(topology) if name is None else [topology.device(name)]
    affinity = os.sched_getaffinity(0) if root is None else None
    wanted = cast("Need | None", need)
    if json_path is not None:
        write_json(json_path, describe(topology, devices, need=wanted, affinity=affinity))
    if not is_alone(json_path):
        _show(topology, devices, name is not None, wanted, affinity)
        chosen = default_rails("auto", 1) if root is None else 1
        if not isinstance(chosen, int):
            click.echo(f"\nBy default an engine uses {', '.join(chosen)}; rails=N or rails=[...] for others.")
