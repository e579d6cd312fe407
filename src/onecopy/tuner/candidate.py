"""Candidate: one setting that may be tried, and which of two is sure to need at least as much memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from onecopy.planner.answer.estimate import Offload, Option
from onecopy.planner.model.shape import Checkpointing
from onecopy.planner.quantities import gigabytes
from onecopy.stage import Stage

_STATES_ALONE: Final = ("build", "load")
"""Phases in which nothing depends on the samples of a micro-batch."""


@dataclass(frozen=True)
class Candidate:
    """A setting.

    Attributes:
        stage: 0 to 3.
        micro_batch: samples of one rank in one micro-batch.
        accumulate: micro-batches in a step.
        ranks: all that take part.
        checkpointing: what is kept for backward, see `planner.model.shape.CHECKPOINTING`.
        offload: where model states rest, see `planner.answer.estimate.OFFLOADS`.
        replicate: copies of the model states; the shard degree is ranks / tensor / replicate.
        tensor: ranks that share each block.
        prefetch: units gathered ahead.
        bucket_bytes: most bytes of one communication buffer; 0 is the device's default.
        units: what is gathered as one: "auto", "one", or names of classes or modules with commas between them.
    """

    stage: int
    micro_batch: int
    accumulate: int
    ranks: int
    checkpointing: Checkpointing = "off"
    offload: Offload = "none"
    replicate: int = 1
    tensor: int = 1
    prefetch: int = 1
    bucket_bytes: int = 0
    units: str = "auto"

    @property
    def shard(self) -> int:
        """Ranks over which slices lie, as the planner counts them: at stage 0 those that hold all."""
        return self.ranks // self.tensor // self.replicate

    @property
    def samples(self) -> int:
        """Samples in a step over all ranks."""
        return self.ranks // self.tensor * self.micro_batch * self.accumulate

    def option(self) -> Option:
        """The same for the planner, which knows no buffers and no sizes of units."""
        return Option(
            self.stage,
            self.micro_batch,
            self.accumulate,
            self.checkpointing,
            self.offload,
            self.shard,
            self.replicate,
            self.prefetch,
            self.tensor,
        )

    def words(self) -> str:
        """The setting in one line; what is as usual is left out."""
        parts = [self.option().words()]
        if self.units != "auto":
            parts.append("one unit" if self.units == "one" else f"units {self.units}")
        if self.prefetch != 1:
            parts.append(f"prefetch {self.prefetch}")
        if self.bucket_bytes:
            parts.append(f"buffers of {gigabytes(self.bucket_bytes)}")
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """For files; `from_dict` reads it."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Candidate:
        """What `as_dict` gave."""
        return Candidate(**values)


def needs_as_much(this: Candidate, other: Candidate, phase: str) -> bool:
    """Whether ``this`` is sure to hold at least as much as ``other`` in ``phase``, by what each setting does.

    It is asked of settings whose ``other`` ran out of memory in that phase. Settings of which each spares something
    that the other does not are not compared.

    Args:
        phase: as probes name it; while a model is built and cut, samples do not matter.
    """
    if (this.units, this.ranks, this.bucket_bytes) != (other.units, other.ranks, other.bucket_bytes):
        return False
    spares_no_more = (
        this.stage <= other.stage and _slices(this) <= _slices(other) and this.tensor <= other.tensor
    ) and this.offload in ("none", other.offload)
    if phase in _STATES_ALONE:
        return spares_no_more
    return (
        spares_no_more
        and this.micro_batch >= other.micro_batch
        # Gradients of earlier micro-batches are held beside the next one's activations.
        and (this.accumulate > 1) >= (other.accumulate > 1)
        and this.prefetch >= other.prefetch
        and _keeps_as_much(this.checkpointing, other.checkpointing)
    )


def _keeps_as_much(this: Checkpointing, other: Checkpointing) -> bool:
    """Whether ``this`` keeps on the device what ``other`` does: outputs of products are kept beside whole inputs."""
    return this in ("off", other) or (this == "selective" and other != "off")


def _slices(candidate: Candidate) -> int:
    return candidate.shard if Stage.of(candidate.stage).shards_optimizer else 1
