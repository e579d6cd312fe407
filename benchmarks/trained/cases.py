"""Cases: what is trained in a comparison, by name, with its data and how closely losses must agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn

from trained.gpt import GPT, Shape
from trained.nets import HIDDEN, Llama, Narrow, ResNet50, lora_gpt

SHAPES: Final = {
    "3m": Shape(layers=4, hidden=256, heads=4, vocabulary=1024),
    "30m": Shape(),
    "120m": Shape(layers=12, hidden=768, heads=12, vocabulary=32768),
}
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}

Batch = tuple[Tensor, ...]
"""What a model takes in one micro-batch."""


@dataclass(frozen=True)
class Case:
    """A model and its data.

    Attributes:
        build: makes the model.
        draw: a batch of so many samples of such a size: tokens of a text, pixels along a side.
        samples: of one rank in one micro-batch.
        size: see ``draw``.
        tolerance: by which share losses of two systems may differ, in fp32.
        small: makes the same model with a single block; None if it has no such form.
    """

    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator, int, int], Batch]
    samples: int
    size: int
    tolerance: float = 1e-3
    small: Callable[[], nn.Module] | None = None


def tokens(vocabulary: int) -> Callable[[torch.Generator, int, int], Batch]:
    """Draws texts of ``size`` tokens, and for each token the next one."""

    def draw(generator: torch.Generator, samples: int, size: int) -> Batch:
        text = torch.randint(0, vocabulary, (samples, size + 1), generator=generator)
        return text[:, :-1], text[:, 1:]

    return draw


def _images(generator: torch.Generator, samples: int, size: int) -> Batch:
    return torch.randn(samples, 3, size, size, generator=generator), torch.randint(
        0, 1000, (samples,), generator=generator
    )


def _vectors(generator: torch.Generator, samples: int, size: int) -> Batch:
    return (torch.randn(samples, size, HIDDEN, generator=generator),)


def _gpt(shape: Shape) -> Case:
    small = replace(shape, layers=1)
    return Case(lambda: GPT(shape), tokens(shape.vocabulary), 2, 128, small=lambda: GPT(small))


CASES: Final = {
    **{f"gpt-{name}": _gpt(shape) for name, shape in SHAPES.items()},
    "llama": Case(Llama, tokens(65536), 1, 64, small=lambda: Llama(layers=1)),
    "narrow": Case(lambda: Narrow("block", 200), _vectors, 1, 4, small=lambda: Narrow("block", 1)),
    "resnet50": Case(ResNet50, _images, 4, 64, tolerance=2e-2),
    "lora": Case(
        lambda: lora_gpt(SHAPES["30m"]),
        tokens(SHAPES["30m"].vocabulary),
        2,
        128,
        small=lambda: lora_gpt(replace(SHAPES["30m"], layers=1)),
    ),
}


def count(case: Case) -> tuple[int, int]:
    """Parameters of a case's model, and the trainable ones among them."""
    with torch.device("meta"):
        parameters = list(case.build().parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
