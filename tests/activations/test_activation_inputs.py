"""What activation checkpoints are given: inputs that differ or change, and units of any structure.

Oracles: plain PyTorch, its own checkpoint, and the same run without checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import onecopy
from models import seeded, token_batches, vector_batches
from odd_forwards import (
    InDicts,
    InPlaceAfter,
    NoInputGradient,
    OnlyDeepOutput,
    ParameterReturned,
    Recursive,
    Signatures,
)
from odd_models import Reused
from one_fork import Forked, On, one_fork
from onecopy.activations import Activations, checkpoint
from onecopy.errors import UsageError
from onecopy.observe.ledger import Ledger
from oracle import OPTIMIZERS, Run, assert_trains_like_twin, part, train
from tensor_parallel_models import DIM, Block, Gpt, full_weights, mesh_of, parallelize

# --- inputs that differ between ranks, or change


def _tensor_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@one_fork
def test_large_elements_that_are_alike_do_not_hide_others_that_are_not(dtype: torch.dtype) -> Forked:
    """As few channels do whose activations are a hundred times larger. Oracle: the function without a checkpoint."""

    def run(rank: int) -> int:
        ledger = Ledger()
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank))
        x[:, ::3] = 100.0
        x[:, 1::3] = torch.inf
        x = x.to(dtype).requires_grad_()
        checkpoint(torch.tanh, _tensor_mesh(), ledger=ledger)(x * 1).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.autograd.grad(torch.tanh(x * 1).sum(), [x])[0])
        return ledger.total.bytes_sent("activations")

    assert (yield On(2, run)) == [0, 0]


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
@one_fork
def test_elements_that_are_not_finite_are_compared_too(odd: float) -> Forked:
    """They are alike where both ranks have them. Whatever ranks find, they find the same, or the next message hangs."""

    def run(rank: int) -> list[int]:
        sent = []
        for ranks in ([0, 1], [0], [1]):
            ledger = Ledger()
            x = torch.ones(128)
            x[0] = odd if rank in ranks else 1.0
            checkpoint(torch.exp, _tensor_mesh(), ledger=ledger)(x.requires_grad_() * 1).sum().backward()
            sent.append(ledger.total.bytes_sent("activations"))
        return sent

    assert (yield On(2, run)) == [[64 * 4, 0, 0]] * 2


@one_fork
def test_complex_activations_are_compared_in_both_parts() -> Forked:
    def run(rank: int) -> list[int]:
        sent = []
        for imaginary in (0.0, float(rank)):
            ledger = Ledger()
            x = torch.full((4,), complex(1.0, imaginary), requires_grad=True)
            checkpoint(torch.exp, _tensor_mesh(), ledger=ledger)(x * 1).abs().sum().backward()
            sent.append(ledger.total.bytes_sent("activations"))
        return sent

    assert (yield On(2, run)) == [[2 * 8, 0]] * 2


@pytest.mark.parametrize("offload", ["none", "cpu", "files"])
@one_fork
def test_an_input_that_is_modified_in_place_gives_no_wrong_gradient(offload: str, tmp_path: Path) -> Forked:
    """Oracle: torch's own error for the same function; where the input was copied, the function's own gradient."""

    offloads: dict[str, Any] = {"none": None, "cpu": "cpu", "files": tmp_path}

    def run(rank: int) -> None:
        def gradient(function: Callable[[Tensor, Tensor], Tensor], changes: int) -> Tensor:
            x, scale = torch.ones(4, requires_grad=True), torch.ones(4)
            h = x * 1
            y = function(h, scale)
            with torch.no_grad():
                (h, scale)[changes].mul_(5)
            y.sum().backward()
            assert x.grad is not None
            return x.grad

        def function(x: Tensor, scale: Tensor) -> Tensor:
            return (x.sin() * scale).exp()

        call = checkpoint(function, offload=offloads[offload])
        for changes in (0, 1):
            with pytest.raises(RuntimeError, match="modified by an inplace"):
                gradient(function, changes)
            if offload == "none" or changes:
                with pytest.raises(UsageError, match="modified in place"):
                    gradient(call, changes)
            else:
                torch.testing.assert_close(gradient(call, changes), torch.ones(4).sin().exp() * torch.ones(4).cos())

    yield On(1, run, group=False)


# --- units of any structure


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize(
    "kind", [InDicts, Signatures, OnlyDeepOutput, InPlaceAfter, Recursive, NoInputGradient, ParameterReturned, Reused]
)
@one_fork
def test_recomputed_units_of_any_structure_train_like_one_process(kind: type[nn.Module], offload: str | None) -> Forked:
    """Nested inputs and outputs, keyword arguments, units that call themselves or are called twice."""

    def run(rank: int) -> None:
        settings: dict[str, Any] = {"stage": 3, "activations": Activations(offload=offload)}
        assert_trains_like_twin(rank, 2, lambda: seeded(kind), vector_batches(3), **settings)

    yield On(2, run)


class _OddBlock(Block):
    """With dropout, keyword and nested arguments, and a nested output of which tensors are only a part."""

    def forward(self, x: Tensor, *, scale: Tensor, extra: tuple[float, dict[str, Tensor]]) -> dict[str, Any]:  # type: ignore[override]
        factor, named = extra
        x = x + F.dropout(self.attention(self.norm1(x)), 0.2) * scale
        y = self.mlp(self.norm2(x)) * factor
        return {"x": x + y, "rest": (y.square().mean() * named["mean"].sum(), None, "text")}


class _OddGpt(Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_OddBlock() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x, rest, scale = self.tokens(tokens), 0.0, torch.tensor(0.5)
        mean = x.mean((0, 1))
        for number, block in enumerate(self.blocks, start=1):
            found = block(x, scale=scale, extra=(0.5 * number, {"mean": mean}))
            x, rest = found["x"], rest + found["rest"][0]
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()) + rest


def _odd(rank: int, stage: int, activations: Activations | None) -> tuple[Run, dict[str, int], int]:
    mesh = mesh_of()
    model = seeded(_OddGpt)
    parallelize(model, mesh["tensor"], False)
    onecopy.shard(model, stage, mesh=mesh, activations=activations, accumulate=2, defragment=activations is not None)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    # Dropout must draw alike on the ranks of the tensor axis, as ever with tensor parallelism.
    torch.manual_seed(rank // 2)
    with torch.autocast("cpu", torch.bfloat16):
        run = train(model, optimizer, [part(b, rank // 2, 2) for b in token_batches(4)], accumulate=2, clip=0.5)
    run.weights = full_weights(model)
    traffic = onecopy.ledger(model).last_step
    assert traffic is not None
    calls = {f"{e.unit} {e.phase}": e.calls for e in traffic.entries if e.op == "all_gather"}
    return run, calls, traffic.bytes_sent("activations", "backward", "blocks.0", "tensor")


@pytest.mark.parametrize("stage", [1, 3])
@one_fork
def test_dropout_autocast_and_nested_arguments_change_no_bit_under_partitioning(stage: int) -> Forked:
    """Against the same run without activation checkpoints: losses, norms, weights, and how often units are gathered."""
    plain = yield On(4, _odd, stage, None)
    for offload in (None, "cpu"):
        for (expected, gathers, _), (run, calls, sent) in zip(
            plain, (yield On(4, _odd, stage, Activations(offload=offload))), strict=True
        ):
            assert (run.losses, run.norms) == (expected.losses, expected.norms)
            assert all(torch.equal(run.weights[name], value) for name, value in expected.weights.items())
            assert calls == gathers
            # Of each micro-batch 6 samples and 8 tokens, in fp32, times (M - 1)/M.
            assert sent == 2 * 6 * 8 * DIM * 4 // 2
