"""The floor among the benchmarks' systems. Oracles: torch's AdamW in one process; torch's profiler; ratios by hand."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import compare
import tables
import wire
from harness import systems
from harness.contest import Contest, Timed
from harness.work import Work
from ranks import run_ranks
from trained.cases import Batch, tokens
from trained.gpt import Shape
from trained.nets import Llama, lora_gpt

VOCABULARY = 37
# Without biases of attention's keys: their gradient is rounding alone, of which Adam makes a whole step.
BUILD = {
    "all trained": lambda: Llama(VOCABULARY, layers=1, hidden=20, heads=2),
    "base frozen": lambda: lora_gpt(Shape(layers=2, hidden=20, heads=2, vocabulary=VOCABULARY), rank=3),
}
STEPS = 3


# --- what it does


def _model(kind: str) -> nn.Module:
    """Without zeros, so that weight decay alone changes every element that AdamW updates."""
    torch.manual_seed(0)
    model = BUILD[kind]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    return model


def _batches(rank: int) -> list[list[Batch]]:
    """Two micro-batches for each step, other ones for each rank."""
    generator = torch.Generator().manual_seed(rank)
    return [[tokens(VOCABULARY)(generator, 1, 6) for _ in range(2)] for _ in range(STEPS)]


def _flat(model: nn.Module, trained: bool = True) -> Tensor:
    found = [parameter.detach().flatten() for parameter in model.parameters() if parameter.requires_grad == trained]
    return torch.cat([torch.empty(0), *found])


def _train(rank: int, kind: str, ranks: int) -> tuple[list[bool], float, bool]:
    """Which trained elements the floor changed; its greatest relative difference from the twin; is what is frozen left?

    The twin updates all elements with a plain AdamW, and then puts back those that are another rank's.
    """
    model = _model(kind)
    twin, before, frozen = copy.deepcopy(model), _flat(model), _flat(model, trained=False)
    trainer = systems.SYSTEMS[systems.FLOOR].set_up(model, systems.Settings("fp32", micro_batches=2))
    trained = [parameter for parameter in twin.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False, fused=False)
    place = torch.arange(before.numel())
    own = (place >= before.numel() * rank // ranks) & (place < before.numel() * (rank + 1) // ranks)
    for batches in _batches(rank):
        step = trainer.step(batches)
        losses = [twin(*batch) / len(batches) for batch in batches]
        assert step.loss == pytest.approx(sum(loss.item() for loss in losses), rel=1e-5)
        assert all(parameter.grad is None for parameter in model.parameters())
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        nn.utils.vector_to_parameters(torch.where(own, _flat(twin), before), trained)
    after, expected = _flat(model), _flat(twin)
    changed, difference = after != before, ((after - expected) / expected).abs().max().item()
    return changed.tolist(), difference, torch.equal(_flat(model, trained=False), frozen)


@pytest.mark.parametrize("kind", BUILD)
def test_each_rank_updates_its_own_share_as_adamw_does_and_all_shares_are_the_model(kind: str) -> None:
    """Three ranks, which divide nothing. Oracle: one process with torch's AdamW, one tensor at a time."""
    found = run_ranks(3, _train, kind, 3)
    with torch.device("meta"):
        trained = sum(p.numel() for p in BUILD[kind]().parameters() if p.requires_grad)
    assert [sum(changed) for changed, _, _ in found] == [trained * (r + 1) // 3 - trained * r // 3 for r in range(3)]
    assert all(sum(element) == 1 for element in zip(*(changed for changed, _, _ in found), strict=True))
    assert max(difference for _, difference, _ in found) < 1e-5
    assert all(untouched for _, _, untouched in found)


def _messages(rank: int, name: str) -> set[str]:
    """What torch's profiler saw of process groups while a system was set up and took its steps."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        trainer = systems.SYSTEMS[name].set_up(_model("all trained"), systems.Settings("fp32", micro_batches=2))
        for batches in _batches(rank):
            trainer.step(batches)
    return {event.key for event in profiler.key_averages() if event.key.startswith(("c10d::", "gloo:"))}


def test_it_sends_nothing() -> None:
    """DDP, which all-reduces its gradients, shows that the profiler sees what is sent."""
    assert run_ranks(2, _messages, systems.FLOOR) == [set(), set()]
    assert all("gloo:all_reduce" in found for found in run_ranks(2, _messages, "DDP"))


# --- what is said of it


def test_it_is_no_system_of_any_other_comparison() -> None:
    assert [name for name, system in systems.SYSTEMS.items() if system.floor] == [systems.FLOOR]
    assert not systems.SYSTEMS[systems.FLOOR].ours
    assert systems.FLOOR not in {name for target in compare.TARGETS for name in (target.system, target.peer)}
    assert systems.FLOOR not in wire.SYSTEMS


def _contest(found: float, floor: float | None) -> Contest:
    """DDP took 1, 2 and 4 s; onecopy's stage 1 and the floor so many times that."""

    def took(ratio: float, deviation: float) -> Timed:
        return Timed([ratio, 2 * ratio, 4 * ratio], [0.1] * 3, [5.0] * 3, deviation)

    work = Work("gpt-30m", "fp32", micro_batches=1, ranks=2, samples=2, size=128, steps=3, warmup=1)
    timed = {"DDP": took(1.0, 0.0), "onecopy stage 1": took(found, 1e-6)}
    return Contest(work, 10, 10, timed, floor=None if floor is None else took(floor, 0.5))


@pytest.mark.parametrize(
    ("found", "floor", "words", "cell"),
    [
        (0.99, 0.97, "0.97 | missed by 0.04, out of reach here: the floor is 0.97", "**0.99** (floor 0.97)"),
        (0.99, 0.954, "0.95 | missed by 0.04", "**0.99**"),
        (0.99, None, " | missed by 0.04", "**0.99**"),
        (0.94, 0.97, "0.97 | met", "0.94"),
        (0.94, None, " | met", "0.94"),
    ],
)
def test_a_miss_is_told_from_a_target_below_the_floor(
    found: float, floor: float | None, words: str, cell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Target 0.95 of DDP, by hand. Results that were taken before there was a floor have none in their file."""
    contest = _contest(found, floor)
    printed = compare.report(contest)
    assert f"| onecopy stage 1 | DDP | time ≤ 0.95 | {found:.2f} ({found:.2f} – {found:.2f}) | {words} |" in printed
    assert "not counted" not in printed
    written = asdict(contest)
    if floor is None:
        del written["floor"]
    (tmp_path / "compare_gpt30m_2.json").write_text(json.dumps({"contests": [written]}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    head, _, row = tables.times().splitlines()
    assert row.split(" | ")[head.split(" | ").index("stage 1 / DDP ≤ 0.95")] == cell
    assert "Not counted" not in tables.cases()
    line = None if floor is None else f"{2 * floor:.3f} | {floor:.2f} ({floor:.2f} – {floor:.2f}) | 0.1000 |"
    assert (f"| the floor: no communication | {line}" in printed) == (floor is not None)
    sentence = "The floor, no communication: "
    told = [part.removeprefix(sentence) for part in tables.cases().splitlines() if part.startswith(sentence)]
    spread = f"{floor:.2f} ({floor:.2f} – {floor:.2f})" if floor else ""
    assert told == ([f"{2 * floor:.3f} s, {spread} of DDP, the optimizer 0.1000 s."] if floor else [])
