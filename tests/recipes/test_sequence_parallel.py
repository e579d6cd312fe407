"""Tensor parallelism along the sequence and the vocabulary. Oracle: the same model in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import onecopy
from onecopy.errors import SettingsError
from onecopy.planner.model.tensor import check_tensor_parallel
from onecopy.recipes.tensor_parallel import parallelize
from ranks import run_ranks

transformers: Any = pytest.importorskip("transformers")

WORDS = 96


def build(kind: str, *, tied: bool, chunked: bool) -> Any:
    torch.manual_seed(0)
    settings = {
        "vocab_size": WORDS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "use_cache": False,
    }
    if kind == "gpt2":
        # A table of positions that two ranks do not share evenly.
        settings |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_inner": 48, "n_positions": 63}
        del settings["max_position_embeddings"], settings["intermediate_size"], settings["num_key_value_heads"]
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **settings))
    model.loss_type = "ForCausalLM"
    if chunked:
        assert onecopy.chunk_loss(model)
    return model


def tokens(seed: int) -> dict[str, Tensor]:
    found = torch.randint(1, WORDS, (2, 24), generator=torch.Generator().manual_seed(seed))
    labels = found.clone()
    labels[:, :3] = -100
    return {"input_ids": found, "labels": labels}


def _losses(model: Any, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(steps):
        loss = model(**tokens(step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@cache
def _mesh() -> Any:
    return init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))


def _trains(rank: int) -> None:
    selective, units = (onecopy.Activations(kind, partition=False) for kind in ("selective", "units"))
    for kind, tied, stage, activations in (
        ("llama", False, 3, None),
        ("mistral", True, 0, units),
        ("qwen2", True, 2, selective),
        ("gpt2", True, 3, selective),
        ("gpt2", False, 1, None),
    ):
        plain, model = (build(kind, tied=tied, chunked=chunked) for chunked in (False, tied or kind == "llama"))
        parallelize(model, _mesh()["tensor"], sequence=True)
        onecopy.shard(model, stage, mesh=_mesh(), activations=activations)
        assert _losses(model) == pytest.approx(_losses(plain), rel=2e-4), kind
        with torch.no_grad():
            given = tokens(9)["input_ids"]
            torch.testing.assert_close(model(given).logits, plain(given).logits, rtol=1e-3, atol=1e-3)
        sizes = {name: item.to_local().numel() for name, item in _whole(model).items()}
        table, norm = (
            ("transformer.wte", "transformer.ln_f") if kind == "gpt2" else ("model.embed_tokens", "model.norm")
        )
        assert sizes["lm_head.weight"] == sizes[f"{table}.weight"] == WORDS * 32 // 2
        assert sizes[f"{norm}.weight"] == 32


def _whole(model: Any) -> dict[str, Any]:
    with onecopy.gathered(model):
        return dict(model.named_parameters(remove_duplicate=False))


def test_it_trains_as_one_process_does() -> None:
    run_ranks(2, _trains)


def _refuses(rank: int) -> None:
    model = build("llama", tied=False, chunked=False)
    model.config.vocab_size = 95
    with pytest.raises(SettingsError, match=r"must divide the model's 95 tokens"):
        parallelize(model, _mesh()["tensor"], sequence=True)
    assert "parallel.tensor knows" in (check_tensor_parallel({"model_type": "phi3"}, 2, sequence=True) or "")
    dist.barrier()


def test_what_cannot_be_cut_is_refused() -> None:
    run_ranks(2, _refuses)
