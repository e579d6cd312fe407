"""A running model's weights out by all ranks. Oracles: transformers, safetensors' own reader, the model as built."""

from __future__ import annotations

import json
import os
import resource
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

import onecopy
from onecopy.errors import CheckpointError, NotFiniteError, SettingsError
from oracle import assert_same_weights, whole_weights
from ranks import run_ranks


def small_gpt() -> nn.Module:
    torch.manual_seed(1)
    sizes: Any = {"n_layer": 2, "n_embd": 24, "n_head": 2, "n_positions": 16, "vocab_size": 37}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


class Odd(nn.Module):
    """A scalar, a channels_last weight, tied weights, buffers of narrow and wide dtypes, and a layer in bf16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.first = nn.Linear(7, 5)
        self.tied = nn.Linear(7, 5)
        self.tied.weight = self.first.weight
        self.narrow = nn.Linear(5, 3, dtype=torch.bfloat16)
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("wide", torch.arange(3, dtype=torch.float64))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)


def _save(rank: int, build: Any, stage: int, out: Path, settings: dict[str, Any] | None = None) -> dict[str, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = onecopy.shard(build(), stage)
        return onecopy.save_pretrained(model, out, **(settings or {}))


@pytest.mark.parametrize("stage, ranks", [(0, 2), (1, 3), (2, 2), (3, 3)])
def test_every_tensor_is_in_the_file_as_it_was(stage: int, ranks: int, tmp_path: Path) -> None:
    """Oracle: the state dict of the model before it was sharded, read by safetensors."""
    written = run_ranks(ranks, _save, Odd, stage, tmp_path / "new" / "out")
    assert written[0] == {path.name: path.stat().st_size for path in (tmp_path / "new" / "out").iterdir()}
    assert all(one == written[0] for one in written)
    found = load_file(tmp_path / "new" / "out" / "model.safetensors")
    expected = {name: value for name, value in Odd().state_dict().items() if name != "tied.weight"}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


def test_ranks_on_a_replicate_axis_share_the_work(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        onecopy.save_pretrained(onecopy.shard(small_gpt(), 3, mesh=mesh), tmp_path)

    run_ranks(4, save)
    assert_same_weights(load_file(tmp_path / "model.safetensors"), whole_weights(small_gpt()), atol=0)


def _from_pretrained(rank: int, directory: Path) -> dict[str, Any]:
    model, info = GPT2LMHeadModel.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values())
    return whole_weights(model) | {"dtype": model.dtype}


def test_several_files_load_in_transformers_and_take_the_place_of_earlier_ones(tmp_path: Path) -> None:
    """Oracle: from_pretrained reports nothing missing, and the weights are those of the model as built."""
    run_ranks(2, _save, small_gpt, 3, tmp_path, {"file_bytes": 12_000})
    files = sorted(path.name for path in tmp_path.iterdir())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted({*index["weight_map"].values()}) == [name for name in files if name.endswith(".safetensors")]
    assert len(files) > 4
    for file in {*index["weight_map"].values()}:
        with safe_open(tmp_path / file, "pt") as opened:
            keys = list(opened.keys())
            assert len(keys) == 1 or sum(opened.get_tensor(key).nbytes for key in keys) <= 12_000
    found = run_ranks(1, _from_pretrained, tmp_path, group=False)[0]
    assert found.pop("dtype") == torch.float32
    assert_same_weights(found, whole_weights(small_gpt()), atol=0)

    run_ranks(2, _save, small_gpt, 2, tmp_path, {"dtype": torch.bfloat16})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]
    found = run_ranks(1, _from_pretrained, tmp_path, group=False)[0]
    assert found.pop("dtype") == torch.bfloat16
    expected = {name: value.bfloat16() for name, value in whole_weights(small_gpt()).items()}
    assert_same_weights(found, expected, atol=0)


def test_ranks_that_see_different_disks_leave_the_writing_to_the_first(tmp_path: Path) -> None:
    """A directory of each rank's own stands for a disk in each node. Oracle: the model as built."""

    def save(rank: int) -> list[str]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            onecopy.save_pretrained(onecopy.shard(Odd(), 3), tmp_path / str(rank))
        return [str(one.message) for one in told]

    told, *others = run_ranks(3, save)
    assert "rank 1, 2 does not see the first rank's files" in told[0]
    assert "file system that all of them share" in told[0]
    assert others == [[], []]
    found = load_file(tmp_path / "0" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in Odd().state_dict().items() if name != "tied.weight")
    assert not (tmp_path / "1" / "model.safetensors").exists()


def test_a_full_disk_is_an_error_on_every_rank_and_leaves_the_earlier_files(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk, on one rank of two."""
    run_ranks(2, _save, small_gpt, 3, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def save(rank: int) -> str:
        model = onecopy.shard(small_gpt(), 3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        if rank == 1:
            import signal

            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
        with pytest.raises(CheckpointError, match=r"failed on rank 1: cannot write .*File too large") as raised:
            onecopy.save_pretrained(model, tmp_path)
        return str(raised.value)

    run_ranks(2, save)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_is_not_worth_saving_is_refused(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        model = onecopy.shard(small_gpt(), 3)
        with torch.no_grad(), onecopy.gathered(model, write=True):
            model.transformer.wpe.weight[0, 0] = torch.nan
        with pytest.raises(NotFiniteError, match=r"transformer.wpe.weight' holds nan"):
            onecopy.save_pretrained(model, tmp_path)
        for wrong, message in (({"dtype": torch.int8}, "floating-point"), ({"file_bytes": 0}, "at least 1")):
            with pytest.raises(SettingsError, match=message):
                onecopy.save_pretrained(model, tmp_path, **wrong)

    run_ranks(2, save)
    assert not list(tmp_path.iterdir())


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_nothing_is_added_to_the_peak(tmp_path: Path) -> None:
    """A model of 128 MB on two ranks: the kernel saw at most 40 MB more (a whole copy would be 128)."""

    def save(rank: int) -> int:
        model = onecopy.shard(nn.Sequential(*(nn.Linear(2000, 2000, bias=False) for _ in range(8))), 3)
        onecopy.save_pretrained(model, tmp_path / "warm")
        before = _peak()
        onecopy.save_pretrained(model, tmp_path / "out", dtype=torch.bfloat16)
        return _peak() - before

    added = run_ranks(2, save)
    print(f"added to the peak, bytes: {added}")
    assert max(added) < 40_000_000
    assert (tmp_path / "out" / "model.safetensors").stat().st_size >= 8 * 2000 * 2000 * 2
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
