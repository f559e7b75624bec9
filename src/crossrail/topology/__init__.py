"""Where the GPUs, NICs and NUMA nodes of this machine are, and which NICs serve which device.

>>> from crossrail.topology import Topology, choose_rails, worker_cpus
>>> topology = Topology.read()                        # or Topology.read("/recorded/sys")
>>> choice = choose_rails(topology, "gpu0")           # a GPU, "numa1", "cpu12" or "host"
>>> [rail.nic.name for rail in choice.rails], choice.reason
>>> worker_cpus(topology, choice, os.sched_getaffinity(0)).cpus

The whole interface:

    Topology.read(root="/sys", *, proc=None, addresses=None) -> Topology     # proc: default `proc` beside root
        .gpus .nics .numa_nodes .cpus .net_devices .rdma_devices .notes      # tuples of the dataclasses in model.py
        .device(text) -> Device                 # "gpu0", "0000:53:00.0", "numa1", "cpu12", "host"; else UsageError
        .distance(device, nic) -> Distance      # PIX < PXB < PHB < NODE < SYS, as in `nvidia-smi topo`
    choose_rails(topology, device, *, limit=None, only=None, need=None) -> RailChoice
        .rails, .rejected: tuple[Candidate, ...]            # Candidate: nic, distance, reason (one line)
        .device, .reason
    worker_cpus(topology, choice, affinity=None) -> WorkerCpus               # .cpus, .reason
    describe(topology, devices=None, *, need=None, affinity=None) -> dict    # what `crossrail topo --json` prints

All of it is plain Python over immutable values: any thread, no I/O after `read`, no state. `read` never raises for what
the tree holds: a missing file is "unknown" (None), a file with junk in it is "unknown" and a line in `Topology.notes`.
"""

from crossrail.topology.cpus import WorkerCpus, worker_cpus
from crossrail.topology.describe import describe
from crossrail.topology.model import (
    Cpu,
    CpuId,
    Device,
    Distance,
    Gpu,
    Host,
    NetDevice,
    Nic,
    NicKind,
    NumaId,
    NumaNode,
    PciAddress,
    PciFunction,
    RdmaDevice,
    RdmaPort,
    Topology,
)
from crossrail.topology.rails import Candidate, Need, RailChoice, choose_rails

__all__ = [
    "Candidate",
    "Cpu",
    "CpuId",
    "Device",
    "Distance",
    "Gpu",
    "Host",
    "Need",
    "NetDevice",
    "Nic",
    "NicKind",
    "NumaId",
    "NumaNode",
    "PciAddress",
    "PciFunction",
    "RailChoice",
    "RdmaDevice",
    "RdmaPort",
    "Topology",
    "WorkerCpus",
    "choose_rails",
    "describe",
    "worker_cpus",
]
