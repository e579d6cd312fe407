"""The formulas against the engine: simulated at 8 to 1024 ranks on fake tensors, and real on CPU ranks.

Oracle: the engine's own meter and ledger. Tolerances are the project's: 3 % simulated, 5 % real.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch

import onecopy
from models import TinyGPT
from onecopy.errors import UsageError
from onecopy.planner.answer.compare import Comparison, compare, tabulate
from onecopy.planner.answer.estimate import Job, Option
from onecopy.planner.engine.fake import fake_ranks
from onecopy.planner.engine.simulate import Simulated, _features, describe_units, simulate
from onecopy.planner.engine.step import step_bytes
from onecopy.planner.formulas.activations import product_bytes
from onecopy.planner.formulas.traffic import step_elements
from onecopy.planner.model.schedule import Schedule, Sizes, Unit, Widths, padded_numels
from onecopy.planner.model.shape import Shape, Transformer, is_block
from ranks import run_ranks

transformers: Any = pytest.importorskip("transformers")
# Loaded here, where ranks are forked from, and not in each of them.
_LOADED = (transformers.GPT2LMHeadModel, transformers.LlamaForCausalLM, transformers.ResNetForImageClassification)

WORDS, LENGTH = 2, 64


def gpt2() -> Any:
    config = transformers.GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=4000, n_positions=64, use_cache=False)
    config.bos_token_id = config.eos_token_id = None
    config.loss_type = "ForCausalLM"
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=4000,
            use_cache=False,
        )
    )


def resnet() -> Any:
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(depths=[1, 1, 2], layer_type="basic", hidden_sizes=[64, 128, 256])
    )


def tokens() -> dict[str, Any]:
    numbers = torch.zeros(WORDS, LENGTH, dtype=torch.long)
    return {"input_ids": numbers, "labels": numbers}


def images() -> dict[str, Any]:
    return {"pixel_values": torch.zeros(2, 3, 64, 64), "labels": torch.zeros(2, dtype=torch.long)}


MODELS = {"gpt2": (gpt2, tokens), "llama": (llama, tokens), "resnet": (resnet, images)}


def _run_in_child(function: Any, *args: Any) -> Any:
    """A simulation makes a process group and threads, which the forking parent must not have."""
    return run_ranks(1, lambda rank: function(*args), group=False)[0]


def _both(name: str, schedules: list[Schedule], precision: str = "bf16") -> list[tuple[list[Unit], Simulated]]:
    build, batch = MODELS[name]
    units = describe_units(build, batch, precision=precision)
    return [(units, simulate(build, batch, schedule, precision=precision)) for schedule in schedules]


def _check(found: Comparison, tolerance: float) -> None:
    """Every phase's sum, and what does not depend on the moment: of two as high as each other either may be taken."""
    sums = {phase: engine for phase, category, _, engine in found.rows if category == "all"}
    assert set(sums) == {"forward", "backward", "step"}
    for phase, category, formula, engine in found.rows:
        if category == "all" or phase == "step" or category in ("parameters_sliced", "optimizer"):
            assert formula == pytest.approx(engine, rel=tolerance), (phase, category)


# At 1024 ranks every model and every stage is met once: which of them meet there does not matter to the formulas.
AGREEMENTS = {f"{name}-8": (name, 8, (0, 1, 2, 3)) for name in MODELS} | {
    "gpt2-1024": ("gpt2", 1024, (0, 3)),
    "llama-1024": ("llama", 1024, (1,)),
    "resnet-1024": ("resnet", 1024, (2,)),
}
REST = {f"{name}-64": (name, 64, (0, 1, 2, 3)) for name in MODELS} | {
    "gpt2-1024-rest": ("gpt2", 1024, (1, 2)),
    "llama-1024-rest": ("llama", 1024, (0, 2, 3)),
    "resnet-1024-rest": ("resnet", 1024, (0, 1, 3)),
}


@pytest.mark.parametrize(
    "name, ranks, stages",
    [
        *(pytest.param(*case, id=name) for name, case in AGREEMENTS.items()),
        *(pytest.param(*case, id=name, marks=pytest.mark.full) for name, case in REST.items()),
    ],
)
def test_formulas_agree_with_the_simulated_engine_within_3_percent(
    name: str, ranks: int, stages: tuple[int, ...]
) -> None:
    schedules = [Schedule(stage, ranks) for stage in stages]
    for schedule, (units, seen) in zip(schedules, _run_in_child(_both, name, schedules), strict=True):
        _check(tabulate(units, schedule, seen.peaks, seen.bytes_sent), 0.03)
        elements = step_elements(schedule.stage, seen.padded_parameters, ranks).total
        assert seen.bytes_sent == pytest.approx(2 * elements, rel=1e-6)


def test_formulas_agree_with_accumulation_and_hybrid_sharding() -> None:
    schedules = [
        *(Schedule(stage, 8, micro_batches=3) for stage in range(4)),
        *(Schedule(stage, 4, 2, implementation="fused") for stage in (1, 3)),
        Schedule(3, 8, prefetch=2),
    ]
    for schedule, (units, seen) in zip(schedules, _run_in_child(_both, "gpt2", schedules), strict=True):
        _check(tabulate(units, schedule, seen.peaks, seen.bytes_sent), 0.03)


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_formulas_agree_with_gradients_held_in_bf16(implementation: str) -> None:
    widths = Widths.of("bf16-lean")
    schedules = [
        Schedule(stage, 8, micro_batches=g, widths=widths, implementation=implementation)
        for stage, g in ((0, 1), (1, 3), (2, 3), (3, 1))
    ]
    for schedule, (units, seen) in zip(schedules, _run_in_child(_both, "gpt2", schedules, "bf16-lean"), strict=True):
        _check(tabulate(units, schedule, seen.peaks, seen.bytes_sent), 0.03)


def _checkpointed(kind: str) -> Comparison:
    job = Job(Shape("gpt2", (Unit("", ()),), Transformer(2, 256, 4, 4000)), LENGTH)
    option = Option(2, WORDS, 1, kind, "none", 8)  # type: ignore[arg-type]
    return compare(job, option, config=None, factory=None)


@pytest.mark.parametrize("kind", ["selective", "units", "units+cpu"])
def test_checkpoints_are_simulated(kind: str) -> None:
    """Oracles: the engine's meter, and b·s·h·L of 2 bytes (ZeRO §3.2), none on the device where they are moved.

    Selective recomputation keeps 9h of a GPT-2 block's products too; attention has dropout here, and is repeated.
    """
    rows = {
        (phase, name): (formula, engine) for phase, name, formula, engine in _run_in_child(_checkpointed, kind).rows
    }
    kept = WORDS * LENGTH * 256 * 2 * 2 * {"selective": 10, "units": 1, "units+cpu": 0}[kind]
    assert rows.get(("forward", "checkpoints"), (0, 0)) == (kept, kept)
    formula, engine = rows["forward", "activations"]
    assert formula == pytest.approx(engine, rel=0.03)


def build_tiny() -> TinyGPT:
    return TinyGPT(vocab=512, dim=128, heads=4, layers=4, length=64)


def _real(rank: int, stage: int, micro_batches: int, precision: str) -> dict[str, dict[str, int]]:
    torch.manual_seed(rank)
    model = onecopy.shard(build_tiny(), stage, precision=precision, accumulate=micro_batches)
    optimizer = torch.optim.AdamW(model.parameters())
    meter = onecopy.meter(model)
    peaks: dict[str, dict[str, int]] = {}
    for step in range(3):
        meter.reset_peaks()
        # Activations are counted inside a profile.
        with onecopy.profile(model) if step == 2 else contextlib.nullcontext():
            for _ in range(micro_batches):
                loss = model(torch.randint(0, 512, (2, 33)))
                loss.backward()
            optimizer.step()
        peaks = {phase: dict(sizes) for phase, sizes in meter.peaks.items()}
        peaks["step"] = dict(meter.live)
        optimizer.zero_grad()
    return peaks


@pytest.mark.parametrize(
    "stage, ranks, micro_batches, precision",
    [
        *((0, 2, 1, "bf16"), (1, 2, 2, "bf16"), (1, 4, 1, "fp32"), (2, 3, 1, "bf16"), (3, 2, 2, "fp32")),
        *((3, 4, 1, "bf16"), (0, 2, 1, "bf16-lean"), (1, 2, 2, "bf16-lean"), (2, 2, 2, "bf16-lean")),
    ],
)
def test_formulas_agree_with_real_cpu_ranks_within_5_percent(
    stage: int, ranks: int, micro_batches: int, precision: str
) -> None:
    units = _run_in_child(_tiny_units, precision)
    schedule = Schedule(stage, ranks, micro_batches=micro_batches, widths=Widths.of(precision), native=False)
    formulas = step_bytes(units, schedule)
    for seen in run_ranks(ranks, _real, stage, micro_batches, precision)[:1]:
        for phase in ("forward", "step"):
            expected = _as_metered(formulas[phase])
            assert expected == pytest.approx(sum(seen[phase].values()), rel=0.05), phase
        # The meter looks when something is allocated, so what is alive when backward begins may be in forward alone.
        highest = max(sum(seen[phase].values()) for phase in ("forward", "backward"))
        planned = max(_as_metered(formulas[phase]) for phase in ("forward", "backward"))
        assert planned == pytest.approx(highest, rel=0.05)


def _tiny_units(precision: str) -> list[Unit]:
    return describe_units(build_tiny, lambda: (torch.zeros(2, 33, dtype=torch.long),), precision=precision)


def _as_metered(sizes: Sizes) -> float:
    return sum(size for name, size in sizes.items() if name != "optimizer_temporaries")


# --- describing


def test_units_are_described_in_the_order_of_forward() -> None:
    units = _run_in_child(describe_units, *MODELS["llama"])
    assert [unit.name for unit in units] == [
        "",
        "model.embed_tokens",
        *(f"model.layers.{i}" for i in range(2)),
        "lm_head",
    ]
    assert sum(unit.parameters for unit in units) == sum(p.numel() for p in llama().parameters())
    blocks = [unit.activations for unit in units if unit.name.startswith("model.layers")]
    # A block keeps some tens of copies of the hidden state (28 as measured for a Llama of 8B); the first also keeps
    # what later ones share.
    assert 20 < blocks[1] / (WORDS * LENGTH * 256 * 2) < 50
    assert blocks[0] > blocks[1]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_products_follow_from_sizes(name: str) -> None:
    """Oracle: fake tensors, as operations return them. Attention's log-sums, 4 bytes a head and token, are left out."""
    build, batch = MODELS[name]
    for unit in _run_in_child(describe_units, partial(quiet, build), batch):
        if is_block(unit):
            # 3h, h, 4h and h; or q, k, v, o, and 704 twice and h.
            assert unit.features == (9 * 256 if name == "gpt2" else 4 * 256 + 2 * 704 + 256)
            expected = product_bytes(WORDS, LENGTH, 256, unit.features)
            assert unit.products == expected + 4 * 4 * WORDS * LENGTH
            assert unit.inputs == 2 * WORDS * LENGTH * 256
            # Backward needs no product that is added to the hidden state, and no query and key before they are rotated.
            unused = 2 if name == "gpt2" else 4
            assert unit.repeated == unit.activations - (unit.products - unused * unit.inputs)


def quiet(build: Any) -> Any:
    """Without dropout, whose attention would be computed again."""
    return build().eval()


def test_products_that_are_not_known() -> None:
    """Weights that are no linear layers; and units inside of units, which selective recomputation refuses."""

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, 4))

    assert _features(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6))) == 6
    assert _features(torch.nn.Sequential(torch.nn.Linear(4, 6), Own())) == 0
    nested = _run_in_child(_nested_units)
    assert nested["blocks.0"].products is None
    assert nested["blocks.0"].inputs is not None


def _nested_units() -> dict[str, Unit]:
    names = ["blocks.0", "blocks.0.attention", "blocks.1"]
    found = describe_units(build_tiny, lambda: (torch.zeros(2, 33, dtype=torch.long),), units=names)
    return {unit.name: unit for unit in found}


def with_adapters() -> Any:
    """A frozen GPT-2 with LoRA's matrices of rank 8 beside its projections (Hu et al., 2021), the head trained."""
    model = gpt2().requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = Adapted(block.attn.c_attn, 256, 768)
    model.transformer.ln_f.requires_grad_(True)
    return model


class Adapted(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inner = inner
        self.down, self.up = torch.nn.Linear(inputs, 8, bias=False), torch.nn.Linear(8, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) + self.up(self.down(x))


def _adapted(schedules: list[Schedule]) -> list[tuple[list[Unit], Simulated]]:
    units = describe_units(with_adapters, tokens)
    return [(units, simulate(with_adapters, tokens, schedule)) for schedule in schedules]


def test_frozen_parameters_are_held_without_gradients_and_optimizer_states() -> None:
    """Oracles: the engine's meter and ledger; 12 bytes of optimizer and master for what is trained alone."""
    schedules = [*(Schedule(stage, 8) for stage in range(4)), Schedule(3, 8, micro_batches=2)]
    trained = 2 * 8 * (256 + 768) + 2 * 256
    held = ("parameters_sliced", "parameters_gathered", "optimizer", "activations")
    for schedule, (units, seen) in zip(schedules, _run_in_child(_adapted, schedules), strict=True):
        assert sum(unit.parameters for unit in units) == trained
        everything = sum(p.numel() for p in gpt2().parameters()) + trained - 2 * 256
        assert sum(unit.all_parameters for unit in units) == everything
        found = tabulate(units, schedule, seen.peaks, seen.bytes_sent)
        for phase, category, formula, engine in found.rows:
            if phase in ("forward", "step") and category in held:
                assert formula == pytest.approx(engine, rel=0.03), (schedule.stage, phase, category)
        padded = [padded_numels(unit, schedule) for unit in units]
        elements = step_elements(
            schedule.stage,
            sum(numel for numel, _ in padded),
            8,
            schedule.micro_batches,
            frozen=sum(numel for _, numel in padded),
        )
        assert seen.bytes_sent == pytest.approx(2 * elements.total, rel=1e-6)
        if schedule.stage == 1:
            assert seen.held["optimizer"] == pytest.approx(8 * trained / 8, rel=0.1)


def _nested() -> str:
    with fake_ranks(2):
        try:
            with fake_ranks(4):
                pass
        except UsageError as error:
            return str(error)
    return "no error"


def test_a_simulation_makes_its_own_process_group() -> None:
    assert "process group" in _run_in_child(_nested)
