"""Every Python example in README.md and docs/ runs as written. Oracle: the first loss is a plain model's.

Whole programs, which make a process group themselves, are `test_pages.py`'s.
"""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import onecopy
from places import ROOT
from ranks import run_ranks


class Tiny(nn.Module):
    """A model with the interface that the examples use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.lm_head = nn.Linear(8, 11)
        self.losses: list[float] = []
        self.first: Tensor | None = None

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        logits = self.lm_head(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        self.losses.append(loss.item())
        self.first = tokens if self.first is None else self.first
        return SimpleNamespace(loss=loss, logits=logits)

    def generate(self, tokens: Tensor, max_new_tokens: int) -> Tensor:
        for _ in range(max_new_tokens):
            tokens = torch.cat([tokens, self(tokens).logits[:, -1:].argmax(-1)], dim=1)
        return tokens


def examples() -> list[Any]:
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        found += [
            pytest.param(block, id=f"{path.name}:{number}")
            for number, block in enumerate(blocks)
            if "import torch\n" not in block
        ]
    return found


def _run(rank: int, source: str) -> tuple[list[float], float | None]:
    """All losses, and what the first one is to be; None where the example makes or loads other weights."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(rank)
    model = Tiny()
    plain = copy.deepcopy(model)
    names: dict[str, Any] = {
        "onecopy": onecopy,
        "torch": torch,
        "model": model,
        "build_model": Tiny,
        "loader": [{"tokens": torch.randint(0, 11, (2, 5), generator=generator)} for _ in range(8)],
    }
    if "shard(" not in source and any(call in source for call in ("gathered(", "ledger(", "meter(")):
        onecopy.shard(model, 3)
        model(**names["loader"][0]).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.enable_grad():
        exec(compile(source, "example", "exec"), names)
    losses, first = names["model"].losses, names["model"].first
    if names["model"] is not model or first is None or any(call in source for call in ("load(", "load_pretrained(")):
        return losses, None
    return losses, plain(first).loss.item()


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory / "model.safetensors"


@pytest.mark.parametrize("source", examples())
def test_example_runs_on_two_ranks(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({name: p.detach().clone() for name, p in Tiny().named_parameters()}, _made(tmp_path / "weights"))
    ranks = 4 if "init_device_mesh" in source else 2
    for losses, first in run_ranks(ranks, _run, source):
        assert all(map(math.isfinite, losses))
        # Some examples compute in bf16.
        assert first is None or losses[0] == pytest.approx(first, rel=2e-2)
