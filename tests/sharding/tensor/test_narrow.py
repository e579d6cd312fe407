"""Gradients held in bf16 beside fp32 masters (precision "bf16-lean"): 2 bytes an element, at one rounding more.

The oracle is the rank-ordered twin that rounds to bf16 where onecopy says it does; at one rank and one micro-batch it
is plain PyTorch, for autograd's gradients are bf16 already. What a step takes beside is torch's profiler's figure.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile

import onecopy
from models import Stack, TinyGPT, seeded, token_batches, vector_batches
from one_fork import Forked, On, one_fork
from onecopy.errors import NeedsWholeError, UsageError
from onecopy.sharding.tensor.narrow import NarrowGradient, gradient_slice
from onecopy.sharding.tensor.sliced import SlicedTensor
from oracle import (
    OPTIMIZERS,
    HalfTwin,
    Run,
    assert_same_weights,
    gathered_weights,
    part,
    train,
    train_in_rank_order,
    train_twin,
    whole_weights,
)
from ranks import every_stage, run_ranks

BF16 = torch.bfloat16


def _sharded(
    rank: int, num_ranks: int, stage: int, name: str, *, accumulate: int = 1, clip: float | None = None, **settings: Any
) -> Run:
    model = onecopy.shard(seeded(TinyGPT), stage, accumulate=accumulate, **{"precision": "bf16-lean", **settings})
    batches = [part(batch, rank, num_ranks) for batch in token_batches(2 * accumulate)]
    run = train(model, OPTIMIZERS[name](model.parameters()), batches, accumulate=accumulate, clip=clip)
    run.weights = gathered_weights(model)
    return run


def _emulated(
    num_ranks: int,
    stage: int,
    name: str,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    half: torch.dtype | None = BF16,
    hold: torch.dtype | None = BF16,
) -> Run:
    return train_in_rank_order(
        seeded(TinyGPT),
        OPTIMIZERS[name],
        token_batches(2 * accumulate),
        num_ranks,
        accumulate=accumulate,
        half=half,
        sum_first=stage < 2,
        hold=hold,
        clip=clip,
    )


def _off(found: Run, expected: Run) -> float:
    """The difference of two runs' weights, relative to what training changed."""
    start = whole_weights(seeded(TinyGPT))
    error = sum(float((found.weights[n] - value).square().sum()) for n, value in expected.weights.items())
    update = sum(float((start[n] - value).square().sum()) for n, value in expected.weights.items())
    return float((error / update) ** 0.5)


@pytest.mark.parametrize("stage, num_ranks", list(product((0, 1, 2, 3), (1, 2, 3))))
@one_fork
def test_run_equals_the_rank_ordered_twin_that_rounds_to_bf16(stage: int, num_ranks: int) -> Forked:
    """To the last bit; the fused kernel rounds otherwise at the ends of slices. The twin that does not round is off."""

    def run(rank: int) -> None:
        for name, accumulate in product(("adamw-loop", "adamw", "sgd", "adamw-fused"), (1, 3)):
            found = _sharded(rank, num_ranks, stage, name, accumulate=accumulate)
            expected = _emulated(num_ranks, stage, name, accumulate=accumulate)
            assert_same_weights(found.weights, expected.weights, atol=1e-7 if name == "adamw-fused" else 0)
            if name == "sgd" and (num_ranks > 1 or accumulate > 1):
                assert _off(_emulated(num_ranks, stage, name, accumulate=accumulate, hold=None), expected) > 2**-12

    yield On(num_ranks, run)


@every_stage
@one_fork
def test_clipping_rounds_once_more_and_its_norm_is_the_global_one(stage: int, num_ranks: int) -> Forked:
    """Oracle: the twin, clipped and rounded. The norm's last bit may differ, and with it the rounding of an element."""

    def run(rank: int) -> None:
        for name in ("sgd", "adamw-fused"):
            found = _sharded(rank, num_ranks, stage, name, clip=0.5)
            expected = _emulated(num_ranks, stage, name, clip=0.5)
            assert found.norms == pytest.approx(expected.norms, rel=1e-6, abs=0)
            assert _off(found, expected) < 2**-12

    yield On(num_ranks, run)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_at_one_rank_and_one_micro_batch_nothing_is_lost(stage: int) -> Forked:
    """Oracle: plain PyTorch, whose bf16 gradients are widened to fp32 before the optimizer takes them."""

    def run(rank: int) -> None:
        for name in ("adamw-loop", "adamw", "sgd", "adamw-fused"):
            expected = train_twin(seeded(TinyGPT), OPTIMIZERS[name], token_batches(2), half=BF16)
            found = _sharded(rank, 1, stage, name)
            assert found.losses == expected.losses
            assert_same_weights(found.weights, expected.weights, atol=1e-7 if name == "adamw-fused" else 0)

    yield On(1, run, group=False)


@every_stage
@pytest.mark.parametrize("accumulate", [1, 3])
@one_fork
def test_gradients_of_fp32_compute_may_be_held_in_bf16_too(accumulate: int, stage: int, num_ranks: int) -> Forked:
    """They travel in fp32 and are rounded where they are held. Oracle: the fp32 twin that rounds, to the last bit."""

    def run(rank: int) -> None:
        precision = onecopy.Precision(accumulate=BF16)
        found = _sharded(rank, num_ranks, stage, "sgd", accumulate=accumulate, precision=precision)
        expected = _emulated(num_ranks, stage, "sgd", accumulate=accumulate, half=None)
        assert_same_weights(found.weights, expected.weights, atol=0)

    yield On(num_ranks, run)


@one_fork
def test_a_replicate_axis_rounds_twice() -> Forked:
    """Over shard and over its copies: 2 * 2^-9 of each element at most, beside the twin that does not round."""

    def run(rank: int) -> None:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for stage in (1, 2, 3):
            found = _sharded(rank, 4, stage, "sgd", mesh=mesh)
            off = _off(found, _emulated(4, stage, "sgd", hold=None))
            assert 2**-12 < off < 2**-8

    yield On(4, run)


@every_stage
@pytest.mark.parametrize("name", ["adamw-fused", "adamw-loop", "adamw", "sgd"])
@one_fork
def test_a_grad_scalers_powers_of_two_cost_nothing(name: str, stage: int, num_ranks: int) -> Forked:
    """Oracle: the run without a scaler. Also where fused optimizers unscale, and over a step that is left out."""

    def run(rank: int) -> None:
        expected = _sharded(rank, num_ranks, stage, name)
        for unscales in (True, False):
            model = onecopy.shard(seeded(TinyGPT), stage, precision="bf16-lean")
            optimizer = OPTIMIZERS[name](model.parameters())
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
            first, second = (part(batch, rank, num_ranks) for batch in token_batches(2))
            for batch, bad in ((first, False), (first, rank == 0), (second, False)):
                scaler.scale(model(*batch) * (float("inf") if bad else 1.0)).backward()
                if unscales:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert scaler.get_scale() == 512.0
            assert_same_weights(gathered_weights(model), expected.weights, atol=0)

    yield On(num_ranks, run)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_no_sync_and_an_early_end_are_the_same_step(stage: int) -> Forked:
    """Oracle: `accumulate=3`. Whole kept gradients are bf16, `p.grad` is pending until they are reduced."""

    def run(rank: int) -> None:
        batches = [part(batch, rank, 2) for batch in token_batches(3)]
        expected = onecopy.shard(seeded(TinyGPT), stage, precision="bf16-lean", accumulate=3)
        SGD(expected.parameters(), lr=0.1)
        for batch in batches:
            expected(*batch).backward()
        for early in (False, True):
            model = onecopy.shard(seeded(TinyGPT), stage, precision="bf16-lean")
            with model.no_sync():
                for batch in batches if early else batches[:2]:
                    model(*batch).backward()
            if stage < 2:
                with pytest.raises(UsageError, match="not been reduced"):
                    clip_grad_norm_(model.parameters(), 1.0)
            psi = onecopy.padded_numel(model)
            assert onecopy.meter(model).live["gradients_whole"] == (2 * psi if stage < 2 else 0)
            model.reduce_gradients() if early else model(*batches[2]).backward()
            for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
                assert torch.equal(_narrow(mine).local, _narrow(theirs).local)
                assert _narrow(mine).local.dtype == BF16

    yield On(2, run)


@one_fork
def test_a_saved_run_goes_on_as_if_nothing_had_been(tmp_path: Path) -> Forked:
    def run(rank: int) -> None:
        batches = [part(batch, rank, 2) for batch in token_batches(2)]
        kept = onecopy.shard(seeded(TinyGPT), 2, precision="bf16-lean")
        optimizer = AdamW(kept.parameters(), lr=1e-3)
        train(kept, optimizer, batches[:1])
        onecopy.save(tmp_path, kept, optimizer)
        loaded = onecopy.shard(TinyGPT(), 2, precision="bf16-lean")
        other = AdamW(loaded.parameters(), lr=1e-3)
        onecopy.load(tmp_path, loaded, other)
        for model, made in ((kept, optimizer), (loaded, other)):
            train(model, made, batches[1:])
        assert {t.dtype for s in optimizer.state.values() for t in s.values()} == {torch.float32}
        assert_same_weights(gathered_weights(loaded), gathered_weights(kept), atol=0)

    yield On(2, run)


# --- the tensor alone


def _narrow(parameter: nn.Parameter) -> NarrowGradient:
    assert isinstance(parameter.grad, NarrowGradient)
    return parameter.grad


def _pair() -> tuple[NarrowGradient, SlicedTensor, Tensor, Tensor]:
    """A narrow gradient and a sliced tensor beside it; both as plain fp32 tensors."""
    model = onecopy.shard(nn.Linear(7, 5, bias=False), 3)
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to(BF16)
    gradient = gradient_slice(values.flatten().clone(), model.weight.slicing, torch.float32)
    state = model.weight.detach()
    assert isinstance(gradient, NarrowGradient)
    return gradient, state, values.float(), state.local.view(5, 7).clone()


READS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda g, s: g + 2 * s,
    "clone": lambda g, s: g.clone(),
    "lerp": lambda g, s: s.lerp(g, 0.1),
    "where": lambda g, s: torch.where(g > s, g, s),
    "zeros_like": lambda g, s: torch.zeros_like(g),
    "double": lambda g, s: g.double() / 3,
    "foreach add": lambda g, s: torch._foreach_add([g, s], [s, g], alpha=0.1)[1],
    "foreach neg": lambda g, s: torch._foreach_neg([s, g])[1],
    "into the other": lambda g, s: s.clone().lerp_(g, 0.1),
    "into a list": lambda g, s: _in_place(torch._foreach_addcmul_, [s.clone()], [g], [g], 0.1),
}

WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "mul_": lambda g, s: g.mul_(torch.tensor(1 / 3)),
    "add_": lambda g, s: g.add_(s, alpha=0.1),
    "zero_": lambda g, s: g.zero_(),
    "copy_": lambda g, s: g.copy_(s),
    "div_ by itself": lambda g, s: g.div_(g),
    "foreach mul_": lambda g, s: _in_place(torch._foreach_mul_, [g], torch.tensor(1 / 3)),
    "foreach add_": lambda g, s: _in_place(torch._foreach_add_, [g, s.clone()], [s, g]),
    "foreach zero_": lambda g, s: _in_place(torch._foreach_zero_, [g]),
    "foreach scalars": lambda g, s: _in_place(torch._foreach_mul_, [g, s.clone()], [1 / 3, 1.0]),
}


def _in_place(call: Callable[..., None], tensors: list[Any], *others: Any) -> Any:
    call(tensors, *others)
    return tensors[0]


@pytest.mark.parametrize("name", READS)
def test_what_reads_it_sees_the_declared_dtype(name: str) -> None:
    """Oracle: the same operation on the widened elements. Nothing is rounded, and results are wide: states are."""
    gradient, state, wide, plain = _pair()
    found, expected = READS[name](gradient, state), READS[name](wide, plain)
    assert type(found) is SlicedTensor
    assert found.dtype == found.local.dtype == expected.dtype
    assert torch.equal(found.local, expected.flatten())
    assert torch.equal(gradient.local.float(), _pair()[2].flatten()), "the gradient is as it was"


@pytest.mark.parametrize("name", WRITES)
def test_what_writes_to_it_computes_in_the_declared_dtype_and_rounds_once(name: str) -> None:
    """Oracle: the same operation on the widened elements, then one rounding; factors are not rounded before."""
    gradient, state, wide, plain = _pair()
    memory = gradient.local.data_ptr()
    returned, expected = WRITES[name](gradient, state), WRITES[name](wide, plain)
    assert returned is gradient
    assert gradient.local.data_ptr() == memory
    assert gradient.local.dtype == BF16
    assert torch.equal(gradient.local, expected.flatten().to(BF16))


def test_aliases_copies_and_words_are_those_of_a_gradient() -> None:
    gradient, _, wide, _ = _pair()
    alias, copied = gradient.detach(), copy.deepcopy(gradient)
    gradient.zero_()
    assert isinstance(alias, NarrowGradient)
    assert isinstance(copied, NarrowGradient)
    assert (alias.local.sum().item(), alias.dtype) == (0.0, torch.float32)
    assert (copied.local.dtype, copied.dtype) == (BF16, torch.float32)
    assert torch.equal(copied.local.float(), wide.flatten())
    assert "torch.float32" in repr(copied)
    with pytest.raises(NeedsWholeError, match=r"'weight'.*onecopy\.gathered"):
        gradient.sum(0)


@one_fork
def test_a_gradient_that_is_pending_beside_it_is_still_refused() -> Forked:
    """Two units, of which one backward reached one: a norm over both must not take the other's placeholder."""

    def run(rank: int) -> None:
        model = onecopy.shard(seeded(Stack), 1, precision="bf16-lean")
        batch = part(vector_batches(1)[0], rank, 2)
        model(*batch).backward()
        reduced = [p.grad for p in model.parameters()]
        with model.no_sync():
            model(*batch).backward()
        pending = [p.grad for p in model.parameters()]
        for call in (
            lambda: torch._foreach_norm([reduced[0], pending[0]]),
            lambda: torch._foreach_mul_([reduced[0], pending[0]], 2.0),
            lambda: reduced[0] + pending[0],
        ):
            with pytest.raises(UsageError, match="not been reduced"):
                call()

    yield On(2, run)


# --- at the step: a constant beside the slices

LARGE: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "AdamW foreach": lambda p: AdamW(p, lr=1e-2),
    "AdamW for-loop": lambda p: AdamW(p, lr=1e-2, foreach=False),
    "Adam amsgrad": lambda p: Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1, maximize=True),
    "SGD momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD for-loop": lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "SGD foreach": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "SGD fused": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad fused": lambda p: Adagrad(p, lr=0.1, fused=True),
}


class Tables(nn.Module):
    """Embeddings alone: many elements, little to compute."""

    def __init__(self, rows: tuple[int, ...]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(count, 64) for count in rows)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([table(x).float().square().mean() for table in self.tables]).sum()


@pytest.mark.parametrize("name", LARGE)
def test_gradients_that_are_cut_into_pieces_step_like_whole_ones(name: str) -> None:
    """Two and a half pieces, and small ones before and after. Oracle: plain PyTorch with the widened gradients."""
    rows, rounds = (100, 2 * 2**20 // 64 + 8000, 3, 7000, 12000), 2
    twin, model = seeded(Tables, rows), onecopy.shard(seeded(Tables, rows), 2, precision="bf16-lean")
    optimizers = [LARGE[name](list(m.parameters())) for m in (HalfTwin(twin, BF16), model)]
    for index in range(rounds):
        for m, optimizer in zip((HalfTwin(twin, BF16), model), optimizers, strict=True):
            m(torch.tensor([0, 1, 2 - index])).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(gathered_weights(model), whole_weights(twin), atol=1e-7)


def _step_peak(precision: str, name: str, folder: Path) -> int:
    """Most bytes that torch's allocator had handed out at once during clip and step, over what it had before."""
    model = onecopy.shard(seeded(Tables, (2**17, *[2**14] * 8)), 2, precision=precision)
    optimizer = LARGE[name](model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.tensor([1])).backward()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
    seen.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    memory = [event["args"] for event in events if event.get("name") == "[memory]"]
    return max(m["Total Allocated"] for m in memory) - (memory[0]["Total Allocated"] - memory[0]["Bytes"])


@pytest.mark.parametrize("name", ["AdamW fused", "AdamW foreach", "SGD fused", "SGD foreach", "SGD for-loop"])
def test_a_step_takes_a_constant_more_than_with_wide_gradients(name: str, tmp_path: Path) -> None:
    """17 M elements, half of them in one table: 64 MiB if widened at once. Witness: torch's profiler."""
    narrow, wide = (
        run_ranks(1, lambda rank, p=precision: _step_peak(p, name, tmp_path), group=False)[0]
        for precision in ("bf16-lean", "bf16")
    )
    # One piece of 4 MiB, and numbers of a few bytes.
    assert 4 * 2**20 <= narrow < wide + 5 * 2**20
