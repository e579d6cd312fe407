"""The chunked loss. Oracle: PyTorch's own cross_entropy and transformers' own loss, on the same weights and tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecopy
from harness.alive import Alive
from onecopy.errors import SettingsError, UsageError
from onecopy.planner.model.loss import CHUNKED
from ranks import run_ranks

transformers: Any = pytest.importorskip("transformers")

WORDS, WIDTH = 512, 32
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "use_cache": False,
}
GPT2 = {
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "attn_pdrop": 0,
    "embd_pdrop": 0,
    "resid_pdrop": 0,
}


def build(kind: str = "llama", **more: Any) -> Any:
    """A small model of a kind, always with the same weights."""
    settings = {"vocab_size": WORDS, "use_cache": False, **GPT2} if kind == "gpt2" else SMALL
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **settings, **more))
    model.loss_type = "ForCausalLM"
    return model


def tokens(seed: int = 0) -> dict[str, Tensor]:
    """Two samples; some labels do not count."""
    found = torch.randint(1, WORDS, (2, 48), generator=torch.Generator().manual_seed(seed))
    labels = found.clone()
    labels[:, :5] = -100
    return {"input_ids": found, "labels": labels}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [7, 1000, None])
def test_loss_and_gradients_are_cross_entropys(reduction: str, rows: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 50, 16, generator=generator, dtype=torch.float64).float()
    weight, labels = torch.randn(40, 16, generator=generator), torch.randint(0, 40, (3, 50), generator=generator)
    labels[0, :20] = 7
    found = [t.clone().requires_grad_() for t in (hidden, weight)]
    expected = [t.clone().requires_grad_() for t in (hidden, weight)]
    loss = onecopy.chunked_cross_entropy(*found, labels, ignore_index=7, reduction=reduction, rows=rows)
    oracle = nn.functional.cross_entropy(
        (expected[0] @ expected[1].T).flatten(0, 1), labels.flatten(), ignore_index=7, reduction=reduction
    )
    (3 * loss).backward()
    (3 * oracle).backward()
    assert loss.item() == pytest.approx(oracle.item(), rel=1e-5)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_the_loss_of_bf16_is_summed_in_fp32() -> None:
    """PyTorch's linear_cross_entropy says 9.94 of a like loss of 9.78: it sums in bf16."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1024, 64, generator=generator).bfloat16()
    weight = (torch.randn(4096, 64, generator=generator) / 8).bfloat16()
    labels = torch.randint(0, 4096, (1024,), generator=generator)
    loss = onecopy.chunked_cross_entropy(hidden, weight, labels)
    oracle = nn.functional.cross_entropy(hidden.float() @ weight.float().T, labels)
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(oracle.item(), rel=1e-3)


def test_frozen_heads_no_tokens_autocast_and_misuse() -> None:
    hidden, weight, labels = torch.randn(8, 4, requires_grad=True), torch.randn(6, 4), torch.arange(8) % 6
    loss = onecopy.chunked_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    assert weight.grad is None
    assert hidden.grad is not None
    with pytest.raises(UsageError, match="second time"):
        loss.backward()
    assert onecopy.chunked_cross_entropy(hidden, weight, torch.full((8,), -100)).isnan()
    with torch.autocast("cpu", torch.bfloat16):
        cast = onecopy.chunked_cross_entropy(hidden, weight, labels)
    assert cast.item() == pytest.approx(loss.item(), rel=0.02)
    for wrong in ({"reduction": "none"}, {"rows": 0}):
        with pytest.raises(SettingsError):
            onecopy.chunked_cross_entropy(hidden, weight, labels, **wrong)
    with pytest.raises(SettingsError, match="fp16"):
        onecopy.chunked_cross_entropy(hidden.half(), weight.half(), labels)
    with pytest.raises(SettingsError, match="Linear"):
        onecopy.chunk_loss(nn.Linear(2, 2))


@pytest.mark.parametrize("kind", CHUNKED)
def test_models_of_transformers_have_the_loss_that_they_had(kind: str) -> None:
    plain, chunked = build(kind), build(kind)
    names = list(chunked.state_dict())
    assert onecopy.chunk_loss(chunked)
    assert onecopy.chunk_loss(chunked)
    assert list(chunked.state_dict()) == names
    for items in (None, torch.tensor(50)):
        more = {} if items is None else {"num_items_in_batch": items}
        losses = []
        for model in (plain, chunked):
            model.zero_grad()
            output = model(**tokens(), **more)
            output.loss.backward()
            losses.append(output.loss.item())
        assert output.logits is None
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        for one, other in zip(plain.parameters(), chunked.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6)
    given = tokens()["input_ids"]
    torch.testing.assert_close(chunked(given).logits, plain(given).logits)
    pair = chunked(**tokens(), return_dict=False)
    torch.testing.assert_close(pair[1], plain(**tokens()).logits)
    assert pair[0].item() == pytest.approx(losses[0] if items is None else plain(**tokens()).loss.item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["gemma2", "granite"])
def test_other_losses_are_left_alone(kind: str) -> None:
    model = build(kind)
    head = model.get_output_embeddings()
    assert not onecopy.chunk_loss(model)
    assert model.get_output_embeddings() is head


def test_less_than_half_of_the_memory_is_held() -> None:
    """Counted storage by storage. The target is half; chunks leave an eighth and the head's gradient."""
    words, length, width = 8192, 1024, 64
    hidden = torch.zeros(1, length, width, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(words, width, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(1, length, dtype=torch.long)
    most = []
    with Alive(hidden, weight) as alive:
        nn.functional.cross_entropy((hidden @ weight.T).float().flatten(0, 1), labels.flatten()).backward()
    most.append(alive.most)
    hidden.grad = weight.grad = None
    with Alive(hidden, weight) as alive:
        onecopy.chunked_cross_entropy(hidden, weight, labels).backward()
    most.append(alive.most)
    assert most[1] < 0.2 * most[0]
    # As the planner counts it: `chunked_loss_bytes`.
    from onecopy.planner.formulas.activations import chunked_loss_bytes

    assert chunked_loss_bytes(1, length, words, width) == pytest.approx(most[1], rel=0.02)


def _train(model: Any, ranks: list[int], optimizer: Any) -> list[list[float]]:
    """Three steps on the mean of the losses of ``ranks``' data; each loss."""
    found = []
    for step in range(3):
        losses = [model(**tokens(10 * step + rank)).loss for rank in ranks]
        (sum(losses) / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.item() for loss in losses])
    return found


def _sharded(rank: int, stage: int) -> None:
    model, plain = build(), build()
    psi = sum(p.numel() for p in plain.parameters())
    expected = _train(plain, [0, 1], torch.optim.AdamW(plain.parameters(), lr=1e-2))
    onecopy.chunk_loss(model)
    onecopy.shard(model, stage)
    found = _train(model, [rank], torch.optim.AdamW(model.parameters(), lr=1e-2))
    for (loss,), losses in zip(found, expected, strict=True):
        assert loss == pytest.approx(losses[rank], rel=1e-4)
    traffic = onecopy.ledger(model).last_step
    assert traffic is not None
    assert traffic.state_bytes == pytest.approx({0: 2, 3: 3}[stage] / 2 * 4 * psi, rel=0.02)


@pytest.mark.parametrize("stage", [0, 3])
def test_sharded_it_trains_as_one_process_does_and_the_head_travels_once(stage: int) -> None:
    """Oracles: the plain model on the mean of both ranks' losses; ZeRO §7's bytes: 2Ψ/2, and 3Ψ/2 at stage 3."""
    run_ranks(2, _sharded, stage)
