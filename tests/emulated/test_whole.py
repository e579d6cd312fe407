"""What goes in and out whole on the device: gathered, materialize, save and load, tensor parallelism.

Oracles: plain PyTorch in one process, and the values that a test has put in.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
from models import TinyGPT, filled, seeded, token_batches
from onecopy.sharding.setup.api import engine_of
from oracle import OPTIMIZERS, assert_same_weights, train, train_twin, whole_weights
from tensor_parallel_models import Gpt, full_weights, parallelize
from training import on, parts_of, run_clean, tiny, weights_of

pytestmark = pytest.mark.emulated

STAGES = (0, 1, 2, 3)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gathered_shows_and_keeps_whole_values(num_ranks: int) -> None:
    def run(rank: int, device: torch.device) -> None:
        for stage in STAGES:
            model = onecopy.shard(on(device, lambda: filled(1.5)), stage, precision="bf16")
            with onecopy.gathered(model, write=True):
                for parameter in model.parameters():
                    assert (parameter == 1.5).all()
                    with torch.no_grad():
                        parameter.mul_(2)
                assert model(torch.ones(1, 40, device=device)).isfinite().all()
            assert all((value == 3.0).all() for value in weights_of(model).values())

    run_clean(num_ranks, run)


@pytest.mark.parametrize("place", ["emu", "emu:{rank}"])
@pytest.mark.parametrize("defragment", [False, True])
def test_materialize_takes_a_device_with_and_without_an_index(place: str, defragment: bool) -> None:
    """The values are those of the first rank, which the same initialisation gives in one process."""

    def run(rank: int, device: torch.device) -> None:
        def initialise(module: nn.Module) -> None:
            for parameter in module.parameters(recurse=False):
                with torch.no_grad():
                    parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view(parameter.shape))

        with torch.device("meta"):
            model = TinyGPT()
        model = onecopy.shard(model, 3, defragment=defragment)
        onecopy.materialize(model, device=place.format(rank=rank), init=initialise)
        twin = TinyGPT()
        for module in twin.modules():
            initialise(module)
        assert_same_weights(weights_of(model), whole_weights(twin), 0)
        assert {parameter.device for parameter in model.parameters()} == {device}
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        found = train(model, optimizer, parts_of(token_batches(2), rank, 2, device), clip=1.0)
        expected = train_twin(twin, OPTIMIZERS["sgd"], token_batches(2), clip=1.0)
        assert found.norms == pytest.approx(expected.norms, rel=1e-5)
        # MemPools and communication buffers are kept by device: one without an index is none of them.
        assert {bucket.device for unit in engine_of(model).units for bucket in unit.buckets} == {device}

    run_clean(2, run)


@pytest.mark.parametrize("background", [False, True])
def test_a_run_that_was_saved_and_loaded_goes_on_like_one_that_was_not(background: bool, tmp_path: Path) -> None:
    batches = token_batches(4)

    def run(rank: int, device: torch.device) -> None:
        expected = train_twin(tiny(), OPTIMIZERS["adamw"], batches, clip=0.5)
        for stage in (1, 3):
            folder = tmp_path / str(stage)
            parts = parts_of(batches, rank, 2, device)
            first = onecopy.shard(on(device, tiny), stage)
            optimizer = OPTIMIZERS["adamw"](first.parameters())
            train(first, optimizer, parts[:2], clip=0.5)
            saved = onecopy.save(folder, first, optimizer, background=background)
            if background:
                saved.wait()
            train(first, optimizer, parts[2:], clip=0.5)
            second = onecopy.shard(on(device, lambda: seeded(TinyGPT, layers=3)), stage)
            optimizer = OPTIMIZERS["adamw"](second.parameters())
            onecopy.load(folder, second, optimizer)
            train(second, optimizer, parts[2:], clip=0.5)
            for model in (first, second):
                assert_same_weights(weights_of(model), expected.weights, 1e-4)

    run_clean(2, run)


def test_files_of_torch_save_hold_what_the_device_holds(tmp_path: Path) -> None:
    def run(rank: int, device: torch.device) -> None:
        model = onecopy.shard(on(device, lambda: filled(2.0)), 3)
        torch.save(model.state_dict(), tmp_path / f"{rank}.pt")
        other = onecopy.shard(on(device, lambda: filled(0.0)), 3)
        other.load_state_dict(torch.load(tmp_path / f"{rank}.pt", weights_only=False))
        assert all((value == 2.0).all() for value in weights_of(other).values())

    run_clean(2, run)


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence-parallel"])
def test_tensor_parallel_training_equals_one_process(sequence: bool) -> None:
    """Two by two ranks; the inputs of recomputed units are cut over the tensor axis, and moved to the host."""

    def run(rank: int, device: torch.device) -> None:
        batches = token_batches(3)
        expected = train_twin(seeded(Gpt), OPTIMIZERS["sgd"], batches, clip=0.5)
        mesh = dist.init_device_mesh("emu", (2, 2), mesh_dim_names=("shard", "tensor"))
        for stage, settings in (
            (0, {}),
            (1, {"precision": "fp32"}),
            (3, {"activations": onecopy.Activations()}),
            (3, {"activations": onecopy.Activations(offload="cpu")}),
        ):
            model = parallelize(on(device, lambda: seeded(Gpt)), mesh["tensor"], sequence)
            model = onecopy.shard(model, stage, mesh=mesh, **settings)
            parts = parts_of(batches, rank // 2, 2, device)
            found = train(model, OPTIMIZERS["sgd"](model.parameters()), parts, clip=0.5)
            assert found.norms == pytest.approx(expected.norms, rel=2e-6)
            weights = {name: value.cpu() for name, value in full_weights(model).items()}
            assert_same_weights(weights, expected.weights, 2e-6)

    run_clean(4, run)
