"""TRL's trainers and PEFT's adapters over sharded models. Oracle: the same trainer under DDP, in the same fork."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("trl", reason="needs the extra 'integrations': trl is not installed")
pytest.importorskip("peft", reason="needs the extra 'integrations': peft is not installed")

from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import BertConfig, BertModel, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import onecopy
from onecopy.integrations.transformers import sharded
from ranks import run_ranks
from trainers import Rows, arguments, history, sentences, tiny_llama, tiny_tokenizer

STAGES = (None, 0, 1, 2, 3)
"""None is DDP."""


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **settings)


def assert_same(found: list[dict[str, float]], expected: list[dict[str, float]], rtol: float = 1e-4) -> None:
    assert len(found) == len(expected) > 0
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=rtol, abs=1e-5)


def train(kind: type, stage: int | None, keys: tuple[str, ...], **given: Any) -> tuple[Any, list[dict[str, float]]]:
    trainer = (kind if stage is None else sharded(kind, stage=stage))(processing_class=tiny_tokenizer(), **given)
    trainer.train()
    if stage is not None:
        assert all(isinstance(parameter, onecopy.SlicedTensor) for parameter in trainer.model.parameters())
    return trainer, history(trainer, *keys)


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "LoRA"])
def test_sft(adapters: bool, tmp_path: Path) -> None:
    def rank_main(rank: int) -> list[Any]:
        logs = []
        for stage in STAGES:
            args = arguments(SFTConfig, tmp_path / str(stage), max_length=16, gradient_accumulation_steps=2)
            data = Dataset.from_dict({"text": sentences(32, 9)})
            more = {"peft_config": lora(use_dora=True)} if adapters else {}
            _, log = train(
                SFTTrainer, stage, ("loss", "grad_norm"), model=tiny_llama(), args=args, train_dataset=data, **more
            )
            logs.append(log)
        return logs

    for logs in run_ranks(2, rank_main, timeout=120):
        for own in logs[1:]:
            assert_same(own, logs[0])


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "LoRA"])
def test_dpo(adapters: bool, tmp_path: Path) -> None:
    """The reference is a model of its own, sharded at stage 3; with LoRA the model without its adapters."""

    def rank_main(rank: int) -> list[Any]:
        logs = []
        for stage in STAGES:
            args = arguments(DPOConfig, tmp_path / str(stage), max_length=16, beta=0.5)
            columns = {"prompt": 0, "chosen": 1, "rejected": 2}
            data = Dataset.from_dict({name: sentences(32, 4, seed) for name, seed in columns.items()})
            more = {"peft_config": lora()} if adapters else {"ref_model": tiny_llama()}
            keys = ("loss", "rewards/margins", "logps/chosen", "grad_norm")
            trainer, log = train(DPOTrainer, stage, keys, model=tiny_llama(), args=args, train_dataset=data, **more)
            if stage == 3 and not adapters:
                assert all(isinstance(p, onecopy.SlicedTensor) for p in trainer.ref_model.parameters())
            logs.append(log)
        return logs

    for logs in run_ranks(2, rank_main, timeout=120):
        assert logs[0][-1]["rewards/margins"] != 0
        for own in logs[1:]:
            assert_same(own, logs[0], rtol=1e-3)


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "LoRA"])
def test_grpo(adapters: bool, tmp_path: Path) -> None:
    """Completions are sampled from the same seed, so equal logs mean equal tokens too."""

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(token % 7 for token in tokens) / 10 for tokens in completion_ids]

    def rank_main(rank: int) -> list[Any]:
        logs = []
        for stage in (None, 1, 3):
            args = arguments(
                GRPOConfig, tmp_path / str(stage), max_completion_length=6, num_generations=2, beta=0.1, max_steps=3
            )
            data = Dataset.from_dict({"prompt": sentences(16, 4)})
            # TRL loads the reference from where the model comes from.
            if rank == 0:
                tiny_llama().save_pretrained(tmp_path / "model")
                tiny_tokenizer().save_pretrained(tmp_path / "model")
            dist.barrier()
            more = {"peft_config": lora()} if adapters else {}
            keys = ("loss", "reward", "kl", "grad_norm", "completions/mean_length")
            _, log = train(
                GRPOTrainer,
                stage,
                keys,
                model=str(tmp_path / "model"),
                args=args,
                train_dataset=data,
                reward_funcs=reward,
                **more,
            )
            logs.append(log)
        return logs

    for logs in run_ranks(2, rank_main, timeout=200):
        assert logs[0][-1]["reward"] > 0
        for own in logs[1:]:
            assert_same(own, logs[0], rtol=1e-3)


def test_adapters_are_saved_alone_and_go_on(tmp_path: Path) -> None:
    """Oracles: DDP without interruption; PEFT loads the files, under its own names, into a plain model."""

    def rank_main(rank: int) -> list[Any]:
        found = []
        for stage in (None, 1, 3):
            args = arguments(TrainingArguments, tmp_path / str(stage), save_strategy="steps", save_steps=2)
            kind = Trainer if stage is None else sharded(Trainer, stage=stage)
            model = get_peft_model(tiny_llama(), lora(modules_to_save=["lm_head"]))
            trainer = kind(model=model, args=args, train_dataset=Rows())
            trainer.train()
            dist.barrier()
            again = kind(
                model=get_peft_model(tiny_llama(), lora(modules_to_save=["lm_head"])), args=args, train_dataset=Rows()
            )
            again.train(resume_from_checkpoint=str(tmp_path / str(stage) / "checkpoint-2"))
            folder = tmp_path / str(stage) / "checkpoint-4"
            dist.barrier()
            loaded = PeftModel.from_pretrained(tiny_llama(), folder)
            tokens = torch.arange(3, 11).view(1, 8)
            with torch.no_grad():
                loss = loaded(input_ids=tokens, labels=tokens).loss.item()
            found.append(
                (
                    history(trainer, "loss", "grad_norm"),
                    history(again, "loss", "grad_norm"),
                    load_file(folder / "adapter_model.safetensors"),
                    loss,
                    sorted(path.name for path in folder.glob("*.safetensors")),
                )
            )
        return found

    (log, again, files, loss, names), *ours = run_ranks(2, rank_main, timeout=120)[0]
    assert names == ["adapter_model.safetensors"]
    assert_same(again, log)
    for own_log, own_again, own_files, own_loss, own_names in ours:
        assert_same(own_log, log)
        assert_same(own_again, log)
        assert own_loss == pytest.approx(loss, rel=1e-5)
        assert own_names == names
        assert own_files.keys() == files.keys()
        for name, value in files.items():
            torch.testing.assert_close(own_files[name], value, rtol=1e-3, atol=2e-5)


def test_sentence_transformers(tmp_path: Path) -> None:
    """Their Trainer saves in a way of its own. Oracles: DDP; the saved model gives the trained one's embeddings."""
    pytest.importorskip("sentence_transformers", reason="the package sentence-transformers is not installed")

    def rank_main(rank: int) -> list[Any]:
        from sentence_transformers import (
            SentenceTransformer,
            SentenceTransformerTrainer,
            SentenceTransformerTrainingArguments,
            losses,
        )
        from sentence_transformers.models import Pooling, Transformer

        if rank == 0:
            sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
            torch.manual_seed(1)
            BertModel(BertConfig(vocab_size=64, **sizes, hidden_dropout_prob=0.0)).save_pretrained(tmp_path / "bert")
            tiny_tokenizer().save_pretrained(tmp_path / "bert")
        dist.barrier()
        found = []
        for stage in (None, 1, 3):
            words = Transformer(str(tmp_path / "bert"))
            model = SentenceTransformer(modules=[words, Pooling(16)], device="cpu")
            args = arguments(SentenceTransformerTrainingArguments, tmp_path / str(stage))
            data = Dataset.from_dict({name: sentences(32, 5, seed) for seed, name in enumerate(("anchor", "positive"))})
            kind = SentenceTransformerTrainer if stage is None else sharded(SentenceTransformerTrainer, stage=stage)
            trainer = kind(model=model, args=args, train_dataset=data, loss=losses.MultipleNegativesRankingLoss(model))
            trainer.train()
            trainer.save_model(str(tmp_path / f"saved{stage}"))
            dist.barrier()
            loaded = SentenceTransformer(str(tmp_path / f"saved{stage}"), device="cpu")
            found.append((history(trainer, "loss", "grad_norm"), torch.as_tensor(loaded.encode(sentences(3, 4)))))
        return found

    for (log, embeddings), *ours in run_ranks(2, rank_main, timeout=120):
        for own_log, own_embeddings in ours:
            assert_same(own_log, log)
            torch.testing.assert_close(own_embeddings, embeddings, rtol=1e-3, atol=1e-5)
