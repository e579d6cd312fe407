"""Schedule: what is planned for: units with their sizes, and the engine's settings that decide over memory.

What is held at each moment of a step follows from the two, see `step.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal

from onecopy.observe.categories import CATEGORIES as MEASURED
from onecopy.planner.formulas.buffers import staging_limit
from onecopy.sharding.bucket.layout import ALIGNMENT, Layout
from onecopy.stage import Stage

Phase = Literal["load", "forward", "backward", "step", "save"]
Sizes = dict[str, float]

CATEGORIES: Final = (
    *MEASURED,
    "logits",
    "optimizer_temporaries",
    "other",
)


@dataclass(frozen=True)
class Unit:
    """A scope gathered as one.

    Attributes:
        name: "" is the root, whose forward contains all others.
        numels: elements of each parameter that is trained.
        frozen: of each that is not: it has no gradients and no optimizer states, and a bucket of its own.
        frozen_width: bytes of an element of the latter's slices, which keep the dtype that they were built in.
        activations: bytes that its forward keeps for backward, of one micro-batch.
        checkpoint: bytes of its inputs that a checkpoint around it keeps on the device, likewise.
        working: bytes that its backward recomputes and keeps for a moment; 0 without a checkpoint around it.
        inputs: bytes of its inputs, of which a checkpoint would keep all or a part; None where there is never one.
        products: bytes of what its matrix products and fused attention return, which selective recomputation keeps
            beside the inputs; None where it is not known.
        repeated: of ``activations``, bytes of what is no such product, which selective recomputation computes again.
        features: numbers that its matrix products make of each token, where bytes follow from sizes; 0 if not known.
        matrices: shapes of the trained matrices of hidden layers, which are Muon's; with equal ``numels`` they are.
        logits: of the root, bytes kept after its last inner unit: the head's and the loss's, gone first in backward.
    """

    name: str
    numels: tuple[int, ...]
    activations: float = 0.0
    checkpoint: float = 0.0
    working: float = 0.0
    inputs: float | None = None
    products: float | None = None
    repeated: float = 0.0
    features: int = 0
    logits: float = 0.0
    frozen: tuple[int, ...] = ()
    frozen_width: int = 4
    matrices: tuple[tuple[int, ...], ...] = field(default=(), compare=False)

    @property
    def parameters(self) -> int:
        """Those that are trained."""
        return sum(self.numels)

    @property
    def all_parameters(self) -> int:
        return sum(self.numels) + sum(self.frozen)


@dataclass(frozen=True)
class Widths:
    """Bytes of an element, as `onecopy.Precision` names them."""

    compute: int = 2
    reduce: int = 2
    accumulate: int = 4
    master: int = 4

    @staticmethod
    def of(precision: str) -> Widths:
        """Those of "bf16", "bf16-lean", "fp16" or "fp32"."""
        return {"fp32": Widths(4, 4), "bf16-lean": Widths(accumulate=2)}.get(precision, Widths())

    @property
    def gradient(self) -> int:
        """Of what `p.grad` holds: masters that are narrower than sums take these in their own dtype."""
        return min(self.accumulate, self.master)


@dataclass(frozen=True)
class Schedule:
    """What of the engine's settings decides over memory.

    Attributes:
        stage: 0 to 3.
        shard: N, ranks over which slices lie; the engine takes 1 at stage 0.
        replicate: copies of each slice.
        micro_batches: g.
        prefetch: units gathered ahead.
        prefetch_bytes: more of them while all hold so few bytes.
        widths: bytes of elements.
        optimizer_tensors: states of a parameter's shape in the master dtype; 2 for Adam, fewer where Muon has its part.
        implementation: of the optimizer: "foreach", "fused" or "for-loop".
        native: the backend has a reduce-scatter of its own (NCCL), and buffers are lent for one of them; gloo's
            transport stages what peers send, too, and keeps them.
        bucket_bytes: most bytes of one communication buffer, as `onecopy.shard` takes it; None for its default.
    """

    stage: int
    shard: int
    replicate: int = 1
    micro_batches: int = 1
    prefetch: int = 1
    widths: Widths = Widths()
    optimizer_tensors: float = 2
    implementation: str = "fused"
    native: bool = True
    bucket_bytes: int | None = None
    prefetch_bytes: int = 0

    @property
    def slices(self) -> int:
        """Into how many slices a bucket is cut."""
        return self.shard if Stage.of(self.stage).shards_optimizer else 1

    @property
    def staging_limit(self) -> float:
        """Most bytes of the two communication buffers."""
        return staging_limit(native=self.native) if self.bucket_bytes is None else 2.0 * self.bucket_bytes

    @property
    def copies(self) -> int:
        return self.replicate if Stage.of(self.stage).shards_optimizer else self.shard * self.replicate


def layout(unit: Unit, plan: Schedule) -> Layout:
    """How the unit's parameters lie; with N slices, each a multiple of 8 elements for every copy."""
    return _layout(unit.numels, plan.slices, ALIGNMENT * plan.copies)


def frozen_layout(unit: Unit, plan: Schedule) -> Layout:
    """How the unit's frozen parameters lie."""
    return _layout(unit.frozen, plan.slices, ALIGNMENT * plan.copies)


def padded_numels(unit: Unit, plan: Schedule) -> tuple[int, int]:
    """Elements of the flat buffers of what is trained in the unit and of what is frozen, padding included."""
    return (
        layout(unit, plan).padded_numel if unit.numels else 0,
        frozen_layout(unit, plan).padded_numel if unit.frozen else 0,
    )


# Blocks are alike: one layout serves them all, over all options of a search.
_layout = lru_cache(maxsize=4096)(Layout)


@lru_cache(maxsize=4096)
def own_numel(numels: tuple[int, ...], slices: int, multiple: int) -> int:
    """Elements of parameters, without padding, in the first rank's slice."""
    return sum(part.numel for part in _layout(numels, slices, multiple).segments(0))
