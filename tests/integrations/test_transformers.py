"""Hugging Face's Trainer over sharded models. Oracle: the same Trainer under plain DDP, in the same fork."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("accelerate", reason="needs the extra 'integrations': accelerate is not installed")

import transformers
from safetensors.torch import load_file
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

import onecopy
from onecopy.errors import SettingsError, UsageError
from onecopy.integrations.transformers import ShardedTrainer, sharded
from ranks import run_ranks
from trainers import VOCAB, Rows, arguments, history, tiny_llama

STAGES = (None, 0, 1, 2, 3)
"""None is DDP."""


class Sharded(ShardedTrainer, Trainer):
    pass


def make(stage: int | None, args: Any, **more: Any) -> Any:
    given: dict[str, Any] = {
        "model": tiny_llama(),
        "args": args,
        "train_dataset": Rows(),
        "eval_dataset": Rows(8, seed=6),
    }
    kind, shard = (Trainer, {}) if stage is None else (Sharded, {"shard": {"stage": stage}})
    return kind(**(given | more | shard))


def assert_same(found: list[dict[str, float]], expected: list[dict[str, float]], rtol: float = 2e-5) -> None:
    assert len(found) == len(expected) > 0
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=rtol, abs=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_grad_norm": 0.5, "gradient_accumulation_steps": 2, "weight_decay": 0.1},
        {"bf16": True, "gradient_checkpointing": True},
        {"num_train_epochs": 2, "max_steps": -1, "gradient_accumulation_steps": 3},
    ],
    ids=["accumulation and clipping", "bf16 and recomputation", "an epoch's last step is shorter"],
)
def test_losses_and_norms_are_ddps_at_every_stage(settings: dict[str, Any], tmp_path: Path) -> None:
    def train(rank: int) -> list[list[dict[str, float]]]:
        logs = []
        for stage in STAGES:
            trainer = make(stage, arguments(TrainingArguments, tmp_path, **settings))
            trainer.train()
            logs.append([*history(trainer, "loss", "grad_norm", "learning_rate"), trainer.evaluate()["eval_loss"]])
        return logs

    for ddp, *ours in run_ranks(2, train, timeout=120):
        for stage, log in enumerate(ours):
            assert_same(log[:-1], ddp[:-1], rtol=2e-2 if "bf16" in settings else 2e-5)
            assert log[-1] == pytest.approx(ddp[-1], rel=2e-3 if "bf16" in settings else 2e-5), stage


class _InFp16:
    """Accelerate leaves fp16 away on a CPU, so it is told afterwards what it tells itself on a GPU."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        own = self.accelerator  # type: ignore[attr-defined]
        own.state._mixed_precision, own.native_amp = "fp16", True
        own.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)


def test_fp16_skips_steps_that_overflow(tmp_path: Path) -> None:
    """Oracle: DDP."""

    def train(rank: int) -> list[tuple[list[dict[str, float]], float]]:
        found = []
        for stage in STAGES:
            kind = Trainer if stage is None else sharded(Trainer, stage=stage)
            args = arguments(TrainingArguments, tmp_path, max_steps=8, max_grad_norm=0.5)
            own = type("InFp16", (_InFp16, kind), {})(model=tiny_llama(), args=args, train_dataset=Rows())
            own.train()
            found.append((history(own, "loss", "learning_rate"), own.accelerator.scaler.get_scale()))
        return found

    for (ddp, scale), *ours in run_ranks(2, train, timeout=120):
        assert 1 < scale < 2.0**18
        assert len({entry["loss"] for entry in ddp}) > 3, "a step is skipped, and others are taken"
        for log, own_scale in ours:
            assert own_scale == scale
            assert_same(log, ddp, rtol=1e-2)


def whole(model: Any) -> dict[str, torch.Tensor]:
    """Weights by name, whole, of a sharded model or one under DDP."""
    if isinstance(next(model.parameters()), onecopy.SlicedTensor):
        with onecopy.gathered(model):
            return {name: p.detach().clone() for name, p in model.named_parameters()}
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_a_resumed_run_goes_on_as_one_that_never_stopped(tmp_path: Path) -> None:
    """Checkpoints of DDP and of every stage, each resumed at the next stage. Oracle: DDP without interruption."""

    def train(rank: int) -> tuple[Any, list[Any]]:
        steps: dict[str, Any] = {"max_steps": 6, "lr_scheduler_type": "linear", "save_steps": 3}
        unbroken = make(None, arguments(TrainingArguments, tmp_path / "none", **steps, save_strategy="steps"))
        unbroken.train()
        folders = {None: tmp_path / "none"}
        resumed = []
        for stage, before in ((0, None), (1, 0), (2, 1), (3, 2)):
            own = folders[stage] = tmp_path / f"stage{stage}"
            args = arguments(TrainingArguments, own, **steps, save_strategy="steps", save_total_limit=2)
            trainer = make(stage, args, model=tiny_llama(seed=9))
            trainer.train(resume_from_checkpoint=str(folders[before] / "checkpoint-3"))
            resumed.append((history(trainer, "loss", "grad_norm", "learning_rate"), whole(trainer.model)))
            # What the next stage resumes from.
            args = arguments(TrainingArguments, own, **steps | {"max_steps": 6}, save_strategy="steps")
            first = make(stage, args)
            first.train()
        return (history(unbroken, "loss", "grad_norm", "learning_rate"), whole(unbroken.model)), resumed

    (log, weights), resumed = run_ranks(2, train, timeout=120)[0]
    for own_log, own_weights in resumed:
        # The log of a resumed run begins with that of the run it resumes.
        assert_same(own_log, log)
        assert_close(own_weights, weights)
    for stage in STAGES[1:]:
        folder = tmp_path / f"stage{stage}" / "checkpoint-6"
        found = load_file(folder / "model.safetensors")
        assert_close(found, weights)
        names = {path.name for path in folder.iterdir()}
        assert {"config.json", "onecopy", "trainer_state.json", "training_args.bin"} <= names
        assert not [name for name in names if name.startswith((".writing", "optimizer"))]


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    """A learning rate that makes the loss worse after some steps. Oracle: DDP's best metric and weights."""

    def train(rank: int) -> list[Any]:
        found = []
        for stage in STAGES:
            args = arguments(
                TrainingArguments,
                tmp_path / str(stage),
                learning_rate=0.3,
                max_grad_norm=0.0,
                eval_strategy="steps",
                save_strategy="steps",
                eval_steps=1,
                save_steps=1,
                save_total_limit=1,
                load_best_model_at_end=True,
                metric_for_best_model="eval_loss",
            )
            trainer = make(stage, args)
            trainer.train()
            state = trainer.state
            found.append((state.best_metric, state.best_global_step, whole(trainer.model), trainer.evaluate()))
        return found

    (metric, step, weights, evaluated), *ours = run_ranks(2, train, timeout=120)[0]
    assert step < 4, "the last step is the best: the test shows nothing"
    for own_metric, own_step, own_weights, own_evaluated in ours:
        assert own_metric == pytest.approx(metric, rel=1e-4)
        assert own_step == step
        assert_close(own_weights, weights)
        assert own_evaluated["eval_loss"] == pytest.approx(evaluated["eval_loss"], rel=1e-4)
        assert own_evaluated["eval_loss"] == pytest.approx(own_metric, rel=1e-5)


def tiny_t5() -> Any:
    torch.manual_seed(2)
    sizes: Any = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2)
    )


def test_predict_with_generate_makes_ddps_tokens_at_every_stage(tmp_path: Path) -> None:
    def train(rank: int) -> list[Any]:
        found = []
        for stage in STAGES:
            args = arguments(
                Seq2SeqTrainingArguments, tmp_path, predict_with_generate=True, generation_max_length=7, max_steps=2
            )
            kind = Seq2SeqTrainer if stage is None else sharded(Seq2SeqTrainer, stage=stage)
            trainer = kind(model=tiny_t5(), args=args, train_dataset=Rows(), eval_dataset=Rows(6, seed=6))
            trainer.train()
            predicted = trainer.predict(Rows(6, seed=7))
            found.append(
                (history(trainer, "loss"), torch.as_tensor(predicted.predictions), predicted.metrics["test_loss"])
            )
        return found

    for (log, tokens, loss), *ours in [run_ranks(2, train, timeout=120)[0]]:
        assert tokens.shape[0] >= 6
        for own_log, own_tokens, own_loss in ours:
            assert_same(own_log, log)
            assert torch.equal(own_tokens, tokens)
            assert own_loss == pytest.approx(loss, rel=1e-5)


class Plain(torch.nn.Module):
    """No model of transformers: logits and loss in a dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = torch.nn.Embedding(VOCAB, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.head = torch.nn.Linear(8, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits = self.head(x)
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_models_made_late_or_by_hand_and_optimizers_of_ones_own(tmp_path: Path) -> None:
    """`model_init=`, a model that is none of transformers', `optimizers=`, a callback. Oracle: DDP."""

    class Count(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.steps = 0

        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            self.steps += 1

    def train(rank: int) -> list[Any]:
        found = []
        for stage in (None, 1, 3):
            logs = []
            args = arguments(TrainingArguments, tmp_path / str(stage), remove_unused_columns=True)
            late = make(stage, args, model=None, model_init=lambda: tiny_llama())
            late.train()
            logs.append(history(late, "loss", "grad_norm"))
            model = Plain()
            own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.StepLR(own, 2, gamma=0.5)
            count = Count()
            trainer = make(stage, args, model=model, optimizers=(own, scheduler), callbacks=[count])
            trainer.train()
            trainer.save_model()
            dist.barrier()
            logs.append(history(trainer, "loss", "grad_norm", "learning_rate"))
            assert count.steps == 4
            found.append((logs, load_file(tmp_path / str(stage) / "model.safetensors"), whole(trainer.model)))
        return found

    (logs, files, weights), *ours = run_ranks(2, train, timeout=120)[0]
    for own_logs, own_files, own_weights in ours:
        for mine, theirs in zip(own_logs, logs, strict=True):
            assert_same(mine, theirs)
        assert_close(own_weights, weights)
        assert_close(own_files, files)


def test_torch_compile_of_the_trainer(tmp_path: Path) -> None:
    """`torch_compile=True` over a sharded model. Oracle: DDP, not compiled."""

    def train(rank: int) -> list[Any]:
        logs = []
        for stage, settings in ((None, {}), (1, COMPILED), (3, COMPILED)):
            trainer = make(stage, arguments(TrainingArguments, tmp_path, **settings))
            trainer.train()
            logs.append(history(trainer, "loss", "grad_norm"))
        return logs

    ddp, *ours = run_ranks(2, train, timeout=200)[0]
    for log in ours:
        assert_same(log, ddp, rtol=1e-4)


COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


def test_what_cannot_be_is_said_before_any_work(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        args = arguments(TrainingArguments, tmp_path)
        for shard, message in (
            (None, 'give shard={"stage": 3}'),
            ({"stage": 3, "accumulate": 2}, "must not set 'accumulate'"),
            ({"stage": 7}, "found 7"),
            ({"stage": 3, "unit": []}, "did you mean 'units'"),
            (3, "must hold arguments of onecopy.shard"),
        ):
            with pytest.raises(SettingsError, match=message):
                Sharded(model=tiny_llama(), args=args, train_dataset=Rows(), shard=shard)
        with pytest.raises(SettingsError, match="must ask for fsdp too"):
            Sharded(model=tiny_llama(), args=arguments(TrainingArguments, tmp_path, fsdp=True), shard={"stage": 3})
        full = arguments(TrainingArguments, tmp_path, bf16_full_eval=True)
        with pytest.raises(SettingsError, match="would change the dtype"):
            Sharded(model=tiny_llama(), args=full, shard={"stage": 3})
        with pytest.raises(SettingsError, match="already, at stage 2"):
            Sharded(model=onecopy.shard(tiny_llama(), 2), args=args, shard={"stage": 3})
        with pytest.raises(SettingsError, match="must stand before"):
            type("Reversed", (Trainer, ShardedTrainer), {})
        with pytest.raises(SettingsError, match="takes a class of Trainers"):
            sharded(tiny_llama, stage=3)

    run_ranks(2, check)


def test_adafactor_steps_over_whole_parameters(tmp_path: Path) -> None:
    """Oracle: DDP."""

    def run(rank: int) -> list[list[dict[str, float]]]:
        found = []
        for stage in (None, 1, 3):
            trainer = make(stage, arguments(TrainingArguments, tmp_path, optim="adafactor"))
            trainer.train()
            found.append(history(trainer, "loss", "grad_norm"))
        return found

    for ddp, *ours in run_ranks(2, run, timeout=120):
        for log in ours:
            assert_same(log, ddp, rtol=1e-4)


def test_the_models_own_save_pretrained_writes_slices(tmp_path: Path) -> None:
    """Every rank calls it. Oracle: what `from_pretrained` reads of it, held against the model made whole."""

    def run(rank: int) -> None:
        trainer = make(3, arguments(TrainingArguments, tmp_path))
        trainer.train()
        trainer.model.save_pretrained(tmp_path / "saved")
        found = type(trainer.model).from_pretrained(tmp_path / "saved")
        assert_close(dict(found.named_parameters()), whole(trainer.model))
        with onecopy.gathered(trainer.model):
            if rank == 0:
                trainer.model.save_pretrained(tmp_path / "gathered")
        with pytest.raises(UsageError, match="upload_folder"):
            trainer.model.save_pretrained(tmp_path / "hub", push_to_hub=True)

    run_ranks(2, run)
    saved, gathered = (load_file(tmp_path / place / "model.safetensors") for place in ("saved", "gathered"))
    assert saved.keys() == gathered.keys()
    assert all(torch.equal(saved[name], gathered[name]) for name in saved)
