"""Other libraries' settings. Oracle: what Hugging Face's integration makes of "auto"; the libraries' documentation."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import onecopy
from models import Block, TinyGPT
from onecopy.errors import SettingsError
from onecopy.integrations.accelerate import from_accelerate
from onecopy.stage import Stage

HUGGING_FACE_ZERO_3 = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.5,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "wall_clock_breakdown": False,
    "made_up": 1,
}
"""Hugging Face's example for ZeRO-3, with one key that nobody knows."""


def test_auto_sizes_are_hugging_faces() -> None:
    """transformers' HfTrainerDeepSpeedConfig: h², 0.9h², 10h; the text model's size where there is one."""
    for config in (SimpleNamespace(hidden_size=1000), SimpleNamespace(text_config=SimpleNamespace(hidden_size=1000))):
        found = onecopy.from_deepspeed(HUGGING_FACE_ZERO_3, SimpleNamespace(config=config))
        assert found.resolved == {
            "zero_optimization.reduce_bucket_size": 1_000_000,
            "zero_optimization.stage3_prefetch_bucket_size": 900_000,
            "zero_optimization.stage3_param_persistence_threshold": 10_000,
        }


def test_settings_become_shards_arguments() -> None:
    found = onecopy.from_deepspeed(HUGGING_FACE_ZERO_3)
    expected = {"stage": 3, "precision": "bf16", "accumulate": 1, "prefetch": 1, "units": "auto"}
    assert found.arguments == expected | {"offload": onecopy.Offload(optimizer="cpu")}
    assert found.micro_batch == 4
    assert found.clip_norm == 0.5
    assert found.optimizer == {"type": "AdamW", "lr": "auto", "betas": "auto"}
    model = onecopy.shard(TinyGPT(), **found.arguments)
    assert all(isinstance(parameter, onecopy.SlicedTensor) for parameter in model.parameters())


def _leaves(values: dict[str, object], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in values.items():
        whole = name in ("optimizer", "scheduler", "offload_optimizer", "offload_param")
        found |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) and not whole else {f"{prefix}{name}"}
    return found


def test_every_key_without_effect_is_listed_with_a_reason() -> None:
    found = onecopy.from_deepspeed(HUGGING_FACE_ZERO_3)
    ignored = {one.key: one.why for one in found.ignored}
    used = {
        *("bf16.enabled", "zero_optimization.stage", "train_micro_batch_size_per_gpu"),
        *("zero_optimization.offload_param", "zero_optimization.offload_optimizer"),
    }
    assert set(ignored) == _leaves(HUGGING_FACE_ZERO_3) - used
    assert all(ignored.values())
    assert "not a key" in ignored["made_up"]
    assert "ignored: made_up" in found.text()


def test_a_file_is_read_and_wrong_values_are_named(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1, "mics_shard_size": 8}, "fp16": {"enabled": True}}))
    found = onecopy.from_deepspeed(file)
    assert (found.stage, found.precision, found.shard) == (1, "fp16", 8)
    for wrong, message in (
        ({"zero_optimization": {"stage": 5}}, "found 5"),
        ({"zero_optimization": 2}, "zero_optimization must hold keys and values; found 2"),
        ({"train_micro_batch_size_per_gpu": "many"}, "must be a number or 'auto'"),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, "must be a multiple"),
    ):
        with pytest.raises(SettingsError, match=message):
            onecopy.from_deepspeed(wrong)
    file.write_text("{")
    with pytest.raises(SettingsError, match="cannot read"):
        onecopy.from_deepspeed(file)


@pytest.mark.parametrize(
    "stage, optimizer, parameters, expected",
    [
        (1, "cpu", None, onecopy.Offload("cpu")),
        (3, "/nvme", "cpu", onecopy.Offload("/nvme", "cpu")),
        (3, "/nvme", "/other", onecopy.Offload("/nvme", "/other")),
        # Masters are larger than what is gathered, and go with it.
        (3, None, "/nvme", onecopy.Offload("/nvme", "/nvme")),
        (3, "cpu", "/nvme", onecopy.Offload("/nvme", "/nvme")),
        (2, None, None, None),
    ],
)
def test_deepspeeds_offload_says_where_states_rest(
    stage: int, optimizer: str | None, parameters: str | None, expected: onecopy.Offload | None
) -> None:
    """Oracle: DeepSpeed's documentation: `device` is none, cpu or nvme, and nvme lies at `nvme_path`."""

    def section(place: str | None) -> dict[str, object]:
        if place is None or place == "cpu":
            return {"device": place or "none"}
        return {"device": "nvme", "nvme_path": place, "pin_memory": True, "buffer_count": 5}

    zero = {"stage": stage, "offload_optimizer": section(optimizer), "offload_param": section(parameters)}
    found = onecopy.from_deepspeed({"zero_optimization": zero})
    assert found.arguments.get("offload") == expected
    if expected is not None:
        expected.check(Stage.of(stage))


# --- Accelerate


YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
gradient_accumulation_steps: 4
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_reshard_after_forward: true
  fsdp_offload_params: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_made_up: 1
"""


def test_accelerates_yaml(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "fsdp.yaml"
    file.write_text(YAML)
    model = TinyGPT()
    found = from_accelerate(file, model)
    blocks = [name for name, module in model.named_modules() if isinstance(module, Block)]
    expected = {"stage": 3, "precision": "bf16", "accumulate": 4, "prefetch": 1, "units": blocks}
    assert found.arguments == expected | {"offload": onecopy.Offload(optimizer="cpu", parameters="cpu")}
    ignored = {one.key: one.why for one in found.ignored}
    assert "fsdp_config.fsdp_offload_params" not in ignored
    assert "not a key" in ignored["fsdp_config.fsdp_made_up"]
    assert "fsdp_config.fsdp_reshard_after_forward" not in ignored
    onecopy.shard(model, **found.arguments)


@pytest.mark.parametrize(
    "written, stage",
    [("FULL_SHARD", 3), ("SHARD_GRAD_OP", 2), ("NO_SHARD", 0), ("HYBRID_SHARD", 3), (1, 3), (2, 2), (3, 0), (5, 2)],
)
def test_fsdps_strategies_are_stages(written: str | int, stage: int) -> None:
    """Accelerate's documentation: 1 FULL_SHARD (ZeRO-3), 2 SHARD_GRAD_OP (ZeRO-2), 3 NO_SHARD, 4 and 5 hybrid."""
    found = from_accelerate({"fsdp_config": {"fsdp_sharding_strategy": written}})
    assert found.stage == stage


def test_accelerate_settings_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="at least 1; found 'two'"):
        from_accelerate({"fsdp_config": {}, "gradient_accumulation_steps": "two"})
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="cannot read"):
        from_accelerate(tmp_path / "bytes.yaml")
    with pytest.raises(SettingsError, match="fsdp_config"):
        from_accelerate({"mixed_precision": "bf16"})
    with pytest.raises(SettingsError, match="must be one of"):
        from_accelerate({"fsdp_config": {"fsdp_sharding_strategy": "SOME"}})
    with pytest.raises(SettingsError, match="does not contain"):
        from_accelerate({"fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "Nope"}}, torch.nn.Linear(2, 2))
