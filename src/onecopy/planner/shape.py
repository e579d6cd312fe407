"""Shape: what the planner must know of a model: its units, and for a transformer the sizes behind its activations.

Made from sizes or from a bare count here; from real models in `describe.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from onecopy.errors import SettingsError
from onecopy.planner.activations import HIDDEN_COPIES, LOGITS_BYTES, checkpoint_bytes, copies_bytes, logits_bytes
from onecopy.planner.step import Unit

Checkpointing = Literal["off", "units", "P_a", "P_a+cpu"]

CHECKPOINTING: Final[tuple[Checkpointing, ...]] = ("off", "units", "P_a", "P_a+cpu")
"""Nothing recomputed; one checkpoint a block; and that partitioned over tensor-parallel ranks, or moved to the host."""


@dataclass(frozen=True)
class Transformer:
    """Sizes of a transformer.

    Attributes:
        copies: of the hidden state that a block keeps for backward, see `activations.HIDDEN_COPIES`.
        sequence: the longest that the model takes; None for any.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    copies: float = HIDDEN_COPIES["gpt2"]
    sequence: int | None = None


@dataclass(frozen=True)
class Shape:
    """A model.

    Attributes:
        name: for people.
        units: in the order of forward, the root first. Their activations are those of one sample where ``transformer``
            is None, and unused otherwise.
        transformer: None for other models, whose activations were measured.
    """

    name: str
    units: tuple[Unit, ...]
    transformer: Transformer | None = None

    @property
    def parameters(self) -> int:
        """Ψ."""
        return sum(unit.parameters for unit in self.units)

    def with_activations(
        self,
        micro_batch: int,
        sequence: int,
        checkpointing: Checkpointing = "off",
        *,
        model_parallel: int = 1,
        element_bytes: int = 2,
    ) -> list[Unit]:
        """The units with the bytes that they keep for backward.

        Args:
            micro_batch: samples.
            sequence: tokens of each; other models than transformers have none.
            checkpointing: what is kept of each block instead of all.
            model_parallel: M, ranks over which P_a partitions.
            element_bytes: of activations.
        """
        sizes = self.transformer
        if sizes is None:
            scale = micro_batch * element_bytes / 2
            return [_measured(unit, scale, checkpointing) for unit in self.units]
        whole = copies_bytes(micro_batch, sequence, sizes.hidden, sizes.copies, element_bytes)
        each = checkpoint_bytes(
            micro_batch,
            sequence,
            sizes.hidden,
            1,
            model_parallel=model_parallel,
            partitioned=checkpointing.startswith("P_a"),
            on_cpu=checkpointing == "P_a+cpu",
            element_bytes=element_bytes,
        )
        blocks = {unit.name for unit in self.units if is_block(unit)}
        head = logits_bytes(micro_batch, sequence, sizes.vocabulary, each=LOGITS_BYTES * max(1, element_bytes / 4 * 2))
        found = []
        for unit in self.units:
            if unit.name in blocks:
                kept = (whole, 0.0) if checkpointing == "off" else (each, whole)
                found.append(replace(unit, activations=kept[0], working=kept[1]))
            else:
                found.append(replace(unit, activations=0.0, working=0.0, logits=0.0 if unit.name else head))
        return found


def is_block(unit: Unit) -> bool:
    """Whether the unit is one of a list of repeated blocks: its name ends with a number."""
    return unit.name.rpartition(".")[2].isdigit()


def _measured(unit: Unit, scale: float, checkpointing: Checkpointing) -> Unit:
    if checkpointing == "off" or not is_block(unit):
        return replace(unit, activations=unit.activations * scale, logits=unit.logits * scale)
    # What enters a block is not known apart; a tenth of what it keeps is on the careful side for a residual block.
    kept = unit.activations * scale
    return replace(unit, activations=kept / 10, working=kept)


def from_sizes(
    layers: int,
    hidden: int,
    *,
    heads: int | None = None,
    vocabulary: int = 50_304,
    intermediate: int | None = None,
    name: str | None = None,
) -> Shape:
    """A GPT of those sizes, its head tied to the embedding: 12h² + 13h parameters a layer, as Megatron counts.

    Raises:
        SettingsError: if a size is not positive.
    """
    if min(layers, hidden, vocabulary) < 1:
        raise SettingsError(f"layers, hidden and vocabulary must be positive; found {layers}, {hidden}, {vocabulary}")
    wide = intermediate or 4 * hidden
    block = (
        *(3 * hidden * hidden, 3 * hidden, hidden * hidden, hidden),
        *(hidden * wide, wide, wide * hidden, hidden),
        *(hidden, hidden, hidden, hidden),
    )
    root = (vocabulary * hidden, hidden, hidden)
    units = (Unit("", root), *(Unit(f"layers.{i}", block) for i in range(layers)))
    sizes = Transformer(layers, hidden, heads or max(1, hidden // 128), vocabulary)
    return Shape(name or f"GPT of {layers} layers, hidden {hidden}", units, sizes)


def from_count(parameters: float, name: str | None = None) -> Shape:
    """A GPT of about as many parameters, exactly so many in all: hidden = 128 · layers, as models of 1B to 1T have.

    Raises:
        SettingsError: if there are fewer than a thousand.
    """
    if parameters < 1000:
        raise SettingsError(f"a model needs at least 1000 parameters; found {parameters:g}")
    hidden = max(8, round((128 * parameters / 12) ** (1 / 3) / 8) * 8)
    layers = max(1, round(parameters / (12 * hidden * hidden)))
    vocabulary = max(1, min(50_304, int(parameters / (4 * hidden))))
    each = int((parameters - vocabulary * hidden) // layers)
    rest = int(parameters - vocabulary * hidden - each * layers)
    units = (Unit("", (vocabulary * hidden + rest,)), *(Unit(f"layers.{i}", (each,)) for i in range(layers)))
    sizes = Transformer(layers, hidden, max(1, hidden // 128), vocabulary)
    return Shape(name or f"{parameters:.4g} parameters, taken as a GPT", units, sizes)


def largest(units: Sequence[Unit]) -> int:
    """Parameters of the largest unit."""
    return max((unit.parameters for unit in units), default=0)
