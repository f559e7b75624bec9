"""Published figures of dispatch and combine (arXiv 2510.27656, and its repository), to compare with.

Hidden 7168, 256 experts, top 8, fp8 with 56 scales out, bfloat16 back, nodes of eight GPUs.
"""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    """Figures of a data sheet: bytes per second of a GPU's memory, and of NVLink in each direction."""

    name: str
    memory: float
    nvlink: float


class KernelTimes(NamedTuple):
    """Microseconds of the four kernels at EP64, decode (the paper's Fig. 10)."""

    dispatch_send: float
    dispatch_recv: float
    combine_send: float
    combine_recv: float


class Cluster(NamedTuple):
    """nic: as crossrail.sim names it."""

    nic: str
    gpu: Gpu
    kernels: KernelTimes


class Figure(NamedTuple):
    """Microseconds. note: why it may not be what it says it is."""

    dispatch: float
    combine: float
    note: str = ""


NODE_SIZE = 8
CLUSTERS = {
    "cx7": Cluster("cx7", Gpu("H100", 3.35e12, 450e9), KernelTimes(21.2, 18.0, 25.7, 13.7)),
    "efa": Cluster("2xefa200", Gpu("H200", 4.8e12, 450e9), KernelTimes(20.5, 17.9, 24.5, 13.1)),
}
TOKENS = {"decode": 128, "prefill": 4096}
_SWAPPED = "two cells of the repository's table look exchanged, and are taken as if they were"
# By shape, cluster and ranks. Decode: from the paper. Prefill: EP64 from the paper, the others from its repository.
FIGURES: dict[str, dict[str, dict[int, Figure]]] = {
    "decode": {
        "cx7": {8: Figure(52, 65), 16: Figure(110, 186), 32: Figure(155, 267), 64: Figure(190, 311)},
        "efa": {8: Figure(53, 64), 16: Figure(216, 243), 32: Figure(236, 342), 64: Figure(286, 406)},
    },
    "prefill": {
        "cx7": {
            8: Figure(1062.2, 1405.1, _SWAPPED),
            16: Figure(2734.8, 5071.1, _SWAPPED),
            32: Figure(4011.8, 7526.8),
            64: Figure(4680, 8790),
        },
        "efa": {
            8: Figure(1052.4, 1396.7),
            16: Figure(3196.7, 5379.1),
            32: Figure(4619.0, 8271.5),
            64: Figure(5350, 9790),
        },
    },
}
