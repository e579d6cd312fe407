"""Real `transformers` models, Llama and GPT-2: equal to one process, and no further from it than DDP and fully_shard.

Two oracles: the whole-batch twin in plain PyTorch, and PyTorch's own data parallelism on the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import onecopy
from hub_models import gpt2, llama
from models import seeded
from one_fork import Forked, On, one_fork
from oracle import OPTIMIZERS, Batch, Run, assert_same_weights, gathered_weights, part, train, whole_weights
from ranks import run_ranks

VOCAB, LENGTH, STEPS = 61, 9, 4


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "llama": (lambda: llama(VOCAB), lambda model: model.model.layers),
    "gpt2": (lambda: gpt2(VOCAB), lambda model: model.transformer.h),
}


class Loss(nn.Module):
    """Calls the wrapped model as a training script does and gives back the loss alone; not part of what is sharded."""

    def __init__(self, called: nn.Module) -> None:
        super().__init__()
        self.called = called

    def forward(self, tokens: Tensor) -> Tensor:
        return self.called(input_ids=tokens, labels=tokens, use_cache=False).loss  # type: ignore[no-any-return]


def _batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randint(VOCAB, (6, LENGTH), generator=generator),) for _ in range(STEPS)]


def _run(system: str, name: str, optimizer: str, rank: int, num_ranks: int) -> Run:
    build, layers = MODELS[name]
    model = seeded(build)
    called: nn.Module = model
    if system == "ddp":
        called = DistributedDataParallel(model)
    elif system == "fully_shard":
        for layer in layers(model):
            fully_shard(layer)
        fully_shard(model)
    elif system != "twin":
        onecopy.shard(model, int(system.removeprefix("stage ")))
    made = OPTIMIZERS[optimizer](model.parameters())
    run = train(Loss(called), made, [part(batch, rank, num_ranks) for batch in _batches()], clip=1.0)
    if system.startswith("stage"):
        run.weights = gathered_weights(model)
    elif system == "fully_shard":
        run.weights = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    else:
        run.weights = whole_weights(model)
    return run


SYSTEMS = ("stage 0", "stage 1", "stage 2", "stage 3", "ddp", "fully_shard")


@cache
def _all(name: str, num_ranks: int, optimizer: str) -> tuple[Run, dict[str, list[Run]]]:
    """The twin's run, and each system's by rank."""
    twin = run_ranks(1, lambda rank: _run("twin", name, optimizer, 0, 1), group=False)[0]
    found = run_ranks(
        num_ranks, lambda rank: {s: _run(s, name, optimizer, rank, num_ranks) for s in SYSTEMS}, timeout=120
    )
    return twin, {system: [runs[system] for runs in found] for system in SYSTEMS}


def _error(found: Run, expected: Run) -> float:
    return max(float((found.weights[n] - value).abs().max()) for n, value in expected.weights.items())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_sgd_equals_the_whole_batch_twin(name: str, num_ranks: int, stage: int) -> None:
    twin, systems = _all(name, num_ranks, "sgd")
    runs = systems[f"stage {stage}"]
    mean = [sum(losses) / num_ranks for losses in zip(*(run.losses for run in runs), strict=True)]
    assert mean == pytest.approx(twin.losses, rel=1e-6, abs=0)
    assert runs[0].norms == pytest.approx(twin.norms, rel=1e-6, abs=0)
    assert_same_weights(runs[0].weights, twin.weights)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_adamw_is_no_further_from_the_twin_than_torchs_own_systems(name: str, num_ranks: int, stage: int) -> None:
    """Within twice the larger of DDP's and fully_shard's distance, for GPT-2 the key bias's noise; at least 1e-6."""
    twin, systems = _all(name, num_ranks, "adamw")
    theirs = max(_error(systems[system][0], twin) for system in ("ddp", "fully_shard"))
    assert _error(systems[f"stage {stage}"][0], twin) <= max(2 * theirs, 1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_norms_are_those_of_ddp_and_fully_shard_rank_by_rank(name: str, num_ranks: int, stage: int) -> None:
    _, systems = _all(name, num_ranks, "adamw")
    for system in ("ddp", "fully_shard"):
        for ours, theirs in zip(systems[f"stage {stage}"], systems[system], strict=True):
            assert ours.losses == pytest.approx(theirs.losses, rel=2e-6, abs=0)
            assert ours.norms == pytest.approx(theirs.norms, rel=2e-6, abs=0)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
@one_fork
def test_transformers_own_gradient_checkpointing(name: str, stage: int, reentrant: bool) -> Forked:
    """Against the twin that keeps its activations."""

    def run(rank: int) -> Run:
        model = seeded(MODELS[name][0])
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        # A reentrant checkpoint needs an input that requires a gradient.
        model.enable_input_require_grads()
        model.train()
        onecopy.shard(model, stage)
        found = train(
            Loss(model),
            OPTIMIZERS["sgd"](model.parameters()),
            [part(batch, rank, 2) for batch in _batches()],
            clip=1.0,
        )
        found.weights = gathered_weights(model)
        return found

    twin, _ = _all(name, 2, "sgd")
    for found in (yield On(2, run)):
        assert_same_weights(found.weights, twin.weights)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
@one_fork
def test_generate_inside_gathered(name: str, stage: int) -> Forked:
    """Ranks generate different lengths from different prompts, as the plain model does."""

    def run(rank: int) -> None:
        plain, model = seeded(MODELS[name][0]).eval(), onecopy.shard(seeded(MODELS[name][0]).eval(), stage)
        prompt = torch.tensor([[1 + rank, 2, 3]])
        settings = {"max_new_tokens": 4 + rank, "do_sample": False, "pad_token_id": 0}
        with onecopy.gathered(model):
            found = model.generate(prompt, **settings)
        assert torch.equal(found, plain.generate(prompt, **settings))

    yield On(2, run)


@pytest.mark.parametrize("name", MODELS)
@one_fork
def test_units_are_the_decoder_layers(name: str) -> Forked:
    """Found without being told; and a large embedding or head by itself."""

    def run(rank: int) -> set[str]:
        model = onecopy.shard(seeded(MODELS[name][0]), 3)
        Loss(model)(*part(_batches()[0], rank, 2)).backward()
        return {entry.unit for entry in onecopy.ledger(model).current.entries if entry.op == "reduce_scatter"}

    layers = {"llama": {"model.layers.0", "model.layers.1"}, "gpt2": {"transformer.h.0", "transformer.h.1"}}[name]
    for units in (yield On(2, run)):
        assert layers <= units
        assert all("." not in unit.removeprefix("model.").removeprefix("transformer.") for unit in units - layers)


@pytest.mark.parametrize("name", MODELS)
@one_fork
def test_built_on_meta_and_initialised_by_transformers(name: str) -> Forked:
    """Slices get the values that one process would draw; the callback is transformers' own."""

    def run(rank: int) -> None:
        with torch.device("meta"):
            model = MODELS[name][0]()
        onecopy.shard(model, 3)
        torch.manual_seed(9 + rank)

        def init(module: nn.Module) -> None:
            for parameter in module.parameters(recurse=False):
                nn.init.normal_(parameter, std=0.02)
            fresh = seeded(MODELS[name][0])
            names = {id(m): n for n, m in model.named_modules()}
            for key, buffer in module.named_buffers(recurse=False):
                buffer.copy_(fresh.get_submodule(names[id(module)]).get_buffer(key))

        onecopy.materialize(model, init=init)
        loss = Loss(model)(*part(_batches()[0], rank, 2))
        # Untrained on 61 tokens: the entropy of a guess.
        assert loss.item() == pytest.approx(torch.log(torch.tensor(float(VOCAB))).item(), rel=0.02)
        loss.backward()

    yield On(2, run)
