"""Whole parameters: what cannot be is said in words, before anything changes; and what stands around them works.

Oracles: the words; a plain model; a run at another layout.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim import AdamW, Optimizer

import onecopy
from models import TinyGPT, seeded, token_batches
from one_fork import Forked, On, one_fork
from onecopy.errors import MismatchError, SettingsError, UsageError
from oracle import assert_same_weights, gathered_weights, part, whole_weights
from ranks import run_ranks


def is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and "blocks" in name


def muon(model: nn.Module) -> optim.Muon:
    return optim.Muon([p for name, p in model.named_parameters() if is_matrix(name, p)], lr=0.02)


class Unknown(optim.SGD):
    """A step of its own, of which nobody has said what it needs."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("it must not come so far")


REFUSED: dict[str, tuple[dict[str, Any], Callable[[nn.Module], Optimizer], str]] = {
    "Muon over cut matrices": (
        {},
        lambda model: muon(model),
        r"Muon needs 'blocks\.0\.\S+' \(\d+, \d+\) whole.*optimizer=optimizer.*whole=lambda name, p: p\.ndim == 2",
    ),
    "some are whole, not all": (
        {"whole": ["blocks.0"]},
        lambda model: muon(model),
        r"Muon needs 'blocks\.1\.\S+'.*whole=",
    ),
    "Adafactor over cut matrices": (
        {"whole": is_matrix},
        lambda model: optim.Adafactor(model.parameters()),
        r"Adafactor needs 'tokens\.weight'.*whole=",
    ),
    "LBFGS": ({}, lambda model: optim.LBFGS(model.parameters()), r"LBFGS needs all parameters at once.*AdamW"),
    "LBFGS over whole ones": (
        {"whole": lambda name, p: True},
        lambda model: optim.LBFGS(model.parameters()),
        "LBFGS needs all parameters at once",
    ),
    "a class that nobody knows": (
        {"whole": is_matrix},
        lambda model: Unknown(model.parameters()),
        r"does not know what Unknown needs.*onecopy\.needs_whole\(Unknown\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@one_fork
def test_what_a_layout_lacks_is_said_before_anything_changes(name: str) -> Forked:
    settings, make, words = REFUSED[name]

    def run(rank: int) -> None:
        model = onecopy.shard(seeded(TinyGPT), 3, **settings)
        before = gathered_weights(model)
        optimizer = make(model)
        loss = model(*part(token_batches(1)[0], rank, 2))
        loss.backward()
        with pytest.raises(UsageError, match=words):
            optimizer.step(*([lambda: loss] if isinstance(optimizer, optim.LBFGS) else []))
        assert_same_weights(gathered_weights(model), before, atol=0)

    yield On(2, run)


def test_an_optimizer_that_needs_the_whole_model_is_refused_before_anything_is_sharded() -> None:
    def run(rank: int) -> None:
        model = seeded(TinyGPT)
        with pytest.raises(SettingsError, match=r"LBFGS needs all parameters at once.*AdamW"):
            onecopy.shard(model, 3, optimizer=optim.LBFGS(model.parameters()))
        assert not any(isinstance(p, onecopy.SlicedTensor) for p in model.parameters())

    run_ranks(2, run)


BAD_SETTINGS: dict[str, tuple[Any, str]] = {
    "a name that is not there": (["blocks.0.upp"], r"whole= names 'blocks\.0\.upp'.*did you mean 'blocks\.0\.up'"),
    "a class that is not there": ([nn.Conv2d], "no module that has any"),
    "a word": ("blocks", "predicate"),
    "a number": (3, "predicate"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_what_whole_cannot_name_is_an_error(name: str) -> None:
    whole, words = BAD_SETTINGS[name]
    model = TinyGPT()
    with pytest.raises(SettingsError, match=words):
        onecopy.shard(model, 3, whole=whole)
    assert not any(isinstance(p, onecopy.SlicedTensor) for p in model.parameters())


@one_fork
def test_whole_takes_names_classes_modules_and_parameters() -> Forked:
    """And leaves what is frozen alone, which no optimizer steps over."""

    def names(model: nn.Module) -> set[str]:
        return {name for name, p in model.named_parameters() if getattr(p, "slicing", None) and p.slicing.is_whole}

    def run(rank: int) -> None:
        norms = {f"blocks.{i}.norm{j}.{kind}" for i in (0, 1) for j in (1, 2) for kind in ("weight", "bias")}
        chosen: list[tuple[Callable[[nn.Module], Any], set[str]]] = [
            (lambda m: ["tokens.weight", "blocks.1.up"], {"tokens.weight", "blocks.1.up.weight", "blocks.1.up.bias"}),
            (lambda m: [nn.LayerNorm], norms | {"norm.weight", "norm.bias"}),
            (lambda m: [m.places, m.blocks[0].down.bias], {"places.weight", "blocks.0.down.bias"}),
            (lambda m: None, set()),
        ]
        for choose, expected in chosen:
            model = seeded(TinyGPT)
            onecopy.shard(model, 3, whole=choose(model))
            assert names(model) == expected
        model = seeded(TinyGPT)
        model.blocks[0].requires_grad_(False)
        assert "blocks.0.up.weight" not in names(onecopy.shard(model, 3, whole=lambda name, p: True))

    yield On(2, run)


@one_fork
def test_ranks_that_choose_differently_are_told() -> Forked:
    def run(rank: int) -> None:
        with pytest.raises(MismatchError, match="whole parameter"):
            onecopy.shard(seeded(TinyGPT), 3, whole=["tokens.weight"] if rank else ["places.weight"])

    yield On(2, run)


@one_fork
def test_a_matrix_cut_over_the_tensor_axis_cannot_be_whole() -> Forked:
    def run(rank: int) -> None:
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
        model = seeded(TinyGPT)
        parallelize_module(model, mesh["tensor"], {"blocks.0.up": ColwiseParallel()})
        with pytest.raises(SettingsError, match=r"'blocks\.0\.up\.weight' is cut over the tensor axis.*AdamW"):
            onecopy.shard(model, 3, mesh=mesh, whole=is_matrix)

    yield On(2, run)


@one_fork
def test_a_model_on_meta_is_materialised_whole_and_cut() -> Forked:
    """Oracle: the same model built with values."""

    def run(rank: int) -> None:
        with torch.device("meta"):
            model = TinyGPT()
        onecopy.shard(model, 3, whole=is_matrix)
        torch.manual_seed(3)
        onecopy.materialize(model, "cpu", init=_initialise)
        torch.manual_seed(3)
        plain = TinyGPT()
        torch.manual_seed(3)
        for module in plain.modules():
            _initialise(module)
        assert_same_weights(gathered_weights(model), whole_weights(plain), atol=0)
        model(*part(token_batches(1)[0], rank, 2)).backward()
        muon(model).step()
        changed = gathered_weights(model)
        assert all(torch.equal(changed[n], p) != is_matrix(n, p) for n, p in plain.named_parameters())

    yield On(2, run)


def _initialise(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.uniform_(parameter, -0.1, 0.1)


@one_fork
def test_averages_and_edits_see_whole_parameters_like_any() -> Forked:
    """Oracle: the same edits and averages in plain PyTorch."""

    def run(rank: int) -> None:
        plain, model = seeded(TinyGPT), onecopy.shard(seeded(TinyGPT), 3, whole=is_matrix)
        average = onecopy.ema(model, 0.5)
        before = copy.deepcopy(whole_weights(plain))
        with torch.no_grad(), onecopy.gathered(model, write=True):
            model.blocks[1].up.weight.mul_(2)
        with torch.no_grad():
            plain.blocks[1].up.weight.mul_(2)
        assert_same_weights(gathered_weights(model), whole_weights(plain), atol=0)
        average.update()
        with average.applied():
            expected = {n: 0.5 * before[n] + 0.5 * w for n, w in whole_weights(plain).items()}
            assert_same_weights(gathered_weights(model), expected, atol=1e-7)

    yield On(2, run)


@one_fork
def test_torchs_own_state_dicts_of_elementwise_optimizers_are_whole() -> Forked:
    """Oracle: the default layout's."""

    def run(rank: int) -> None:
        found = []
        for whole in (is_matrix, None):
            model = onecopy.shard(seeded(TinyGPT), 3, whole=whole)
            optimizer = AdamW(model.parameters(), lr=1e-2)
            model(*part(token_batches(1)[0], rank, 2)).backward()
            optimizer.step()
            found.append(get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)))
        for name, states in found[1]["state"].items():
            for key, value in states.items():
                assert torch.equal(found[0]["state"][name][key], value)

    yield On(2, run)


@one_fork
def test_torchs_own_state_dicts_have_every_owners_states() -> Forked:
    """Oracle: each owner's own."""

    def run(rank: int) -> None:
        model = onecopy.shard(seeded(TinyGPT), 3, whole=is_matrix)
        optimizer = muon(model)
        model(*part(token_batches(1)[0], rank, 3)).backward()
        optimizer.step()
        whole = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))["state"]
        assert whole.keys() == {name for name, p in model.named_parameters() if is_matrix(name, p)}
        for parameter, states in optimizer.state.items():
            assert torch.equal(whole[parameter.slicing.name]["momentum_buffer"], states["momentum_buffer"])
        cut = get_optimizer_state_dict(model, optimizer)["state"]
        assert cut.keys() == {parameter.slicing.name for parameter in optimizer.state}

    yield On(3, run)
