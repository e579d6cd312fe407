"""A run without any loss: mirrors follow bit for bit, and nothing else changes. Oracle: plain training of the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

import onecopy
from one_fork import Forked, On, one_fork
from onecopy.errors import RecoveryError, SettingsError, UsageError
from onecopy.planner.formulas.recovery import mirror_elements, mirror_memory

STEPS = 4


class Tied(nn.Module):
    """Tied weights, dropout, and a buffer that changes."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(17, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        for layer in self.layers:
            x = F.dropout(torch.relu(layer(x)), 0.1) + x
        return F.cross_entropy(self.head(x), tokens.roll(1))


def _batches(rank: int, micro_batches: int) -> Callable[[int], Iterator[list[Tensor]]]:
    def batches(step: int) -> Iterator[list[Tensor]]:
        for number in range(step, STEPS):
            generator = torch.Generator().manual_seed(100 * number + rank)
            yield [torch.randint(0, 17, (6,), generator=generator) for _ in range(micro_batches)]

    return batches


def _make(rank: int, make: Callable[[Any], Optimizer], **options: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(3)
    model = Tied()
    onecopy.shard(model, units=list(model.layers), **options)
    torch.manual_seed(50 + rank)
    return model, make(model.parameters())


def _weights(model: nn.Module) -> list[Tensor]:
    with onecopy.gathered(model):
        return [p.detach().clone() for p in model.parameters()] + [b.clone() for b in model.buffers()]


def _train_plainly(rank: int, make: Callable[[Any], Optimizer], micro_batches: int, **options: Any) -> list[Tensor]:
    model, optimizer = _make(rank, make, **options)
    for batch in _batches(rank, micro_batches)(0):
        optimizer.zero_grad()
        for tokens in batch:
            (model(tokens) / micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return _weights(model)


def _train_in_a_run(rank: int, make: Callable[[Any], Optimizer], micro_batches: int, **options: Any) -> list[Tensor]:
    model, optimizer = _make(rank, make, **options)
    run = onecopy.resilient(model, optimizer)
    for batch in run.loop(_batches(rank, micro_batches)):
        with run:
            for tokens in batch:
                (model(tokens) / micro_batches).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            run.step(1.0)
            assert run.total == [float(dist.get_world_size())]
    assert run.steps == STEPS
    run.check()
    return _weights(model)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
}


def _compare(rank: int, name: str, micro_batches: int, options: dict[str, Any]) -> bool:
    plain = {key: value for key, value in options.items() if key != "mirror"}
    expected = _train_plainly(rank, OPTIMIZERS[name], micro_batches, **plain)
    found = _train_in_a_run(rank, OPTIMIZERS[name], micro_batches, **options)
    return all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    "num_ranks, name, micro_batches, options",
    [
        (2, "AdamW fused", 1, {"stage": 1, "mirror": True}),
        (3, "AdamW fused", 2, {"stage": 1, "mirror": True, "accumulate": 2}),
        (3, "AdamW", 2, {"stage": 2, "mirror": True, "accumulate": 2}),
        (2, "SGD", 1, {"stage": 3, "mirror": "cpu"}),
        (3, "RMSprop", 1, {"stage": 3, "mirror": True}),
        (2, "AdamW fused", 1, {"stage": 3, "mirror": True, "precision": "bf16-lean"}),
        (4, "AdamW fused", 1, {"stage": 3, "copies": 2}),
        (2, "AdamW fused", 1, {"stage": 0}),
        (2, "AdamW fused", 1, {"stage": 3}),
    ],
    ids=str,
)
@one_fork
def test_a_run_trains_as_a_plain_loop_and_its_mirrors_follow(
    num_ranks: int, name: str, micro_batches: int, options: dict[str, Any]
) -> Forked:
    assert (yield On(num_ranks, _compare, name, micro_batches, options)) == [True] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
@one_fork
def test_the_mirror_sends_and_holds_what_the_formula_says(num_ranks: int) -> Forked:
    """Beside the gradients a capsule goes along, with random states; it is the rest, of constant size."""

    def run(rank: int) -> tuple[int, int, int]:
        model, optimizer = _make(rank, OPTIMIZERS["AdamW fused"], stage=3, mirror=True)
        run = onecopy.resilient(model, optimizer)
        for batch in run.loop(_batches(rank, 1)):
            with run:
                model(batch[0]).backward()
                run.step()
        traffic = onecopy.ledger(model).last_step
        assert traffic is not None
        return onecopy.padded_numel(model), traffic.bytes_sent("mirror"), onecopy.meter(model).live["mirror"]

    for numel, sent, held in (yield On(num_ranks, run)):
        assert 0 <= sent - 4 * mirror_elements(numel, num_ranks) < 2**15
        padding = held - mirror_memory(numel, num_ranks)
        # The master has padding, which the states of parameters have not.
        assert -8 * 8 * 16 * num_ranks < padding <= 0


@one_fork
def test_a_mirror_that_is_not_the_same_is_found() -> Forked:
    def run(rank: int) -> str:
        model, optimizer = _make(rank, OPTIMIZERS["SGD"], stage=3, mirror=True)
        run = onecopy.resilient(model, optimizer)
        for batch in run.loop(_batches(rank, 1)):
            with run:
                model(batch[0]).backward()
                run.step()
        if rank == 1:
            run._holdings.held["mirror"].masters[0][0] += 1
        with pytest.raises(RecoveryError) as raised:
            run.check()
        return str(raised.value)

    for words in (yield On(3, run)):
        assert words == "rank 1 mirrors the slices of rank 2, and they are not the same"


@one_fork
def test_a_loop_is_left_by_break_and_others_follow() -> Forked:
    def run(rank: int) -> tuple[int, int]:
        model, optimizer = _make(rank, OPTIMIZERS["SGD"], stage=2, mirror=True)
        run, visits = onecopy.resilient(model, optimizer), 0
        for epoch in range(3):
            for batch in run.loop(
                lambda step, e=epoch: _batches(rank, 1)(step % STEPS if step < STEPS * (e + 1) else STEPS)
            ):
                with run:
                    model(batch[0]).backward()
                    run.step()
        for _ in run.attempts():
            with run:
                visits += 1
        return run.steps, visits

    assert (yield On(2, run)) == [(3 * STEPS, 1)] * 2


@pytest.mark.parametrize(
    "options, words",
    [
        ({"stage": 0, "mirror": True}, "nothing to do at stage 0"),
        ({"stage": 3, "mirror": "disk"}, "mirror must be False, True or"),
        ({"stage": 3, "mirror": True, "offload": onecopy.Offload("cpu")}, "cannot be combined with offload="),
        ({"stage": 3, "copies": 3}, "copies=3 does not divide the 2 ranks"),
        ({"stage": 3, "copies": 2, "mirror": True}, "not needed where 2 ranks hold each slice"),
    ],
    ids=str,
)
@one_fork
def test_what_cannot_be_held_twice_is_refused_in_words(options: dict[str, Any], words: str) -> Forked:
    def run(rank: int) -> str:
        with pytest.raises(SettingsError) as raised:
            onecopy.shard(Tied(), **options)
        return str(raised.value)

    for found in (yield On(2, run)):
        assert words in found


@one_fork
def test_what_a_run_cannot_bring_back_is_refused_in_words() -> Forked:
    def run(rank: int) -> list[str]:
        found = []
        model = Tied()
        onecopy.shard(model, 3, mirror=True, ignored=["layers.0"], units=list(model.layers))
        cases: list[tuple[type[Exception], Callable[[], object]]] = [
            (SettingsError, lambda: onecopy.resilient(model, torch.optim.SGD(model.parameters(), lr=1e-3))),
        ]
        matrices = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))
        muon = torch.optim.Muon(matrices.parameters(), lr=1e-3)
        onecopy.shard(matrices, 3, mirror=True, optimizer=muon)
        cases.append((SettingsError, lambda: onecopy.resilient(matrices, muon)))
        other, optimizer = _make(rank, OPTIMIZERS["SGD"], stage=3, mirror=True)
        cases += [
            (SettingsError, lambda: onecopy.resilient(other, optimizer, save_every=3)),
            (SettingsError, lambda: onecopy.resilient(other, optimizer, counter=3)),
            (SettingsError, lambda: onecopy.resilient(other, optimizer, average=onecopy.ema(other, 0.9))),
            (UsageError, lambda: onecopy.resilient(other, optimizer).step()),
        ]
        for kind, case in cases:
            with pytest.raises(kind) as raised:
                case()
            found.append(str(raised.value))
        other(torch.arange(6)).backward()
        with pytest.raises(UsageError) as raised:
            optimizer.step()
        found.append(str(raised.value))
        run = onecopy.resilient(other, optimizer)

        def forget_the_step() -> None:
            for batch in run.loop(lambda step: [torch.arange(6)] * 3):
                with run:
                    other(batch).backward()

        with pytest.raises(UsageError) as raised:
            forget_the_step()
        return [*found, str(raised.value)]

    ignored, whole, saves, counter, average, step, plain, forgotten = (yield On(2, run))[0]
    assert "is not a slice of the sharded model" in ignored
    assert "lie whole in one rank's slice" in whole
    assert "save_every= needs checkpoints=" in saves
    assert "must have state_dict() and load_state_dict(), or be a dict; found int" in counter
    assert "holds slices" in average
    assert "with run:" in step
    assert "onecopy.resilient(model, optimizer) keeps up to date" in plain
    assert "ended without run.step()" in forgotten
