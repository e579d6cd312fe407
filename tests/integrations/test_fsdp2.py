"""Programs written for FSDP2 with their import changed. Oracle: the same program with torch's own fully_shard."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import onecopy
from models import Block, TinyGPT, seeded, token_batches
from onecopy.compat import fsdp2
from onecopy.errors import SettingsError, UsageError
from ranks import run_ranks

Library = Any


def plain(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def build(library: Library, of_root: dict[str, Any] | None = None, **settings: Any) -> nn.Module:
    """What FSDP2's tutorial does: fully_shard on each layer, then on the model."""
    model = seeded(TinyGPT)
    for module in model.modules():
        if isinstance(module, Block):
            library.fully_shard(module, **settings)
    library.fully_shard(model, **(settings | (of_root or {})))
    return model


def mine(batch: Tensor) -> Tensor:
    return batch[dist.get_rank() :: dist.get_world_size()]


def loop(model: nn.Module, steps: int = 3, accumulate: int = 1) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for (batch,) in token_batches(steps, rows=12):
        parts = mine(batch).chunk(accumulate)
        for number, part in enumerate(parts, start=1):
            if accumulate > 1:
                model.set_requires_gradient_sync(number == accumulate)  # type: ignore[operator]
            loss = model(part) / accumulate
            loss.backward()
            found.append(loss.item())
        found.append(float(plain(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))))
        optimizer.step()
        optimizer.zero_grad()
    return found


def both(program: Callable[[Library], Any], ranks: int = 2) -> list[tuple[Any, Any]]:
    """What each rank's program gave with torch's library, and with ours."""
    return run_ranks(ranks, lambda rank: (program(fsdp), program(fsdp2)), timeout=120)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reshard_after_forward": False},
        {"reshard_after_forward": True},
        {"offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False)},
    ],
    ids=["defaults", "kept", "resharded", "offloaded"],
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_losses_and_norms(settings: dict[str, Any], accumulate: int) -> None:
    for expected, found in both(lambda library: loop(build(library, **settings), accumulate=accumulate)):
        assert found == pytest.approx(expected, rel=1e-5)


def test_stages_follow_reshard_after_forward() -> None:
    """FSDP2's documentation: True is ZeRO-3; False keeps parameters after forward, as ZeRO-2 does."""

    def stage(rank: int) -> list[int]:
        found = []
        for reshard in (None, True, False):
            model = build(fsdp2, reshard_after_forward=reshard)
            assert isinstance(model, fsdp2.FSDPModule)
            assert type(model).__name__ == "FSDPTinyGPT"
            loss = model(torch.zeros(2, 8, dtype=torch.int64))
            loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                model(torch.zeros(2, 8, dtype=torch.int64)).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            found.append(onecopy.ledger(model).last_step.state_bytes // (2 * onecopy.padded_numel(model)))
        return found

    # Bytes of fp32 elements, times (N-1)/N = 1/2: with two micro-batches 3gΨ and (g + 1)Ψ.
    assert run_ranks(2, stage) == [[6, 6, 3]] * 2


def test_mixed_precision() -> None:
    """bf16 computing, fp32 reducing, outputs in a dtype asked for. Losses agree to bf16's rounding."""

    def program(library: Library) -> tuple[list[float], torch.dtype]:
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        policy = library.MixedPrecisionPolicy(**dtypes)
        of_root = library.MixedPrecisionPolicy(**dtypes, output_dtype=torch.float64)
        model = build(library, mp_policy=policy, of_root={"mp_policy": of_root})
        losses = loop(model)
        return losses, model(mine(token_batches(1)[0][0])).dtype

    for expected, found in both(program):
        assert found[0] == pytest.approx(expected[0], rel=1e-2)
        assert found[1] == expected[1] == torch.float64


def test_hybrid_sharding_over_a_mesh_of_other_names() -> None:
    def program(library: Library) -> list[float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "within"))
        return loop(build(library, mesh=mesh))

    for expected, found in both(program, ranks=4):
        assert found == pytest.approx(expected, rel=1e-5)


def test_state_dicts_whole_and_sliced() -> None:
    """`get_model_state_dict` full and sharded, `get_optimizer_state_dict`, and a whole one set again."""

    def program(library: Library) -> dict[str, Any]:
        model = build(library)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(mine(token_batches(1)[0][0])).backward()
        optimizer.step()
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        sliced = get_model_state_dict(model)
        states = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        everywhere = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        before = {name: value.clone() for name, value in everywhere.items()}
        other = build(library)
        set_model_state_dict(other, everywhere, options=StateDictOptions(full_state_dict=True))
        again = get_model_state_dict(other, options=StateDictOptions(full_state_dict=True))
        assert all(torch.equal(value, before[name]) for name, value in again.items())
        return {
            "full": {name: value.clone() for name, value in full.items()},
            "shapes": {name: tuple(value.shape) for name, value in sliced.items()},
            "moments": {name: plain(own["exp_avg"]).clone() for name, own in states["state"].items()},
        }

    for rank, (expected, found) in enumerate(both(program)):
        assert bool(found["full"]) == bool(expected["full"]) == (rank == 0)
        assert found["shapes"] == expected["shapes"]
        for what in ("full", "moments"):
            assert found[what].keys() == expected[what].keys()
            for name, value in expected[what].items():
                torch.testing.assert_close(found[what][name], value, rtol=1e-5, atol=1e-6)


def test_parameters_whole_between_unshard_and_reshard() -> None:
    """Also where the next forward trains without a reshard. Oracle: the model as it was built."""

    def check(rank: int) -> None:
        model: Any = build(fsdp2)
        expected = seeded(TinyGPT).state_dict()
        found = {name: value.full_tensor() for name, value in model.state_dict().items()}
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
        handle = model.unshard(async_op=True)
        handle.wait()
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
        model.reshard()
        assert all(isinstance(parameter, onecopy.SlicedTensor) for parameter in model.parameters())
        block = model.blocks[1]
        block.unshard()
        assert torch.equal(block.up.weight, expected["blocks.1.up.weight"])
        model(mine(token_batches(1)[0][0])).backward()
        assert all(isinstance(parameter, onecopy.SlicedTensor) for parameter in model.parameters())
        for hint in (
            lambda: model.set_is_last_backward(True),
            lambda: model.set_reshard_after_backward(False),
            lambda: block.set_modules_to_forward_prefetch([model.blocks[0]]),
        ):
            hint()

    run_ranks(2, check)


class Methodical(nn.Module):
    """A model that trains by a method which is not its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.scale = nn.Parameter(torch.ones(6))

    def loss(self, x: Tensor) -> Tensor:
        return (self(x) * self.scale).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) * self.scale


def test_a_method_in_place_of_forward() -> None:
    def program(library: Library) -> list[float]:
        model = seeded(Methodical)
        for block in model.blocks:
            library.fully_shard(block)
        library.fully_shard(model)
        library.register_fsdp_forward_method(model, "loss")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            x = torch.full((2, 6), 1.0 + step + dist.get_rank())
            losses.append(model.loss(x))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return [loss.item() for loss in losses]

    for expected, found in both(program):
        assert found == pytest.approx(expected, rel=1e-5)


def test_one_call_on_the_whole_model_and_ignored_parameters() -> None:
    def program(library: Library) -> list[float]:
        model = seeded(Methodical)
        library.fully_shard(model, ignored_params={model.scale})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            loss = model(torch.full((2, 6), 1.0 + step + dist.get_rank())).square().mean()
            loss.backward()
            assert type(model.scale) is nn.Parameter
            dist.all_reduce(model.scale.grad)
            model.scale.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    for expected, found in both(program):
        assert found == pytest.approx(expected, rel=1e-5)


def test_what_onecopy_does_not_do_is_said() -> None:
    def check(rank: int) -> None:
        for settings, message in (
            ({"offload_policy": object()}, "a CPUOffloadPolicy; found object"),
            ({"reshard_after_forward": 2}, "fewer ranks"),
            ({"shard_placement_fn": lambda parameter: None}, "shard_placement_fn"),
            (
                {"mp_policy": fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)},
                "cast_forward_inputs",
            ),
        ):
            with pytest.raises(SettingsError, match=message):
                fsdp2.fully_shard(seeded(TinyGPT), **settings)
        model: Any = seeded(TinyGPT)
        fsdp2.fully_shard(model.blocks[0], mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        fsdp2.fully_shard(model)
        with pytest.raises(SettingsError, match="same mp_policy"):
            model.parameters()
        model = build(fsdp2)
        with pytest.raises(UsageError, match="multiply the loss"):
            model.set_gradient_divide_factor(1.0)
        early: Any = seeded(TinyGPT)
        fsdp2.fully_shard(early.blocks[0])
        list(early.blocks[0].parameters())
        with pytest.raises(UsageError, match="the whole model last"):
            fsdp2.fully_shard(early)

    run_ranks(2, check)


def test_the_names_that_programs_import_are_there() -> None:
    """Oracle: what torch.distributed.fsdp offers of FSDP2, but for what is told apart in docs/integrations.md."""
    offered = {"CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle"}
    offered |= {"fully_shard", "register_fsdp_forward_method"}
    assert offered == set(fsdp2.__all__)
    assert all(hasattr(fsdp, name) for name in offered)
    methods = {name for name, value in vars(fsdp.FSDPModule).items() if isinstance(value, types.FunctionType)}
    ours = {name for name in vars(fsdp2.FSDPModule) if name.startswith("set_")} | {"unshard", "reshard"}
    assert ours <= methods
