"""Machine: what a plan is for: GPUs, their memory and speed, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import log2
from typing import Final, NamedTuple

from onecopy.errors import SettingsError
from onecopy.planner.formulas.calibrated import CROWDING, LATENCY, LINK_EFFICIENCY, utilisation
from onecopy.planner.formulas.time import Link


class Gpu(NamedTuple):
    """A device, by its vendor's data sheet.

    Attributes:
        memory: bytes.
        peak: dense 16-bit floating-point operations a second.
        intra: bytes a second that it sends to others of its node, in one direction.
        memory_bandwidth: bytes a second.
        host: bytes a second to host memory, in one direction.
    """

    memory: float
    peak: float
    intra: float
    memory_bandwidth: float
    host: float


GPUS: Final = {
    "v100": Gpu(32e9, 125e12, 150e9, 0.9e12, 12e9),
    "a100": Gpu(80e9, 312e12, 300e9, 2.0e12, 25e9),
    "a100-40": Gpu(40e9, 312e12, 300e9, 1.55e12, 25e9),
    "a800": Gpu(80e9, 312e12, 200e9, 2.0e12, 25e9),
    "h100": Gpu(80e9, 989e12, 450e9, 3.35e12, 50e9),
    "h200": Gpu(141e9, 989e12, 450e9, 4.8e12, 50e9),
    "b200": Gpu(180e9, 2250e12, 900e9, 8.0e12, 50e9),
    "l4": Gpu(24e9, 121e12, 25e9, 0.3e12, 25e9),
    "l40s": Gpu(48e9, 362e12, 25e9, 0.86e12, 25e9),
    "a10": Gpu(24e9, 125e12, 25e9, 0.6e12, 25e9),
    "rtx3090": Gpu(24e9, 71e12, 25e9, 0.94e12, 25e9),
    "rtx4090": Gpu(24e9, 165e12, 25e9, 1.0e12, 25e9),
}


@dataclass(frozen=True)
class Machine:
    """Where training is to run.

    Attributes:
        gpus: on all nodes.
        nodes: hosts.
        gpu: its kind.
        link: bytes a second that each GPU can send to other nodes; with one network card a node, the card's by the
            number of GPUs.
        host_memory: bytes of one host; None if it is not known.
        host_bandwidth: bytes a second of one host's memory.
        nvme_bandwidth: bytes a second of one host's disks.
        computes_on_host: ranks compute in the host's own memory, so nothing is gained by moving states there.
        latency: seconds that a round of a collective costs.
        utilisation: share of the peak that computing reaches; None goes by the model's width.
        link_efficiency: share of a link's bandwidth that collectives reach.
        crowding: how much slower a collective is for every doubling of the nodes: 1 / (1 + crowding · log2(nodes)).
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

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.nodes < 1 or self.gpus % self.nodes:
            raise SettingsError(f"gpus ({self.gpus}) must be a positive multiple of nodes ({self.nodes})")

    @property
    def per_node(self) -> int:
        return self.gpus // self.nodes

    def flops(self, hidden: int | None) -> float:
        """Operations a second that one GPU reaches with a model of that width; 2048 stands for unknown ones."""
        return self.gpu.peak * (self.utilisation or utilisation(hidden or 2048))

    def tensor_link(self) -> Link:
        """The link of ranks that share a model; they are of one node."""
        return self._link(self.gpu.intra, 1)

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


def gpu_of(name: str, *, memory: float | None = None, intra: float | None = None) -> Gpu:
    """A GPU by name, some of its figures replaced.

    Raises:
        SettingsError: for a name that is not known; it offers the nearest.
    """
    key = name.lower().replace(" ", "").replace("_", "-")
    if key not in GPUS:
        close = get_close_matches(key, GPUS, n=1, cutoff=0.0)[0]
        raise SettingsError(f"no figures are known of GPU {name!r}; did you mean {close!r}? Known: {', '.join(GPUS)}")
    found = GPUS[key]
    return found._replace(memory=memory or found.memory, intra=intra or found.intra)


def with_link(machine: Machine, bandwidth: float) -> Machine:
    """The machine with another link: between nodes, or within the only one."""
    if machine.nodes > 1:
        return replace(machine, link=bandwidth)
    return replace(machine, gpu=machine.gpu._replace(intra=bandwidth))
