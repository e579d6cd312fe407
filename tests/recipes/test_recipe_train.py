"""The training job against a naive twin: one process, plain PyTorch, the whole batch."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig

from hub_models import gpt2, llama
from jobs import CPU, dotted, run_job
from onecopy.errors import CollectiveTimeout
from onecopy.recipes.config import Config, Optimizer, Schedule
from onecopy.recipes.data import Batches
from onecopy.recipes.model import build_model
from onecopy.recipes.schedule import build_optimizer, learning_rate_factor
from onecopy.recipes.settings import load
from onecopy.recipes.tensor_parallel import parallelize
from onecopy.recipes.world import World
from places import ROOT
from ranks import run_ranks
from told import Told

SETTINGS = {"schedule.steps": 6, "schedule.warmup": 0.34, "evaluation.evaluate_batches": 2}


def run(tmp_path: Path, size: int, **overrides: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The records and the summary of a run on ``size`` ranks, in a new directory."""
    directory = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
    return run_job(directory, size, SETTINGS | dotted(overrides))


def losses(records: list[dict[str, Any]], kind: str = "train") -> list[float]:
    return [record["loss"] for record in records if record["kind"] == kind]


def naive_twin(rank: int, text: bytes) -> tuple[list[float], list[float], list[float]]:
    """Losses, gradient norms and learning rates of six steps, without any part of the job but its data's order."""
    torch.manual_seed(5)
    model = gpt2(257, positions=16)
    rates = [0.005, 0.01, 0.01, *(0.001 + 0.009 * (1 + math.cos(math.pi * k / 3)) / 2 for k in (1, 2, 3))]
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    tokens = torch.tensor([*text, 256])
    num_train = len(tokens) - int(len(tokens) * 0.05)
    rows = tokens[: num_train // 16 * 16].view(-1, 16).numpy()
    found: tuple[list[float], list[float], list[float]] = ([], [], rates)
    batches = Batches(rows, World(0, 0, 1, CPU), batch=12, accumulate=1, seed=5)
    for rate, ((batch,),) in zip(rates, ((step,) for step in batches), strict=False):
        for group in optimizer.param_groups:
            group |= {"lr": rate, "betas": (0.9, 0.95)}
        logits = model(batch["input_ids"]).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())
        loss.backward()
        norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
        for parameter in model.parameters():
            parameter.grad *= min(1.0, 1.0 / (norm.item() + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
        found[0].append(loss.item())
        found[1].append(norm.item())
    return found


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{number} squared is {number * number}.\n" for number in range(300)))
    return path


@pytest.fixture(scope="module")
def expected(text: Path) -> tuple[list[float], list[float], list[float]]:
    twin: tuple[list[float], list[float], list[float]] = run_ranks(1, naive_twin, text.read_bytes(), group=False)[0]
    return twin


@pytest.mark.parametrize("size, stage, accumulate", [(1, 3, 1), (2, 3, 1), (2, 3, 3), (3, 2, 2), (2, 1, 2), (4, 0, 1)])
def test_job_trains_like_the_naive_twin(
    text: Path, expected: Any, tmp_path: Path, size: int, stage: int, accumulate: int
) -> None:
    records, summary = run(
        tmp_path, size, parallel__stage=stage, parallel__accumulate=accumulate, data__train=[str(text)]
    )
    steps = [record for record in records if record["kind"] == "train"]
    assert losses(records) == pytest.approx(expected[0], rel=2e-5)
    assert [step["gradient_norm"] for step in steps] == pytest.approx(expected[1], rel=2e-4)
    assert [step["learning_rate"] for step in steps] == pytest.approx(expected[2])
    assert expected[0][-1] < expected[0][0] - 0.5
    assert [record["step"] for record in records if record["kind"] == "evaluation"] == [4, 6]

    # ZeRO §7, in bytes of fp32: what a rank sends in a step.
    times_psi = {0: 2, 1: 2, 2: accumulate + 1, 3: 3 * accumulate}[stage]
    bytes_sent = times_psi * summary["padded_parameters"] * 4 * (size - 1) // size
    assert summary["bytes_sent_per_step"]["total"] == pytest.approx(
        {"measured": bytes_sent, "formula": bytes_sent, "elements": times_psi * (size - 1) / size}
    )
    parameters = 257 * 24 + 16 * 24 + 2 * (12 * 24 * 24 + 13 * 24) + 2 * 24
    assert summary["parameters"] == parameters
    assert parameters <= summary["padded_parameters"] < parameters + 1000
    assert len(summary["peak_memory"]) == size
    assert (summary["first_loss"], summary["last_loss"]) == (losses(records)[0], losses(records)[-1])
    assert summary["validation_loss"] == losses(records, "evaluation")[-1]
    assert summary["steps"] == 6
    assert not summary["interrupted"]


def muon_twin(rank: int, text: bytes) -> list[float]:
    """Losses of six steps of torch.optim.Muon over the blocks' matrices and AdamW over the rest, in one process."""
    torch.manual_seed(5)
    model = gpt2(257, positions=16)
    rates = [0.005, 0.01, 0.01, *(0.001 + 0.009 * (1 + math.cos(math.pi * k / 3)) / 2 for k in (1, 2, 3))]
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and ".h." in name]
    embeddings = [model.transformer.wte.weight, model.transformer.wpe.weight]
    others = [p for p in model.parameters() if p.dim() < 2]
    muon = torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([{"params": embeddings, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    tokens = torch.tensor([*text, 256])
    num_train = len(tokens) - int(len(tokens) * 0.05)
    rows = tokens[: num_train // 16 * 16].view(-1, 16).numpy()
    found = []
    batches = Batches(rows, World(0, 0, 1, CPU), batch=12, accumulate=1, seed=5)
    for rate, ((batch,),) in zip(rates, ((step,) for step in batches), strict=False):
        for group in (*muon.param_groups, *adamw.param_groups):
            group |= {"lr": rate} | ({"betas": (0.9, 0.95)} if "betas" in group else {})
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("size, stage, on_disk", [(2, 3, False), (3, 2, True)])
def test_muon_job_trains_like_its_twin_and_goes_on(
    text: Path, tmp_path: Path, size: int, stage: int, on_disk: bool
) -> None:
    """Newton-Schulz computes in bf16, which turns the last bit of a gradient into the third digit of an update."""
    expected = run_ranks(1, muon_twin, text.read_bytes(), group=False)[0]
    settings: dict[str, Any] = {
        "data__train": [str(text)],
        "parallel__stage": stage,
        "optimizer__optimizer": "muon",
        "checkpoint__save_every": 3,
        "run__profile_step": 0,
    }
    if on_disk:
        settings["offload__optimizer_on"] = str(tmp_path / "states")
    records, summary = run(tmp_path, size, **settings)
    assert losses(records) == pytest.approx(expected, rel=2e-3)
    # One state of a matrix and two of the rest, as far as one rank's share; AdamW's step counters are 4 bytes each.
    planned, measured = summary["planned"]["memory"], summary["highest_memory"]
    if on_disk:
        planned = {"optimizer": summary["planned"]["off_device"]["optimizer, on disk"]}
        measured = {"optimizer": summary["highest_off_device"]["optimizer, on disk"]}
    assert planned["optimizer"] == pytest.approx(measured["optimizer"], rel=0.05)
    assert sum(planned.values()) == pytest.approx(sum(measured.values()), rel=0.05)
    first = next(iter(sorted((Path(summary["checkpoint"]).parent).glob("*3*"))))
    again, _ = run(tmp_path, 2, **settings, checkpoint__resume=str(first))
    assert losses(again) == pytest.approx(losses(records)[3:], rel=2e-3)


@pytest.mark.parametrize(
    "stage, size, settings", [(3, 4, {}), (2, 4, {"keep_on": "cpu"}), (1, 2, {"partition": False})]
)
def test_tensor_parallel_job_with_recomputation_trains_like_the_naive_twin(
    text: Path, expected: Any, tmp_path: Path, stage: int, size: int, settings: dict[str, Any]
) -> None:
    """The small GPT-2's heads and MLPs over two ranks; the batch over what is left."""
    overrides = {f"activations__{name}": value for name, value in settings.items()}
    records, summary = run(
        tmp_path,
        size,
        parallel__stage=stage,
        parallel__tensor=2,
        parallel__defragment=True,
        activations__recompute=True,
        data__train=[str(text)],
        **overrides,
    )
    assert losses(records) == pytest.approx(expected[0], rel=2e-5)
    norms = [record["gradient_norm"] for record in records if record["kind"] == "train"]
    assert norms == pytest.approx(expected[1], rel=2e-4)
    # A block has 12·24² weights and 7·24 biases of cut outputs, and 6·24 elements of norms and biases left whole.
    cut, whole = 2 * (12 * 24 * 24 + 7 * 24), 257 * 24 + 16 * 24 + 2 * 6 * 24 + 2 * 24
    assert summary["parameters"] == cut + whole
    assert cut / 2 + whole <= summary["padded_parameters"] < cut / 2 + whole + 1000
    total = summary["bytes_sent_per_step"]["total"]
    assert total["measured"] == total["formula"]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_tensor_parallel_models_compute_what_whole_ones_do(kind: str) -> None:
    """Loss and gradients, of which `full_tensor()` gives the whole; with grouped keys in Llama."""

    def build() -> Any:
        torch.manual_seed(2)
        return gpt2(61, hidden=16, heads=4, positions=16) if kind == "gpt2" else llama(61, hidden=16)

    def gradients(rank: int, size: int) -> tuple[float, dict[str, torch.Tensor]]:
        model = build()
        model.loss_type = "ForCausalLM"
        if size > 1:
            parallelize(model, init_device_mesh("cpu", (size,), mesh_dim_names=("tensor",)))
        tokens = torch.arange(48).view(4, 12) * 7 % 61
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        found = {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in model.named_parameters()}
        return loss.item(), found

    ((loss, whole),) = run_ranks(1, gradients, 1)
    for found_loss, found in run_ranks(2, gradients, 2):
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert found.keys() == whole.keys()
        for name, gradient in whole.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7, msg=name)


def test_evaluation_is_the_mean_loss_on_the_validation_text(text: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"data__train": [str(text)], "schedule__steps": 4}
    (alone,) = losses(run(tmp_path, 1, **settings)[0], "evaluation")
    (spread,) = losses(run(tmp_path, 3, **settings)[0], "evaluation")
    assert spread == pytest.approx(alone, rel=2e-5)
    (tmp_path / "other.txt").write_text("x" * 2000)
    (other,) = losses(run(tmp_path, 2, **settings, data__validation=[str(tmp_path / "other.txt")])[0], "evaluation")
    assert other > alone + 0.2


def test_hybrid_sharding_and_bf16_send_what_the_formula_says(text: Path, tmp_path: Path) -> None:
    records, summary = run(
        tmp_path,
        4,
        data__train=[str(text)],
        parallel__replicate=2,
        parallel__precision="bf16",
        schedule__steps=3,
        evaluation__evaluate_every=2,
    )
    psi = summary["padded_parameters"]
    sent = {op: row["measured"] for op, row in summary["bytes_sent_per_step"].items()}
    # Slices of half the model; bf16 on the wire; each slice is all-reduced over its two copies.
    assert sent == {
        "all_gather": 2 * psi // 2 * 2,
        "reduce_scatter": psi // 2 * 2,
        "all_reduce": 2 * (psi // 2) // 2 * 2,
        "total": (psi + psi // 2 + psi // 2) * 2,
    }
    assert losses(records)[-1] < losses(records)[0]
    # The step after an evaluation also sent what that gathered, once for its one batch.
    sizes = [record["bytes_sent"] for record in records if record["kind"] == "train"]
    assert sizes[0] == sizes[1] == sent["total"]
    assert sizes[2] == sent["total"] + psi // 2 * 2


def test_a_model_directory_is_loaded_with_its_weights_and_tokenizer(text: Path, tmp_path: Path) -> None:
    directory = tmp_path / "llama"

    def make(rank: int) -> float:
        from onecopy.recipes.tokenizer import train_tokenizer

        tokenizer = train_tokenizer([text.read_text()], 300, directory)
        torch.manual_seed(11)
        model = llama(304, hidden=32, inner=48).to(torch.bfloat16)
        model.save_pretrained(directory)
        # The first step's batch holds every sequence of the text.
        stream = [*tokenizer.encode([text.read_text()])[0], tokenizer.separator]
        rows = torch.tensor(list(map(int, stream[: len(stream) // 16 * 16]))).view(-1, 16)
        with torch.no_grad():
            return len(rows), model.float()(rows, labels=rows).loss.item()

    num_rows, loss = run_ranks(1, make, group=False)[0]
    num_rows -= num_rows % 2
    records, summary = run(
        tmp_path,
        2,
        model__path=str(directory),
        model__layers=4,
        data__tokenizer=str(directory),
        data__train=[str(text)],
        data__validation_fraction=0,
        data__batch=num_rows,
        evaluation__evaluate_every=0,
        schedule__steps=1,
    )
    # One sequence may be missing from an odd number of them.
    assert losses(records) == pytest.approx([loss], rel=2e-4)
    assert summary["validation_loss"] is None
    assert summary["parameters"] == 304 * 32 * 2 + 2 * (32 * (32 + 16 + 16 + 32 + 3 * 48) + 2 * 32) + 32


def test_model_from_a_config_file_and_one_with_too_few_tokens(tmp_path: Path) -> None:
    LlamaConfig(
        vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, dtype="bfloat16"
    ).save_pretrained(tmp_path)

    def build(rank: int) -> None:
        config = load(None, {"model.path": str(tmp_path / "config.json")})
        model = build_model(config, 64)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert type(model).__name__ == "LlamaForCausalLM"
        with pytest.raises(ValueError, match="knows 64 tokens but the data's tokenizer has 257"):
            build_model(config, 257)

    run_ranks(1, build, group=False)


# --- ranks


def test_values_pass_between_ranks() -> None:
    def exchange(rank: int) -> tuple[list[float], list[str]]:
        world = World(rank, rank, 3, CPU)
        return world.sum(rank + 0.25, -1), world.gather("abc"[rank])

    assert run_ranks(3, exchange) == [([3.75, -3.0], ["a", "b", "c"])] * 3


def test_a_rank_that_does_not_answer_is_named() -> None:
    told = Told(2)

    def wait(rank: int) -> str:
        if rank == 1:
            told.wait_for_others()
            return ""
        with pytest.raises(CollectiveTimeout) as caught:
            World(rank, rank, 2, CPU).sum(1.0)
        told.tell(rank)
        return str(caught.value)

    assert "no answer from rank 1" in run_ranks(2, wait, group_timeout=1)[0]


# --- optimizer and schedule


def test_learning_rate_at_its_corners() -> None:
    cosine = Schedule(steps=101, warmup=0.1, decay="cosine", final_fraction=0.2)
    assert [learning_rate_factor(step, cosine) for step in (0, 4, 9, 10, 100)] == pytest.approx([0.1, 0.5, 1, 1, 0.2])
    assert learning_rate_factor(55, cosine) == pytest.approx(0.6)
    linear = Schedule(steps=11, warmup=0, decay="linear", final_fraction=0)
    assert [learning_rate_factor(step, linear) for step in (0, 5, 10)] == pytest.approx([1, 0.5, 0])
    assert learning_rate_factor(99, Schedule(steps=100, decay="constant")) == 1


@pytest.mark.parametrize(
    "name, fused, foreach", [("fused", True, False), ("foreach", False, True), ("for-loop", False, False)]
)
def test_optimizer_runs_the_implementation_asked_for(name: Any, fused: bool, foreach: bool) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = build_optimizer(model.parameters(), Optimizer(implementation=name, weight_decay=0.3))
    assert [(g["fused"], g["foreach"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (fused, foreach, 0.3),
        (fused, foreach, 0.0),
    ]
    assert optimizer.param_groups[1]["params"] == [model.bias]


def test_defaults_of_the_twin_are_those_of_the_config() -> None:
    """What the naive twin takes for granted, and `onecopy.shard`'s own."""
    config = Config()
    assert (config.optimizer.beta1, config.optimizer.beta2, config.optimizer.eps) == (0.9, 0.95, 1e-8)
    assert (config.optimizer.clip_norm, config.optimizer.weight_decay) == (1.0, 0.1)
    assert config.parallel.bucket_bytes == 0
    assert (config.schedule.final_fraction, config.data.validation_fraction) == (0.1, 0.05)


@pytest.mark.parametrize(
    "size, stage, accumulate, precision",
    [(1, 1, 1, "bf16"), (2, 3, 1, "bf16"), (2, 1, 3, "bf16-lean"), (3, 2, 2, "bf16"), (2, 2, 2, "bf16-lean")],
)
def test_planned_stands_beside_measured(
    tmp_path: Path, text: Path, size: int, stage: int, accumulate: int, precision: str
) -> None:
    """Oracles: the meter's categories within 5 % of the sum, the ledger's bytes exactly."""
    _, summary = run(
        tmp_path,
        size,
        data__train=[str(text)],
        parallel__stage=stage,
        parallel__accumulate=accumulate,
        data__batch=size * accumulate * 2,
        parallel__precision=precision,
    )
    planned, measured = summary["planned"]["memory"], summary["highest_memory"]
    for category in measured:
        assert planned[category] == pytest.approx(measured[category], abs=0.05 * sum(measured.values())), category
    assert summary["planned"]["bytes_sent"] == pytest.approx(summary["bytes_sent_per_step"]["total"]["measured"])


@pytest.mark.parametrize(
    "size, tensor, stage, settings",
    [
        (1, 1, 3, {}),
        (1, 1, 0, {"keep_on": "cpu"}),
        (2, 2, 3, {}),
        (2, 2, 2, {"keep_on": "cpu"}),
        (2, 2, 1, {"partition": False}),
        (4, 2, 3, {}),
        (1, 1, 2, {"recompute": "selective"}),
        (2, 2, 3, {"recompute": "selective"}),
    ],
)
def test_planned_activations_stand_beside_measured(
    tmp_path: Path, text: Path, size: int, tensor: int, stage: int, settings: dict[str, Any]
) -> None:
    """Oracles: the meter's categories within 5 %, and b·s·h·L of 4 bytes, ÷ M (ZeRO §6.1). Gradients and buffers are
    held in the test above."""
    _, summary = run(
        tmp_path,
        size,
        data__train=[str(text)],
        parallel__stage=stage,
        parallel__tensor=tensor,
        # With whole logits the highest moment is the one at which all that is kept is there.
        loss__chunked=False,
        **{f"activations__{name}": value for name, value in ({"recompute": True} | settings).items()},
        schedule__steps=4,
        evaluation__evaluate_every=0,
    )
    planned, measured = summary["planned"]["memory"], summary["highest_memory"]
    for category in ("parameters_sliced", "optimizer", "activations"):
        assert planned[category] == pytest.approx(measured[category], rel=0.05), category
    inputs = 12 * tensor // size * 16 * 24 * 2 * 4
    kept = inputs // (tensor if settings.get("partition", True) else 1)
    if settings.get("recompute") == "selective":
        # 3h, h of attention and 4h of heads and columns of its own, 2h that are sums over the ranks; 2 heads' log-sums.
        kept += 12 * tensor // size * 16 * 2 * 4 * ((24 * 8 + 2) // tensor + 24 * 2)
    on_host = settings.get("keep_on") == "cpu"
    assert summary["planned"]["off_device"] == summary["highest_off_device"] == {"checkpoints": kept * on_host}
    assert planned["checkpoints"] == measured["checkpoints"] == kept * (not on_host)
    sent = inputs * (tensor - 1) // tensor if settings.get("partition", True) else 0
    assert summary["planned"]["activations_sent"] == summary["activations_sent_per_step"] == sent
    assert summary["planned"]["bytes_sent"] == pytest.approx(summary["bytes_sent_per_step"]["total"]["measured"])


@pytest.mark.parametrize("size, stage, parameters", [(1, 3, True), (2, 2, False)])
def test_job_with_states_on_disk_trains_like_the_one_in_memory_and_resumes(
    tmp_path: Path, text: Path, size: int, stage: int, parameters: bool
) -> None:
    """Oracles: the same job without [offload], to the last bit, before and after it was interrupted; the meter."""
    common = {"data__train": [str(text)], "parallel__stage": stage, "parallel__precision": "bf16"}
    states = str(tmp_path / "states")
    moved = common | {"offload__optimizer_on": states, "checkpoint__save_every": 2}
    if parameters:
        moved |= {"offload__parameters_on": states, "offload__units_ahead": 2}
    expected, _ = run(tmp_path, size, **common)
    records, summary = run(tmp_path, size, **moved)
    assert losses(records) == losses(expected)
    assert losses(records, "evaluation") == losses(expected, "evaluation")
    checkpoints = next(path for path in sorted(tmp_path.glob("run*/checkpoints*"), reverse=True))
    resumed, _ = run(tmp_path, size, **moved, checkpoint__resume=str(sorted(checkpoints.glob("step-*"))[0]))
    assert losses(resumed) == losses(expected)[-len(losses(resumed)) :]
    planned = summary["planned"]
    assert planned["off_device"] == pytest.approx(summary["highest_off_device"])
    for category in ("parameters_sliced", "optimizer"):
        assert planned["memory"][category] == pytest.approx(summary["highest_memory"][category], rel=0.05), category
    assert summary["highest_memory"]["communication"] <= planned["memory"]["communication"] * 1.05 + 16 * 4096


def _tensorboard(directory: Path) -> dict[tuple[str, int], float]:
    """The event files' scalars, by name and step, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory)).Reload()
    return {(name, one.step): one.value for name in events.Tags()["scalars"] for one in events.Scalars(name)}


def test_every_figure_is_documented_and_sums_up(text: Path, tmp_path: Path) -> None:
    """Oracles: the table of docs/train.md; a step's bytes are those of its operations; TensorBoard's own reader."""
    records, _ = run(tmp_path, 2, data__train=[str(text)], schedule__steps=5, run__tensorboard=True)
    page = (ROOT / "docs" / "train.md").read_text()
    table = page.split("Names in `metrics.jsonl`")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z_/]+)`", table)) - {"train/", "evaluation/"}
    found = {}
    for record in records:
        kind, step = record["kind"], record["step"]
        for name, value in record.items():
            parts = {f"/{part}": number for part, number in value.items()} if isinstance(value, dict) else {"": value}
            found |= {(kind, name + part, step): number for part, number in parts.items()}
    found = {key: number for key, number in found.items() if key[1] not in ("kind", "step")}
    assert {name for _, name, _ in found} == named
    assert _tensorboard(tmp_path / "run0") == pytest.approx(
        {(f"{k}/{n}", s): number for (k, n, s), number in found.items()}
    )
    train_records = [record for record in records if record["kind"] == "train"]
    assert train_records
    for record in train_records:
        assert sum(record["sent"].values()) == record["bytes_sent"] > 0
