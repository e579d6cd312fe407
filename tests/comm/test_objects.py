"""Objects from rank to rank. Oracle: what was given. PyTorch comes without NumPy, and so may we."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist

import onecopy
from onecopy.comm.objects import all_gather_objects, bytes_of
from ranks import run_ranks


def test_every_rank_gets_every_ranks_object() -> None:
    def run(rank: int) -> list[Any]:
        assert dist.group.WORLD is not None
        return all_gather_objects({"rank": rank, "long": "x" * 1000 * rank}, dist.group.WORLD, 3, torch.device("cpu"))

    expected = [{"rank": rank, "long": "x" * 1000 * rank} for rank in range(3)]
    assert run_ranks(3, run) == [expected] * 3


def test_bytes_of_a_tensor_are_its_own() -> None:
    def run(rank: int) -> bytes:
        return bytes_of(torch.arange(5, dtype=torch.int16)[1:])

    assert run_ranks(1, run, group=False) == [b"\x01\x00\x02\x00\x03\x00\x04\x00"]


def test_training_saving_and_loading_need_no_numpy(tmp_path: Path) -> None:
    def missing(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("Numpy is not available")

    def run(rank: int) -> tuple[int, float]:
        with mock.patch.object(torch.Tensor, "numpy", missing), mock.patch.dict(sys.modules, numpy=None):
            torch.manual_seed(0)
            model = onecopy.shard(torch.nn.Linear(8, 4), 3)
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            onecopy.save(tmp_path, model, optimizer, step=1, extra={"batches": 7})
            loaded = onecopy.load(tmp_path, model, optimizer)
        assert loaded.extra == {"batches": 7}
        return loaded.step, model.weight.sum().item()

    found = run_ranks(2, run)
    assert found[0] == found[1]
    assert found[0][0] == 1
