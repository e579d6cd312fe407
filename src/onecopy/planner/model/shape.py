"""Shape: what the planner must know of a model: its units, and for a transformer the sizes behind its activations.

Made from sizes or from a bare count here; from real models in `describe.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal, NamedTuple

from onecopy.errors import SettingsError
from onecopy.planner.formulas.activations import (
    HIDDEN_COPIES,
    LOSS_BYTES,
    checkpoint_bytes,
    chunked_loss_bytes,
    copies_bytes,
    logits_bytes,
    product_bytes,
)
from onecopy.planner.model.schedule import Unit

Checkpointing = Literal["off", "selective", "units", "units+cpu", "P_a", "P_a+cpu"]

CHECKPOINTING: Final[tuple[Checkpointing, ...]] = ("off", "selective", "units", "units+cpu", "P_a", "P_a+cpu")
"""Nothing recomputed; all but products and attention; one checkpoint a block, whole ("units") or cut over
tensor-parallel ranks ("P_a"), on the device or moved to the host."""


@dataclass(frozen=True)
class Transformer:
    """Sizes of a transformer.

    Attributes:
        copies: of the hidden state that a block keeps for backward, see `activations.HIDDEN_COPIES`.
        sequence: the longest that the model takes; None for any.
        key_value_heads: where they are fewer than ``heads``.
        spreads: whether its blocks are of a kind that onecopy can cut over tensor-parallel ranks.
        chunks: whether its loss can be made in chunks of tokens (`onecopy.chunk_loss`).
        idle: parameters that a token multiplies nothing with: embeddings that are no head too, experts not chosen.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    copies: float = HIDDEN_COPIES["gpt2"]
    sequence: int | None = None
    key_value_heads: int | None = None
    spreads: bool = True
    idle: int = 0
    chunks: bool = True


class Work(NamedTuple):
    """Floating-point operations of one sample, as counted.

    Attributes:
        forward: of one forward.
        backward: of its backward; less than twice the former where weights are frozen.
        tokens: of a sample; None for what has none.
    """

    forward: float
    backward: float
    tokens: int | None


@dataclass(frozen=True)
class Shape:
    """A model.

    Attributes:
        name: for people.
        units: in the order of forward, the root first. Their activations are those of one sample where ``transformer``
            is None, and unused otherwise.
        transformer: None for other models, whose activations were measured.
        work: of those; None where there were no inputs to count it with.
    """

    name: str
    units: tuple[Unit, ...]
    transformer: Transformer | None = None
    work: Work | None = None

    @property
    def timed(self) -> bool:
        """Whether it is known how much it computes."""
        return self.transformer is not None or self.work is not None

    @property
    def rate(self) -> str:
        """What is counted a second."""
        measured = self.transformer is None and (self.work is None or self.work.tokens is None)
        return "samples" if measured else "tokens"

    @cached_property
    def trained(self) -> int:
        """Parameters that are trained."""
        return sum(unit.parameters for unit in self.units)

    @property
    def knows_products(self) -> bool:
        """Whether it is known what selective recomputation would keep."""
        if self.transformer is not None:
            known = [unit.features > 0 for unit in self.units if is_block(unit)]
        else:
            known = [unit.products is not None for unit in self.units if unit.inputs is not None]
        return bool(known) and all(known)

    @property
    def parameters(self) -> int:
        """Ψ, frozen ones included."""
        return sum(unit.all_parameters for unit in self.units)

    @property
    def matrices(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the matrices of hidden layers, which are Muon's."""
        return tuple(shape for unit in self.units for shape in unit.matrices)

    def with_activations(
        self,
        micro_batch: int,
        sequence: int,
        checkpointing: Checkpointing = "off",
        *,
        tensor: int = 1,
        along_sequence: bool = False,
        element_bytes: int = 2,
        loss_bytes: float | None = LOSS_BYTES,
    ) -> list[Unit]:
        """The units with the bytes that they keep for backward on one rank.

        Args:
            micro_batch: samples.
            sequence: tokens of each; other models than transformers have none.
            checkpointing: what is kept of each block instead of all.
            tensor: M, ranks that share each block.
            along_sequence: what stands between blocks is cut along the sequence, logits along the vocabulary.
            element_bytes: of activations.
            loss_bytes: of the loss's temporaries for each logit; None for a loss that is made in chunks.
        """
        sizes = self.transformer
        if sizes is None:
            scale = micro_batch * element_bytes / 2
            return [checkpointed(_scaled(unit, scale), checkpointing, tensor) for unit in self.units]
        one = (micro_batch, sequence, sizes.hidden)
        whole = copies_bytes(
            *one, sizes.copies, element_bytes, tensor_parallel=tensor, sequence_parallel=along_sequence
        )
        parts = tensor if along_sequence else 1
        inputs = checkpoint_bytes(*one, 1, element_bytes=element_bytes) / parts
        words = sizes.vocabulary // parts
        if loss_bytes is None:
            head = chunked_loss_bytes(micro_batch, sequence, words, sizes.hidden, element_bytes)
        else:
            head = logits_bytes(micro_batch, sequence, words, element_bytes, loss_bytes=loss_bytes)
        found = []
        for unit in self.units:
            if is_block(unit):
                kept = product_bytes(*one, unit.features, element_bytes, tensor_parallel=tensor)
                # Backward needs no product that is added to the hidden state, and no query and key before rotation.
                state = checkpoint_bytes(*one, 1, element_bytes=element_bytes)
                repeated = max(0.0, whole - kept + 2 * state + 2 * state / tensor)
                unit = replace(unit, activations=whole, inputs=inputs)
                if unit.features:
                    unit = replace(unit, products=kept, repeated=repeated)
                found.append(checkpointed(unit, checkpointing, tensor))
            else:
                found.append(replace(unit, activations=0.0, working=0.0, logits=0.0 if unit.name else head))
        return found


def is_block(unit: Unit) -> bool:
    """Whether the unit is one of a list of repeated blocks: its name ends with a number."""
    return unit.name.rpartition(".")[2].isdigit()


def checkpointed(unit: Unit, checkpointing: Checkpointing, tensor: int = 1) -> Unit:
    """The unit with a checkpoint around it: it keeps its inputs, and the rest only while its backward runs.

    Selective recomputation keeps the products' outputs too, where they are known.

    Args:
        tensor: M, ranks over which P_a cuts what is kept (ZeRO §6.1).
    """
    if checkpointing == "off" or unit.inputs is None or (checkpointing == "selective" and unit.products is None):
        return unit
    kept = 0.0 if checkpointing.endswith("+cpu") else kept_bytes(unit, checkpointing, tensor)
    working = unit.repeated if checkpointing == "selective" else unit.activations
    return replace(unit, activations=0.0, checkpoint=kept, working=working)


def kept_bytes(unit: Unit, checkpointing: Checkpointing, tensor: int) -> float:
    """Bytes of the unit's inputs that one rank keeps, wherever they are, and of its products where those are kept."""
    if checkpointing == "off" or unit.inputs is None:
        return 0.0
    if checkpointing == "selective":
        return unit.inputs + (unit.products or 0.0)
    return unit.inputs / tensor if checkpointing.startswith("P_a") else unit.inputs


def _scaled(unit: Unit, scale: float) -> Unit:
    inputs, products = (None if size is None else size * scale for size in (unit.inputs, unit.products))
    return replace(
        unit,
        activations=unit.activations * scale,
        inputs=inputs,
        products=products,
        repeated=unit.repeated * scale,
        logits=unit.logits * scale,
    )


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
        SettingsError: if a size is not positive, or heads do not divide the hidden size.
    """
    if min(layers, hidden, vocabulary) < 1:
        raise SettingsError(f"layers, hidden and vocabulary must be positive; found {layers}, {hidden}, {vocabulary}")
    if heads is not None and (heads < 1 or hidden % heads):
        raise SettingsError(f"heads must divide the hidden size of {hidden}; found {heads}")
    wide = intermediate or 4 * hidden
    block = (
        *(3 * hidden * hidden, 3 * hidden, hidden * hidden, hidden),
        *(hidden * wide, wide, wide * hidden, hidden),
        *(hidden, hidden, hidden, hidden),
    )
    root = (vocabulary * hidden, hidden, hidden)
    matrices = ((3 * hidden, hidden), (hidden, hidden), (wide, hidden), (hidden, wide))
    features = sum(out for out, _ in matrices)
    units = (
        Unit("", root),
        *(Unit(f"layers.{i}", block, matrices=matrices, features=features) for i in range(layers)),
    )
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
    # Four matrices of a block's width, as a GPT has.
    matrices = ((each // (4 * hidden), hidden),) * 4
    blocks = (Unit(f"layers.{i}", (each,), matrices=matrices, features=9 * hidden) for i in range(layers))
    units = (Unit("", (vocabulary * hidden + rest,)), *blocks)
    # How many heads is not known: so many that every power of two up to there divides them.
    heads = 1 << max(1, hidden // 128).bit_length() - 1
    sizes = Transformer(layers, hidden, heads, vocabulary)
    return Shape(name or "a number of parameters, taken as a GPT", units, sizes)


def largest(units: Sequence[Unit]) -> int:
    """Parameters of the largest unit."""
    return max((unit.all_parameters for unit in units), default=0)
