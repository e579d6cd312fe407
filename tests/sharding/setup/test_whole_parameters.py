"""Whole parameters: the user's own optimizer, unchanged, equal to one process to the last bit.

Oracle: `train_in_rank_order`, plain PyTorch in one process, which adds what each rank would compute in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

import onecopy
from models import TinyGPT, seeded, token_batches
from one_fork import Forked, On, one_fork
from onecopy.sharding.setup.api import engine_of
from oracle import assert_same_weights, gathered_weights, part, train, train_in_rank_order

STEPS = 10
ROWS = 12
"""What 2, 3 and 4 divide."""

every_layout = pytest.mark.parametrize("stage, num_ranks", [(1, 2), (2, 3), (3, 4)])


class Both(Optimizer):
    """Several optimizers as one, for a loop that knows one. It holds no parameters itself."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


def is_matrix(name: str, parameter: Tensor) -> bool:
    """The hidden layers' matrices, which Muon's documentation asks for; the embeddings are AdamW's."""
    return parameter.ndim == 2 and "blocks" in name


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    matrices = [p for name, p in model.named_parameters() if is_matrix(name, p)]
    others = [p for name, p in model.named_parameters() if not is_matrix(name, p)]
    return [optim.Muon(matrices, lr=0.02), AdamW(others, lr=1e-2, weight_decay=0.1)]


class Lamb(Optimizer):
    """LAMB (You et al. 2020, algorithm 2): a ratio of two norms of each parameter scales its step."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state |= {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                state["m"].lerp_(p.grad, 0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = state["m"] / (state["v"].sqrt() + 1e-6)
                ratio = p.norm() / update.norm()
                p.add_(update * ratio, alpha=-group["lr"])


Make = Callable[[nn.Module], list[Optimizer]]

OPTIMIZERS: dict[str, Make] = {
    "Muon and AdamW": muon_and_adamw,
    "Adafactor": lambda model: [optim.Adafactor(model.parameters(), lr=1e-2)],
    "Rprop": lambda model: [optim.Rprop(model.parameters(), lr=1e-3)],
}


def train_alone(make: Make, num_ranks: int, batches: Sequence[Any], **settings: Any) -> dict[str, Tensor]:
    model = seeded(TinyGPT)
    together = Both(*make(model))
    return train_in_rank_order(model, lambda _: together, batches, num_ranks, **settings).weights


@pytest.mark.parametrize("name", OPTIMIZERS)
@every_layout
@one_fork
def test_trains_to_the_bits_of_one_process(name: str, stage: int, num_ranks: int) -> Forked:
    """Given the optimizers, `shard` lays whole what they need."""

    def run(rank: int) -> None:
        batches = token_batches(STEPS, rows=ROWS)
        model = seeded(TinyGPT)
        optimizers = OPTIMIZERS[name](model)
        onecopy.shard(model, stage, optimizer=optimizers)
        train(model, Both(*optimizers), [part(batch, rank, num_ranks) for batch in batches])
        assert_same_weights(gathered_weights(model), train_alone(OPTIMIZERS[name], num_ranks, batches), atol=0)

    yield On(num_ranks, run)


SETTINGS: dict[str, dict[str, Any]] = {
    "small buffers": {"bucket_bytes": 2000},
    "accumulate": {"accumulate": 2},
    "bf16": {"precision": "bf16"},
    "bf16-lean": {"precision": "bf16-lean"},
    "one unit": {"units": []},
}


@pytest.mark.parametrize("setting", SETTINGS)
@one_fork
def test_settings_change_no_bit_for_the_worse(setting: str) -> Forked:
    """Oracle: `onecopy.shard` at the default layout's stage 0, where every rank steps over all parameters."""

    def run(rank: int) -> None:
        batches = [part(batch, rank, 3) for batch in token_batches(4, rows=ROWS)]
        found = []
        for stage, whole in ((0, None), (2, is_matrix), (3, is_matrix)):
            model = onecopy.shard(seeded(TinyGPT), stage, whole=whole, **SETTINGS[setting])
            accumulate = SETTINGS[setting].get("accumulate", 1)
            train(model, Both(*muon_and_adamw(model)), batches, accumulate=accumulate, clip=0.5)
            found.append(gathered_weights(model))
        # Stages 0 and 2 add micro-batches and ranks in other orders, and bf16 gradients are rounded in between.
        close = {"atol": 2e-2 if setting.startswith("bf16") else 2e-3}
        assert_same_weights(found[1], found[2], **({"atol": 0.0} if setting != "accumulate" else close))
        assert_same_weights(found[0], found[1], **close)

    yield On(3, run)


@pytest.mark.parametrize("name", ["Muon and AdamW", "Adafactor"])
@pytest.mark.parametrize("stage", [2, 3])
@one_fork
def test_hybrid_ranks_own_alike(name: str, stage: int) -> Forked:
    """Two ranks share the slices, two hold them again. Oracle: the same over all four ranks, within what the other
    order of sums leaves.
    """

    def run(rank: int) -> None:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        batches = [part(batch, rank, 4) for batch in token_batches(3, rows=ROWS)]
        found = []
        for over in (mesh, None):
            model = seeded(TinyGPT)
            optimizers = OPTIMIZERS[name](model)
            onecopy.shard(model, stage, optimizer=optimizers, mesh=over)
            train(model, Both(*optimizers), batches)
            found.append(gathered_weights(model))
        assert_same_weights(found[0], found[1], atol=2e-3)
        mine = torch.cat([value.flatten() for value in found[0].values()])
        everyones = [torch.empty_like(mine) for _ in range(4)]
        dist.all_gather(everyones, mine)
        assert all(torch.equal(mine, other) for other in everyones)

    yield On(4, run)


@pytest.mark.parametrize("transport", ["memory", "sockets"])
@one_fork
def test_what_the_step_sees_and_what_it_leaves(transport: str) -> Forked:
    """Owned: a plain tensor of full shape. Elsewhere: nothing, no state and no count. Outside of the step: slices."""

    class Looks(optim.SGD):
        seen: list[tuple[type, tuple[int, ...], bool]]

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            parameters = [p for group in self.param_groups for p in group["params"]]
            self.seen = [(type(p), tuple(p.shape), type(p.grad) is Tensor) for p in parameters]
            for p in parameters:
                self.state[p]["like"] = torch.zeros_like(p)
                self.state[p]["parts"] = [torch.ones(2, 2), [], None]

    onecopy.needs_whole(Looks)

    def run(rank: int) -> tuple[int, int, list[Any], int]:
        model = onecopy.shard(seeded(TinyGPT), 3, whole=is_matrix)
        matrices = [p for name, p in model.named_parameters() if is_matrix(name, p)]
        optimizer = Looks(matrices, lr=1e-2)
        model(*part(token_batches(1)[0], rank, 2)).backward()
        groups = optimizer.param_groups[0]["params"]
        optimizer.step()
        assert optimizer.param_groups[0]["params"] is groups
        owned = [p for p in matrices if p.slicing.is_owned]
        assert [p for p in optimizer.state if p in set(owned)] == owned
        assert len(optimizer.state) == len(owned) == len(optimizer.state_dict()["state"])
        assert all(type(states["like"]) is Tensor for states in optimizer.state.values())
        assert all(type(p.grad) is onecopy.SlicedTensor and p.grad.shape == p.shape for p in matrices)
        assert optimizer.seen == [(nn.Parameter, tuple(p.shape), True) for p in owned]
        optimizer.zero_grad()
        assert all(p.grad is None for p in matrices)
        total = onecopy.meter(model).live["optimizer"]
        return len(owned), sum(p.numel() for p in owned), [p.slicing.name for p in owned], total

    found = yield On(2, run, transport=transport)
    names = [name for _, _, owned, _ in found for name in owned]
    expected = [name for name, p in TinyGPT().named_parameters() if is_matrix(name, p)]
    assert sorted(names) == sorted(expected)
    for count, numel, _, total in found:
        assert total == 4 * numel + 16 * count


@pytest.mark.parametrize("stage, num_ranks", [(1, 2), (3, 3)])
@one_fork
def test_clipping_scaling_and_schedules_are_those_of_one_process(stage: int, num_ranks: int) -> Forked:
    """Oracle: the same loop in one process on the gradients of all ranks' rows, its norms and its scales; a step that
    overflows is skipped on every rank.
    """

    def loop(model: nn.Module, optimizers: list[Optimizer], mine: Callable[[Any], Any]) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        schedules = [optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
        found = []
        for number, batch in enumerate(token_batches(4, rows=ROWS)):
            loss = model(*mine(batch)) * (1e38 if number == 1 else 1.0)
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            norm = clip_grad_norm_(model.parameters(), 0.1).item()
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad(set_to_none=number % 2 == 0)
            scaler.update()
            for schedule in schedules:
                schedule.step()
            found += [norm if number != 1 else 0.0, scaler.get_scale(), optimizers[0].param_groups[0]["lr"]]
        return found

    def run(rank: int) -> None:
        twin, model = seeded(TinyGPT), seeded(TinyGPT)
        expected = loop(twin, muon_and_adamw(twin), lambda batch: batch)
        optimizers = muon_and_adamw(model)
        onecopy.shard(model, stage, optimizer=optimizers)
        found = loop(model, optimizers, lambda batch: part(batch, rank, num_ranks))
        assert found == pytest.approx(expected, rel=1e-3)
        # Newton-Schulz computes in bf16, which turns the last bit of a gradient into the third digit of an update.
        assert_same_weights(gathered_weights(model), dict(twin.named_parameters()), atol=5e-3)

    yield On(num_ranks, run)


@one_fork
def test_an_optimizer_made_before_keeps_its_states_on_the_owner() -> Forked:
    """Oracle: six steps in one process; two of them before sharding, on all rows."""

    def run(rank: int) -> None:
        batches = token_batches(6, rows=ROWS)
        twin, model = seeded(TinyGPT), seeded(TinyGPT)
        before = Both(*muon_and_adamw(twin))
        train(twin, before, batches[:2])
        train_in_rank_order(twin, lambda _: before, batches[2:], 2)
        optimizers = muon_and_adamw(model)
        train(model, Both(*optimizers), batches[:2])
        onecopy.shard(model, 3, optimizer=optimizers)
        train(model, Both(*optimizers), [part(batch, rank, 2) for batch in batches[2:]])
        assert_same_weights(gathered_weights(model), dict(twin.named_parameters()), atol=0)

    yield On(2, run)


@one_fork
def test_a_rank_may_own_nothing_of_an_optimizer() -> Forked:
    """One matrix and three ranks. Oracle: one process."""

    def only(model: nn.Module) -> list[Optimizer]:
        named = dict(model.named_parameters())
        matrix = named.pop("blocks.0.up.weight")
        return [optim.Muon([matrix], lr=0.02), AdamW(named.values(), lr=1e-2)]

    def run(rank: int) -> None:
        batches = token_batches(4, rows=ROWS)
        model = seeded(TinyGPT)
        optimizers = only(model)
        onecopy.shard(model, 3, optimizer=optimizers)
        train(model, Both(*optimizers), [part(batch, rank, 3) for batch in batches])
        assert_same_weights(gathered_weights(model), train_alone(only, 3, batches), atol=0)

    yield On(3, run)


@pytest.mark.parametrize("stage", [0, 3])
@one_fork
def test_where_nothing_is_cut_every_layout_is_whole(stage: int) -> Forked:
    """At stage 0, and on one rank, Muon needs no argument. Oracle: one process."""

    def run(rank: int) -> None:
        ranks = 2 if stage == 0 else 1
        batches = token_batches(4, rows=ROWS)
        model = onecopy.shard(seeded(TinyGPT), stage)
        train(model, Both(*muon_and_adamw(model)), [part(batch, rank, ranks) for batch in batches])
        assert_same_weights(gathered_weights(model), train_alone(muon_and_adamw, ranks, batches), atol=0)

    yield On(2 if stage == 0 else 1, run)


@one_fork
def test_norms_work_at_any_layout() -> Forked:
    """LAMB's ratios of norms: over slices a message each, over whole parameters none. Oracle: one process."""

    def lamb(model: nn.Module) -> list[Optimizer]:
        return [Lamb(model.parameters())]

    onecopy.needs_whole(Lamb)

    def run(rank: int) -> None:
        batches = token_batches(STEPS, rows=ROWS)
        expected = train_alone(lamb, 2, batches)
        for whole, atol in ((None, 1e-5), (lambda name, p: True, 0)):
            model = onecopy.shard(seeded(TinyGPT), 3, whole=whole)
            if whole is None:
                # What it needs was said for whole parameters; a class of its own needs no more than slices.
                optimizer: Optimizer = type("Sliced", (Lamb,), {"step": lambda self: Lamb.step(self)})(
                    model.parameters()
                )
            else:
                optimizer = Lamb(model.parameters())
            train(model, optimizer, [part(batch, rank, 2) for batch in batches])
            assert_same_weights(gathered_weights(model), expected, atol=atol)

    yield On(2, run)


@pytest.mark.parametrize("stage", [2, 3])
@one_fork
def test_the_ledger_books_what_each_rank_sends(stage: int) -> Forked:
    """Closed formula: over all ranks (N-1) times the padded model for each gather and each reduce, as with equal
    slices; of it a rank sends its own slice N-1 times, and all but its own once.
    """

    def run(rank: int) -> tuple[int, int, int, int]:
        model = onecopy.shard(seeded(TinyGPT), stage, whole=is_matrix)
        optimizers = muon_and_adamw(model)
        train(model, Both(*optimizers), [part(batch, rank, 3) for batch in token_batches(3, rows=ROWS)])
        own = sum(bucket.slice_numel for unit in engine_of(model).units for bucket in unit.buckets)
        step = onecopy.ledger(model).last_step
        assert step is not None
        return step.bytes_sent("all_gather"), step.bytes_sent("reduce_scatter"), own, onecopy.padded_numel(model)

    found = yield On(3, run)
    gathers = 2 if stage == 3 else 1
    for gathered, reduced, own, padded in found:
        assert gathered == gathers * 2 * 4 * own
        assert reduced == 4 * (padded - own)
    assert sum(gathered for gathered, *_ in found) == gathers * 2 * 4 * padded
    assert sum(own for *_, own, _ in found) == padded
