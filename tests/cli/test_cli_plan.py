"""`onecopy plan` as a user runs it. Oracles: the paper's numbers, exit codes, the files it reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands import called, command
from hub_configs import LLAMA_8B
from one_fork import Forked, On, one_fork
from places import ROOT

TESTS = ROOT / "tests" / "support"


def _plan(*arguments: object, code: int = 0, folder: Path = TESTS) -> SimpleNamespace:
    """What `onecopy plan` writes, run in ``folder``."""
    found, output, errors = command("plan", *map(str, arguments), folder=folder)
    assert found == code, output + errors
    return SimpleNamespace(stdout=output, stderr=errors)


def _data(*arguments: object, code: int = 0) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(_plan(*arguments, "--json", code=code).stdout)
    return loaded


def test_the_issues_example() -> None:
    done = _plan(
        *("7.5e9", "--gpus", 16, "--gpu-memory", "40GB", "--seq", 2048, "--micro-batch", 4, "--global-batch", 256),
        *("--nodes", 2, "--link", "400gbit", "--intra", "450GB/s", "--host-memory", "256GB", "--gpu", "h100"),
    )
    for expected in (
        "7.5 B parameters",
        "optimizer",
        "tokens/s",
        "onecopy.shard(model, stage=",
        "[parallel]",
    ):
        assert expected in done.stdout
    assert "runner-up" in done.stdout or "Nothing else fits" in done.stdout


def test_what_was_assumed_of_the_machine_is_shown() -> None:
    """Oracle: data sheets of an H100, and of an RTX 4090: 165 TFLOP/s of bf16."""
    shown = _plan("1.3e9", "--gpus", 8, "--gpu-memory", "24GB").stdout
    assert "assumed: H100 SXM 80 GB, 989 TFLOP/s" in shown
    assert "warning: memory is 24.00 GB, but an H100 SXM 80 GB has 84.93 GB" in shown
    own = _data("1.3e9", "--gpus", 8, "--gpu", "4090", "--host-memory", "512GB")
    assert own["notes"][0] == "assumed: RTX 4090, 165 TFLOP/s dense 16-bit, 200 Gbit/s to others of its node"
    assert "no run on this kind" in own["notes"][1]
    faster = _data("1.3e9", "--gpus", 8, "--gpu", "4090", "--tflops", 330)
    assert faster["machine"]["gpu"]["peak"] == 330e12


def test_figure_1_from_the_command() -> None:
    """ZeRO Figure 1: stage 3 of 7.5B on 64 ranks holds 1.9 GB of model states."""
    data = _data("7.5e9", "--gpus", 64, "--nodes", 8, "--stage", 3, "--micro-batch", 1)
    plain = next(one for one in data["options"] if one["option"]["shard"] == 64 and one["available"])
    step = plain["memory"]["step"]
    states = step["parameters_sliced"] + step["gradients_sliced"] + step["optimizer"]
    assert states / 1e9 == pytest.approx(1.9, abs=0.05)


def test_nothing_fits_is_exit_code_1_with_remedies() -> None:
    done = _plan("70e9", "--gpus", 8, "--gpu-memory", "24GB", "--seq", 4096, "--stage", 2, code=1)
    assert "Nothing fits" in done.stdout
    assert "1. " in done.stdout
    assert "raise the stage" in done.stdout


def test_a_transformers_config_is_built_offline(tmp_path: Path) -> None:
    """Llama-3-8B has 8,030,261,248 parameters, as its publisher says (8.03B)."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_8B))
    data = _data(tmp_path, "--gpus", 8, "--global-batch", 64)
    assert data["model"]["parameters"] == 8_030_261_248
    assert data["model"]["transformer"]["copies"] == 28
    assert f'path = "{tmp_path}"' in data["config"]
    assert "8192 positions" in _plan(file, "--gpus", 8, "--seq", 10_000, code=2).stderr


def test_a_python_factory_is_measured() -> None:
    data = _data("plan_models:stack", "--gpus", 4, "--micro-batch", 16, "--stage", 0)
    assert data["model"]["parameters"] == 4 * (64 * 128 + 128 + 128 * 64 + 64) + 64 * 3 + 3
    # Each block keeps its input and what the tanh returned, in bf16.
    assert data["options"][0]["option"]["checkpointing"] == "off"
    assert data["options"][0]["memory"]["forward"]["activations"] == pytest.approx(16 * 4 * (64 + 128) * 2, rel=0.05)


def test_images_are_counted_a_second_and_the_unknown_is_not_a_number() -> None:
    """Oracle: one convolution by hand; a factory without example_inputs."""
    assert "samples/s" in _plan("plan_images:build", "--gpus", 1).stdout
    unknown = _plan("models:TinyGPT", "--gpus", 1)
    assert "time unknown" in unknown.stdout
    assert "/s " not in unknown.stdout.split("options, best first")[1].split("runner-up")[0]
    assert _data("models:TinyGPT", "--gpus", 1)["best"]["seconds"] is None


def test_no_config_is_pasted_that_trains_another_model() -> None:
    """Oracle: onecopy train, which trains a small GPT-2 of its own where `model.path` is empty."""
    assert 'path = "path/of/your/model"' in _data("1.3e9", "--gpus", 8)["config"]
    assert _data("plan_images:build", "--gpus", 1)["config"] is None
    assert "onecopy train" not in _plan("plan_images:build", "--gpus", 1).stdout


def test_what_bitsandbytes_packs_is_answered_by_formula() -> None:
    """By hand: 1,024,000 weights of 0.5625 bytes, 16,000 trained of 16; 1e9 parameters with two moments of a byte."""
    said = _plan("plan_models:qlora", "--gpus", 1, code=2).stderr
    assert "Linear4bit of bitsandbytes, which onecopy cannot shard" in said
    assert "0.6 MB of packed weights" in said
    assert "0.3 MB for 16,000 trained parameters" in said
    said = _plan("1e9", "--gpus", 1, "--optimizer", "adamw_8bit", code=2).stderr
    assert "2.03 GB of moments for the 1 B parameters where AdamW keeps 8.00 GB; stage 1 on 4 GPUs" in said


def test_the_loss_is_planned_in_chunks_where_the_model_can(tmp_path: Path) -> None:
    """Oracle: 14 bytes for each of 2048 × 50,304 logits whole (`logits_bytes`), of a bf16 run of one sample."""
    job = ("1.3e9", "--gpus", 8, "--stage", 3, "--micro-batch", 1, "--checkpointing", "off")
    plans = [_data(*job, "--loss", kind)["best"] for kind in ("whole", "chunked")]
    whole, chunked = (plan["memory"]["forward"]["logits"] for plan in plans)
    assert whole == pytest.approx(14 * 2048 * 50_304, rel=0.01)
    assert chunked < whole / 2
    assert "onecopy.chunk_loss(model)" in _plan(*job).stdout
    assert "chunk_loss" not in _plan(*job, "--loss", "whole").stdout
    assert "[loss]\nchunked = false" in _plan(*job, "--loss", "whole").stdout


def test_blocks_along_the_sequence_are_pasted() -> None:
    """A tensor degree cuts along the sequence, for the models that onecopy can cut so."""
    said = _plan("7e9", "--gpus", 8, "--tensor", 8, "--stage", 1, "--micro-batch", 1).stdout
    assert "tensor 8 along the sequence" in said
    assert 'parallelize(model, mesh["tensor"], sequence=True)' in said
    assert "sequence = true" in said


def test_sizes_instead_of_a_model() -> None:
    data = _data("--layers", 48, "--hidden", 1600, "--vocabulary", 50257, "--gpus", 8)
    assert data["model"]["parameters"] / 1e9 == pytest.approx(1.56, abs=0.01)


def test_zero_rs_configurations_are_one_command() -> None:
    """ZeRO's Table 3 and Figure 6: states and checkpoints of C1 to C5, in GB."""
    found = _data("--zero-r")["zero_r"]
    sums = [round((one["states"] + one["checkpoints"]) / 1e9, 1) for one in found]
    assert sums == pytest.approx([24.7, 18.4, 24.6, 25.5, 24.1], abs=0.15)
    own = _data("13e9", "--gpus", 16, "--nodes", 2, "--micro-batch", 4, "--zero-r")["zero_r"]
    assert [one["name"] for one in own] == ["C1", "C2", "C3", "C4", "C5"]
    assert own[0]["checkpoints"] == pytest.approx(8 * own[1]["checkpoints"])
    assert "tensor-parallel ranks" in _plan("plan_models:stack", "--gpus", 4, "--zero-r", code=2).stderr


def test_a_tensor_axis_is_searched_for_and_printed() -> None:
    """Two trillion parameters on 1,024 GPUs of 80 GB: nothing fits without a tensor axis."""
    job = ("2e12", "--gpus", 1024, "--nodes", 128, "--global-batch", 4096, "--stage", 3)
    assert "spread blocks over ranks" in _plan(*job, "--tensor", 1, code=1).stdout
    done = _plan(*job)
    for expected in (
        "tensor 4",
        "along the",
        "sequence = true",
        'mesh_dim_names=("shard", "tensor")',
        "tensor = 4",
        "recompute = true",
    ):
        assert expected in done.stdout


def test_sweep_and_copies() -> None:
    done = _plan("7.5e9", "--gpus", 8, "--global-batch", 64, "--sweep", "link=10gbit..8000gbit", "--copies", 2)
    assert "stage 3 takes a tenth longer than stage 2" in done.stdout
    assert "bandwidth: below" in done.stdout
    assert "latency: " in done.stdout
    assert "memory more on each rank" in done.stdout
    data = _data("7.5e9", "--gpus", 8, "--global-batch", 64, "--sweep", "link=10gbit..8000gbit", "--copies", 2)
    assert [curve["stage"] for curve in data["sweep"]] == [0, 1, 2, 3]
    assert data["copies"]["memory"] == pytest.approx(12 * 7.5e9 / 8)


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    _plan("7.5e9", "--gpus", 8, "--gpu-memory", "40GB", "--global-batch", 64, "--html", page)
    text = page.read_text()
    assert "default-src 'none'" in text
    assert not [word for word in ("http://", "https://", "<script", '<link rel="stylesheet') if word in text]
    for expected in ("the limit, 40.00 GB", "stage 3", "optimizer", 'class="series stage-3"'):
        assert expected in text


def test_simulation_beside_the_formulas(tmp_path: Path) -> None:
    small = {**LLAMA_8B, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2, "vocab_size": 1000}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(small))
    job = (file, "--gpus", 64, "--nodes", 8, "--seq", 64, "--micro-batch", 2, "--stage", 3)
    data = _data(*job, "--checkpointing", "off", "--simulate")
    sums = [row for row in data["simulated"]["rows"] if row["category"] == "all"]
    assert {row["phase"] for row in sums} == {"forward", "backward", "step"}
    assert data["simulated"]["ranks"] == 64
    for row in sums:
        assert row["formula"] == pytest.approx(row["engine"], rel=0.03)


def test_a_model_of_images_is_simulated(tmp_path: Path) -> None:
    """Oracle: the simulated engine's meter, of a small ViT whose initialisation looks at values."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "vit", "image_size": 32, "patch_size": 8} | sizes))
    data = _data(file, "--gpus", 8, "--micro-batch", 2, "--stage", 2, "--checkpointing", "off", "--simulate")
    sums = [row for row in data["simulated"]["rows"] if row["category"] == "all"]
    assert {row["phase"] for row in sums} == {"forward", "backward", "step"}
    for row in sums:
        assert row["formula"] == pytest.approx(row["engine"], rel=0.03)


def test_this_machine() -> None:
    """Oracle: what the system says of its memory."""
    done = _plan("1e6", "--here", "--gpus", 2, "--json")
    data = json.loads(done.stdout)
    assert data["machine"]["gpus"] == 2
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < data["machine"]["host_memory"] <= total
    assert data["machine"]["link"] > 0
    assert data["machine"]["gpu"]["intra"] > 1e6
    assert "here: 2 ×" in done.stderr


def test_deepspeeds_settings_are_planned_with(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(
        json.dumps(
            {
                "zero_optimization": {"stage": 2, "overlap_comm": True},
                "bf16": {"enabled": True},
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 4,
            }
        )
    )
    data = _data("1.3e9", "--gpus", 8, "--from-deepspeed", file)
    assert {option["option"]["stage"] for option in data["options"]} == {2}
    assert {(o["option"]["micro_batch"], o["option"]["accumulate"]) for o in data["options"]} == {(2, 4)}
    assert any("ignored: zero_optimization.overlap_comm" in line for line in data["translation"])
    # Options win over the file, and it is said.
    own = _data("1.3e9", "--gpus", 8, "--from-deepspeed", file, "--stage", 3, "--precision", "fp16")
    assert {option["option"]["stage"] for option in own["options"]} == {3}
    assert own["precision"] == "fp16"
    assert own["notes"][-2:] == [
        "--stage 3 stands, where the file says 2",
        "--precision fp16 stands, where the file says bf16",
    ]
    alone = _plan("--from-deepspeed", file)
    assert "stage = 2" in alone.stdout


def test_what_is_translated_is_planned_with(tmp_path: Path) -> None:
    """MiCS's shards of 4 ranks; checkpoints that Accelerate makes around blocks."""
    mics = tmp_path / "ds.json"
    mics.write_text(json.dumps({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}))
    found = _data("1.3e9", "--gpus", 16, "--nodes", 2, "--from-deepspeed", mics)["options"]
    assert {(one["option"]["shard"], one["option"]["replicate"]) for one in found} == {(4, 4)}
    assert "must divide the 6" in _plan("1.3e9", "--gpus", 6, "--from-deepspeed", mics, code=2).stderr
    fsdp = tmp_path / "fsdp.yaml"
    fsdp.write_text("fsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_activation_checkpointing: true\n")
    found = _data("1.3e9", "--gpus", 8, "--from-accelerate", fsdp)["options"]
    assert {one["option"]["checkpointing"] for one in found} == {"units"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["7.5e9"], "--gpus is needed"),
        (["7.5e9", "--gpus", "8", "--gpu", "h1000"], "did you mean 'h100'"),
        (["7.5e9", "--gpus", "8", "--preset", "quick"], "did you mean"),
        (["7.5e9", "--gpus", "8", "--nodes", "3"], "multiple of nodes"),
        (["7.5e9", "--gpus", "8", "--gpu-memory", "big"], "like 24GB"),
        (["7.5e9", "--gpus", "8", "--stage", "4"], "found 4"),
        (["7.5e9", "--gpus", "8", "--tensor", "3"], "must divide the model's 32 heads"),
        (["7.5e9", "--gpus", "8", "--tensor", "1", "--checkpointing", "P_a"], "P_a cuts checkpoints"),
        (["7.5e9", "--gpus", "8", "--global-batch", "12"], "the nearest that can are 8 and 16"),
        (["no-such-model", "--gpus", "8"], "MODEL must be"),
        (["no.such:thing", "--gpus", "8"], "cannot import"),
        (["plan_models:nothing", "--gpus", "8"], "no function 'nothing'"),
        (["plan_models:number", "--gpus", "8"], "must make an nn.Module"),
        (
            ["plan_images:build", "--gpus", "8", "--seq", "128"],
            "--seq needs a function example_inputs(samples, sequence)",
        ),
        (["--layers", "4", "--gpus", "8"], "go together"),
        (["--gpus", "8"], "give a MODEL"),
        (["missing.json", "--gpus", "8"], "found no 'missing.json'"),
        (["plan_models:broken", "--gpus", "8"], "cannot be built: KeyError: 'no such size' ("),
        (["plan_models:example_inputs", "--gpus", "8"], "without arguments that makes a model; found one that needs"),
        (["plan_models:made", "--gpus", "8"], "without arguments that makes a model; found a model, Linear"),
        (["someone/a-model", "--gpus", "8"], "nothing is downloaded: give the path of a config.json"),
        (["7.5e9", "--gpus", "8", "--rows", "0"], "--rows must be positive; found 0"),
        (["7.5e9", "--gpus", "8", "--tflops", "nan"], "--tflops must be a positive number; found nan"),
        (["7.5e9", "--gpus", "8", "--mirror", "--losses-a-day", "nan"], "--losses-a-day must be a number, 0 or more"),
        (["plan_models:nothing_to_train", "--gpus", "8"], "Tanh has no parameters"),
        (["--layers", "4", "--hidden", "64", "--heads", "7", "--gpus", "8"], "heads must divide the hidden size of 64"),
        (["7.5e9", "--gpus", "8", "--gpu-memory", "24"], "needs a unit; found '24', write 24GB"),
        (["7.5e9", "--gpus", "8", "--tflops", "0"], "--tflops must be a positive number"),
        (["7.5e9", "--gpus", "8", "--gpu-memory", "0"], "above 0; found '0'"),
        (["7.5e9", "--gpus", "8", "--link", "0gbit"], "above 0; found '0gbit'"),
        (["7.5e9", "--gpus", "8", "--global-batch", "3"], "the smallest that can is 8"),
        (["7.5e9", "--gpus", "8", "--html", "nowhere/page.html"], "in a directory that exists"),
    ],
)
@one_fork
def test_what_cannot_work_is_one_message(arguments: list[str], message: str) -> Forked:
    ((code, output, errors),) = yield On(1, called, TESTS, "plan", *arguments, group=False)
    assert code == 2, errors
    assert message in errors
    assert "Traceback" not in errors
    assert not output


@pytest.mark.parametrize(
    "name, text, model, message",
    [
        ("config.json", '{"model_type": "llama", "hidden_size": "wide"}', "config.json", "transformers cannot read"),
        ("config.json", '{"model_type": "lla', "config.json", "transformers cannot read"),
        ("unreadable.py", "def build(:", "unreadable:build", "cannot import 'unreadable'"),
        ("failing.py", "1 / 0", "failing:build", "ZeroDivisionError"),
    ],
)
@one_fork
def test_a_file_of_the_users_that_is_wrong_is_one_message(
    name: str, text: str, model: str, message: str, tmp_path: Path
) -> Forked:
    (tmp_path / name).write_text(text)
    ((code, _, errors),) = yield On(1, called, tmp_path, "plan", model, "--gpus", "8", group=False)
    assert code == 2, errors
    assert message in errors
    assert "Traceback" not in errors


def test_planning_from_a_count_loads_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['onecopy', 'plan', '7.5e9', '--gpus', '8', '--json']\n"
        "from onecopy.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as done: sys.exit(9 if 'torch' in sys.modules else done.code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0
