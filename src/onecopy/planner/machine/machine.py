"""Machine: what a plan is for: GPUs, their memory and speed, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import log2
from typing import Final, NamedTuple

from onecopy.errors import SettingsError
from onecopy.planner.formulas.buffers import ALLOCATOR_SLACK, CUDA_CONTEXT_BYTES
from onecopy.planner.formulas.calibrated import (
    CROWDING,
    LATENCY,
    LINK_EFFICIENCY,
    TENSOR_EFFICIENCY,
    TENSOR_LATENCY,
    balance_factor,
    utilisation,
)
from onecopy.planner.formulas.time import Link


class Gpu(NamedTuple):
    """A device: memory as torch shows it, speeds by its vendor's data sheet.

    Attributes:
        memory: bytes of `torch.cuda.mem_get_info`'s total, some per cent away from the round number on the box.
        peak: dense bf16 floating-point operations a second, sums in fp32; fp16 where there is no bf16.
        intra: bytes a second that it sends to others of its node, in one direction.
        memory_bandwidth: bytes a second.
        host: bytes a second to host memory, in one direction.
        bf16: whether it computes in bf16; V100 and T4 do not.
        name: for people.
        reach: the share of its peak that computing reaches, by an H100's; None where no runs tell (`balance_factor`).
    """

    memory: float
    peak: float
    intra: float
    memory_bandwidth: float
    host: float
    bf16: bool = True
    name: str = ""
    reach: float | None = None


_GIB: Final = 2.0**30

GPUS: Final = {
    "v100": Gpu(31.7 * _GIB, 125e12, 150e9, 0.9e12, 12e9, False, "V100 32 GB"),
    "t4": Gpu(14.5 * _GIB, 65e12, 12e9, 0.32e12, 12e9, False, "T4"),
    "a100": Gpu(79.2 * _GIB, 312e12, 300e9, 2.0e12, 25e9, True, "A100 80 GB", 1.46),
    "a100-40": Gpu(39.4 * _GIB, 312e12, 300e9, 1.55e12, 25e9, True, "A100 40 GB", 1.37),
    "a800": Gpu(79.2 * _GIB, 312e12, 200e9, 2.0e12, 25e9, True, "A800 80 GB", 1.46),
    "h100": Gpu(79.1 * _GIB, 989e12, 450e9, 3.35e12, 50e9, True, "H100 SXM 80 GB", 1.0),
    "h200": Gpu(139.8 * _GIB, 989e12, 450e9, 4.8e12, 50e9, True, "H200 SXM"),
    "b200": Gpu(178.3 * _GIB, 2250e12, 900e9, 7.7e12, 50e9, True, "B200"),
    "l4": Gpu(22.0 * _GIB, 121e12, 25e9, 0.3e12, 25e9, True, "L4"),
    "l40s": Gpu(44.4 * _GIB, 362e12, 25e9, 0.864e12, 25e9, True, "L40S"),
    "a10": Gpu(22.1 * _GIB, 125e12, 25e9, 0.6e12, 25e9, True, "A10"),
    "rtx3090": Gpu(23.6 * _GIB, 71e12, 25e9, 0.936e12, 25e9, True, "RTX 3090"),
    "rtx4090": Gpu(23.6 * _GIB, 165e12, 25e9, 1.008e12, 25e9, True, "RTX 4090"),
    "rtx5090": Gpu(31.3 * _GIB, 209.5e12, 50e9, 1.792e12, 50e9, True, "RTX 5090"),
    "mi300x": Gpu(191.5 * _GIB, 1307e12, 448e9, 5.3e12, 50e9, True, "MI300X"),
    "gaudi2": Gpu(94.6 * _GIB, 432e12, 262e9, 2.45e12, 25e9, True, "Gaudi 2"),
    "gaudi3": Gpu(126.5 * _GIB, 1835e12, 525e9, 3.7e12, 50e9, True, "Gaudi 3"),
}
"""Memory: the "total capacity" of users' out-of-memory messages, rounded down. Speeds: data sheets of NVIDIA, AMD and
Intel, without sparsity; bandwidth of B200: 7680 bits at 3996 MHz. Reach: median of the same model on both kinds, 8 GPUs
(MosaicML's llm-foundry; an A800 is an A100 with a slower link)."""

ALIASES: Final = {"4090": "rtx4090", "5090": "rtx5090", "3090": "rtx3090", "a100-80": "a100", "h100-80": "h100"}
"""Other names that people give."""


HOST_TIMES: Final = 2.0
"""Memory of a host by that of its GPUs, where nothing is said. Hosts of 8 GPUs have 2 to 4 times as much."""


@dataclass(frozen=True)
class Machine:
    """Where training is to run.

    Attributes:
        gpus: on all nodes.
        nodes: hosts.
        gpu: its kind.
        link: bytes a second that each GPU can send to other nodes; with one network card a node, the card's by the
            number of GPUs.
        host_memory: bytes of one host; None if it is not known (`host_limit`).
        host_bandwidth: bytes a second of one host's memory.
        nvme_bandwidth: bytes a second of one host's disks.
        computes_on_host: ranks compute in the host's own memory, so nothing is gained by moving states there.
        latency: seconds that a round of a collective costs.
        utilisation: share of the peak that computing reaches; None goes by the model's width and the GPU.
        link_efficiency: share of a link's bandwidth that collectives reach.
        crowding: how much slower a collective is for every doubling of the nodes: 1 / (1 + crowding · log2(nodes)).
        slack: share of live bytes that an allocator holds beyond them.
        context: bytes that a rank holds before any tensor.
    """

    gpus: int
    gpu: Gpu
    nodes: int = 1
    link: float = 50e9
    host_memory: float | None = None
    host_bandwidth: float = 200e9
    nvme_bandwidth: float = 3e9
    computes_on_host: bool = False
    latency: float = LATENCY
    utilisation: float | None = None
    link_efficiency: float = LINK_EFFICIENCY
    crowding: float = CROWDING
    slack: float = ALLOCATOR_SLACK
    context: float = CUDA_CONTEXT_BYTES

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.nodes < 1 or self.gpus % self.nodes:
            raise SettingsError(f"gpus ({self.gpus}) must be a positive multiple of nodes ({self.nodes})")

    @property
    def host_limit(self) -> float:
        """Bytes of one host, taken for `HOST_TIMES` its GPUs' memory if it is not known."""
        return self.host_memory or HOST_TIMES * self.gpu.memory * self.per_node

    @property
    def per_node(self) -> int:
        return self.gpus // self.nodes

    def flops(self, hidden: int | None) -> float:
        """Operations a second that one GPU reaches with a model of that width; 2048 stands for unknown ones."""
        reach = self.gpu.reach or balance_factor(self.gpu.peak, self.gpu.memory_bandwidth)
        return self.gpu.peak * (self.utilisation or utilisation(hidden or 2048) * reach)

    def tensor_link(self) -> Link:
        """The link of ranks that share a model; they are of one node."""
        return Link(self.gpu.intra * TENSOR_EFFICIENCY, TENSOR_LATENCY)

    def shard_link(self, shard: int, tensor: int = 1) -> Link:
        """The link of ``shard`` neighbours: within a node, or over all network cards that they have in one at once.

        Args:
            tensor: GPUs that share a model; only every so many is a neighbour.
        """
        own = max(1, self.per_node // tensor)
        nodes = max(1, shard // own)
        bandwidth = self.gpu.intra if nodes == 1 else min(self.gpu.intra, own * self.link)
        return self._link(bandwidth, nodes)

    def replicate_link(self, shard: int, tensor: int = 1) -> Link:
        """The link of ranks that hold the same slice when ``shard`` neighbours hold a copy: a network card each."""
        if self.nodes == 1:
            return self._link(self.gpu.intra, 1)
        return self._link(self.link, max(1, self.gpus // max(shard * tensor, self.per_node)))

    def _link(self, bandwidth: float, nodes: int) -> Link:
        return Link(bandwidth * self.link_efficiency / (1 + self.crowding * log2(nodes)), self.latency)

    def named_link(self, shard: int) -> str:
        """Which link carries what ``shard`` neighbouring GPUs share."""
        return "the link within a node" if shard <= self.per_node else "the link between nodes"


def gpu_of(name: str, *, memory: float | None = None, intra: float | None = None, peak: float | None = None) -> Gpu:
    """A GPU by name, some of its figures replaced.

    Raises:
        SettingsError: for a name that is not known; it offers the nearest.
    """
    key = name.lower().replace(" ", "").replace("_", "-")
    key = ALIASES.get(key, key)
    if key not in GPUS:
        close = get_close_matches(key, GPUS, n=1, cutoff=0.0)[0]
        raise SettingsError(f"no figures are known of GPU {name!r}; did you mean {close!r}? Known: {', '.join(GPUS)}")
    found = GPUS[key]
    return found._replace(memory=memory or found.memory, intra=intra or found.intra, peak=peak or found.peak)


def gpu_named(name: str) -> Gpu | None:
    """The GPU whose name, as its driver reports it, holds the longest of ours; None if none does.

    An A100's name says its memory ("NVIDIA A100-SXM4-40GB"), an H100's too, a V100's and an RTX's need not.
    """
    text = name.lower().replace(" ", "")
    if "a100" in text and "40gb" in text:
        return GPUS["a100-40"]
    # "l4" is part of "l40s".
    found = [key for key in GPUS if key in text]
    return GPUS[max(found, key=len)] if found else None


def with_link(machine: Machine, bandwidth: float) -> Machine:
    """The machine with another link: between nodes, or within the only one."""
    if machine.nodes > 1:
        return replace(machine, link=bandwidth)
    return replace(machine, gpu=machine.gpu._replace(intra=bandwidth))
