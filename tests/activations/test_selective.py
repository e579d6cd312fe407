"""Selective recomputation. Oracles: the same run without recomputation, bit for bit; plain PyTorch in one process; and
operations and storages as PyTorch's dispatcher shows them to the test, which knows nothing of what onecopy counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import onecopy
from models import Stack, TinyGPT, seeded, token_batches, vector_batches
from one_fork import Forked, On, one_fork
from onecopy.activations import Activations, checkpoint
from onecopy.activations.selective import DROPOUT_OF_ATTENTION, is_kept
from onecopy.errors import SettingsError, UsageError
from onecopy.observe.ledger import Ledger
from onecopy.observe.meter import Meter
from oracle import OPTIMIZERS, assert_trains_like_twin, gathered_weights, part, train

aten = torch.ops.aten
SELECTIVE, WHOLE = Activations("selective"), Activations()

PRODUCTS = (aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default)


class Watch(TorchDispatchMode):
    """Operations by name, and the storages that they have made which are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, int] = {}
        self.storages: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls[func] = self.calls.get(func, 0) + 1
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self.storages[id(storage)] = (weakref.ref(storage), storage.nbytes())
        return result

    @property
    def alive(self) -> int:
        return sum(nbytes for reference, nbytes in self.storages.values() if reference() is not None)

    def products(self) -> int:
        return sum(self.calls.get(operation, 0) for operation in PRODUCTS)


# --- which operations


def test_the_place_of_dropout_is_that_of_each_operations_schema() -> None:
    for operation, place in DROPOUT_OF_ATTENTION.items():
        assert operation._schema.arguments[place].name == "dropout_p", operation


def test_products_and_attention_are_kept_and_attention_that_draws_masks_is_not() -> None:
    """An operation that is not repeated draws no random numbers, so later masks would be others than forward's."""
    x = torch.ones(2, 2)
    assert is_kept(aten.mm.default, (x, x), {})
    assert not is_kept(aten.bmm.default, (x, x), {})
    assert not is_kept(aten.native_dropout.default, (x, 0.5, True), {})
    for operation, place in DROPOUT_OF_ATTENTION.items():
        given = (x,) * place
        assert is_kept(operation, given, {})
        assert is_kept(operation, (*given, 0.0), {})
        assert not is_kept(operation, (*given, 0.1), {})
        assert not is_kept(operation, given, {"dropout_p": 0.1})


# --- one region


class Dropped(nn.Module):
    """A block with dropout in, before and after attention, and batched products."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.dropout(self.qkv(x), 0.2).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        x = x + F.dropout(mixed, 0.5)
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.5)


@one_fork
def test_masks_and_gradients_are_those_without_recomputation() -> Forked:
    def run(rank: int) -> None:
        found = []
        for selective in (None, True):
            block = seeded(Dropped)
            if selective:
                checkpoint(block, selective=True)
            torch.manual_seed(5)
            x = torch.randn(3, 4, 8, requires_grad=True)
            y = block(x * 1)
            y.square().sum().backward()
            found.append([y, x.grad, *(p.grad for p in block.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    yield On(1, run, group=False)


@one_fork
def test_products_are_not_computed_again() -> Forked:
    """Oracle: the dispatcher. A product's backward takes two products."""

    def run(rank: int) -> None:
        block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.GELU())
        forward, again = 2, {"none": 0, "selective": 0, "units": 2}
        for kind in ("none", "selective", "units"):
            own = seeded(lambda: nn.Sequential(*block))
            if kind != "none":
                checkpoint(own, selective=kind == "selective")
            with Watch() as watch:
                y = own(torch.ones(5, 8, requires_grad=True) * 1)
                assert watch.products() == forward
                gelu = watch.calls[aten.gelu.default]
                y.sum().backward()
            assert watch.products() == forward + 2 * forward + again[kind]
            # Early stop: the last activation function is not called again.
            assert watch.calls[aten.gelu.default] == gelu + (0 if kind == "none" else 1)
            own._forward_pre_hooks.clear()

    yield On(1, run, group=False)


@one_fork
def test_a_function_and_evaluation() -> Forked:
    def run(rank: int) -> None:
        meter = Meter(Ledger())
        weight = torch.ones(8, 8, requires_grad=True)
        function = checkpoint(lambda x: (x @ weight).sin(), selective=True, meter=meter)
        x = torch.ones(4, 8, requires_grad=True)
        with torch.no_grad():
            function(x)
        assert meter.live["checkpoints"] == 0
        y = function(x * 1)
        assert meter.live["checkpoints"] == 2 * 4 * 8 * 4, "the input, and the product's output"
        y.sum().backward()
        del y
        assert meter.live["checkpoints"] == 0
        expected = torch.ones(4, 8, requires_grad=True)
        (expected @ weight).sin().sum().backward()
        assert x.grad is not None
        assert expected.grad is not None
        assert torch.equal(x.grad, expected.grad)

    yield On(1, run, group=False)


@one_fork
def test_what_cannot_be_is_said() -> Forked:
    def run(rank: int) -> None:
        with pytest.raises(SettingsError, match="stay on the device"):
            Activations("selective", offload="cpu")
        with pytest.raises(SettingsError, match="did you mean 'selective'"):
            Activations("selectiv")
        model = seeded(TinyGPT)
        units = ["blocks.0", "blocks.0.attention", "blocks.1"]
        with pytest.raises(SettingsError, match=r"'blocks.0.attention' inside 'blocks.0'"):
            onecopy.shard(model, 3, units=units, activations=SELECTIVE)
        assert all(type(p) is nn.Parameter for p in model.parameters())
        weight = torch.ones(8, 8, requires_grad=True)
        changed = checkpoint(lambda x: (x @ weight).mul_(2).sin(), selective=True)
        with pytest.raises(UsageError, match=r"modified in place .* y = y \+ x"):
            changed(torch.ones(4, 8, requires_grad=True) * 1).sum().backward()
        state: list[Tensor] = []

        def remembers(x: Tensor) -> Tensor:
            state.append(x)
            return (torch.cat(state)[: len(x)] @ weight).sin() if len(state) > 1 else (x @ weight).sin()

        with pytest.raises(UsageError, match=r"aten\.cat\.default is new.*use_cache = False"):
            checkpoint(remembers, selective=True)(torch.ones(4, 8, requires_grad=True) * 1).sum().backward()
        twice = checkpoint(lambda x: (x @ weight).sin(), selective=True)(torch.ones(4, 8, requires_grad=True) * 1).sum()
        twice.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="backward an extra time"):
            twice.backward()

    yield On(1, run, group=False)


# --- units of a sharded model


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
@one_fork
def test_selective_units_train_like_one_process_and_to_the_bit_as_without(stage: int, accumulate: int) -> Forked:
    def run(rank: int) -> None:
        settings = {"stage": stage, "accumulate": accumulate, "clip": 0.5, "activations": SELECTIVE}
        assert_trains_like_twin(rank, 2, lambda: seeded(TinyGPT), token_batches(4), **settings)
        found = []
        for activations in (None, SELECTIVE):
            for build, batches in ((TinyGPT, token_batches(4)), (Stack, vector_batches(4))):
                model = onecopy.shard(
                    seeded(build),
                    stage,
                    accumulate=accumulate,
                    activations=activations,
                    units=["Block", "head"] if build is TinyGPT else ["Sequential"],
                    precision="bf16" if accumulate == 2 else None,
                )
                optimizer = OPTIMIZERS["adamw"](model.parameters())
                own = train(model, optimizer, [part(b, rank, 2) for b in batches], accumulate=accumulate)
                found.append((own.losses, own.norms, gathered_weights(model)))
        for (losses, norms, weights), (others, other_norms, other_weights) in zip(found[:2], found[2:], strict=True):
            assert losses == others
            assert norms == other_norms
            assert all(torch.equal(weights[name], other_weights[name]) for name in weights)

    yield On(2, run)


@one_fork
def test_stage_3_gathers_a_unit_as_often_as_without() -> Forked:
    """Oracle: the ledger of the same run without recomputation, and the paper's 3Ψ."""

    def run(rank: int, activations: Activations | None) -> tuple[int, int, dict[str, int]]:
        model = onecopy.shard(seeded(TinyGPT, layers=3), 3, activations=activations)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        train(model, optimizer, [part(batch, rank, 2) for batch in token_batches(3)])
        traffic = onecopy.ledger(model).last_step
        assert traffic is not None
        calls = {f"{e.unit} {e.phase}": e.calls for e in traffic.entries if e.op == "all_gather"}
        return traffic.state_bytes, onecopy.padded_numel(model), calls

    for plain, selective in zip((yield On(2, run, None)), (yield On(2, run, SELECTIVE)), strict=True):
        assert plain == selective
        assert selective[0] == 3 * selective[1] // 2 * 4


ROWS, LENGTH, WIDTH, HEADS, BLOCKS = 12, 7, 12, 2, 2


def _kept(build: Callable[[], nn.Module], activations: Activations | None) -> tuple[int, int, int]:
    """Bytes alive after a forward, as the dispatcher and as the meter see them, and the latter after backward."""
    model = onecopy.shard(build(), 3, units=["Block"], activations=activations)
    meter = onecopy.meter(model)
    # The first step makes what stays.
    model(token_batches(1)[0][0]).backward()
    with Watch() as watch:
        loss = model(token_batches(1)[0][0])
        alive, counted = watch.alive, meter.live["checkpoints"]
    loss.backward()
    del loss
    return alive, counted, meter.live["checkpoints"]


@one_fork
def test_what_is_kept_is_inputs_and_products() -> Forked:
    """Oracles: shapes, in fp32. Of each block the input, q, k and v, attention's output with a log-sum for each head
    and token, its projection, and the MLP's two products; and storages alive in the process.
    """

    def run(rank: int) -> None:
        alive, counted, after = {}, {}, {}
        for kind, activations in {"none": None, "selective": SELECTIVE, "units": WHOLE}.items():
            alive[kind], counted[kind], after[kind] = _kept(lambda: seeded(TinyGPT), activations)
        tokens, width = ROWS * LENGTH, WIDTH
        products = 3 * width + (width + HEADS) + width + 3 * width + width
        assert counted == {
            "none": 0,
            "selective": BLOCKS * tokens * (width + products) * 4,
            "units": BLOCKS * tokens * width * 4,
        }
        assert after == dict.fromkeys(counted, 0)
        assert alive["none"] > alive["selective"] > alive["units"]
        assert alive["selective"] - alive["units"] == counted["selective"] - counted["units"]

    yield On(1, run, group=False)
