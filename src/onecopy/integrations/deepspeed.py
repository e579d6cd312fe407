"""DeepSpeed: its JSON settings in onecopy's terms. Nothing of DeepSpeed is imported.

"auto" values become what Hugging Face's integration makes of them: reduce bucket h², prefetch bucket 0.9h², persistence
threshold 10h, with h the model's hidden size; batch sizes and the like are left to the training script.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from onecopy.errors import SettingsError
from onecopy.integrations.translation import AUTO, Rule, Translation, apply_rules
from onecopy.stage import Stage
from onecopy.untrusted import read_json, reason

_UNITS = "gradients are sent unit by unit, each in one buffer of its size"
_SCRIPT = "left to the training script by 'auto'"
_NOT_YET = "onecopy does not have this yet"
_LOSS_SCALE = "scaling the loss is torch.amp.GradScaler's work, in the loop"


def from_deepspeed(config: str | Path | Mapping[str, Any], model: Any = None) -> Translation:
    """Translate a DeepSpeed configuration into arguments of `onecopy.shard`.

    Args:
        config: the path of the JSON file, or its content.
        model: its hidden size (``model.config.hidden_size``, as Hugging Face reads it) gives bucket sizes that are
            "auto". Without a model these sizes stay unresolved, which makes no difference to onecopy.

    Returns:
        A `Translation`: ``onecopy.shard(model, **translation.arguments)``; ``translation.ignored`` lists every key
        that has no effect, and why.

    Raises:
        SettingsError: if the file cannot be read, or if DeepSpeed does not accept a value.
    """
    values = config if isinstance(config, Mapping) else read_settings(Path(config))
    translation = Translation()
    apply_rules(translation, values, _RULES)
    for name, formula in _AUTO_SIZES.items():
        if values.get("zero_optimization", {}).get(name) == AUTO and (hidden := hidden_size(model)) is not None:
            translation.resolved[f"zero_optimization.{name}"] = formula(hidden)
    _check_batches(translation)
    _check_offload(translation)
    return translation


def hidden_size(model: Any) -> int | None:
    """The hidden size by which Hugging Face resolves "auto": the config's or its text model's; the largest of many."""
    config = getattr(model, "config", model)
    for holder in (config, getattr(config, "text_config", None)):
        if isinstance(size := getattr(holder, "hidden_size", None), int):
            return size
        if sizes := getattr(holder, "hidden_sizes", None):
            return int(max(sizes))
    return None


_AUTO_SIZES: Final[dict[str, Callable[[int], int]]] = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}


def read_settings(path: Path) -> dict[str, Any]:
    """What a config file holds.

    Raises:
        SettingsError: if it cannot be read, or is no JSON object.
    """
    try:
        values = read_json(path, follow=True)
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot read DeepSpeed's settings from {str(path)!r}: {reason(error)}") from None
    if not isinstance(values, dict):
        raise SettingsError(f"{str(path)!r} must hold a JSON object; found {type(values).__name__}")
    return values


def _check_batches(found: Translation) -> None:
    if found.global_batch is None or found.micro_batch is None:
        return
    pieces = found.micro_batch * (found.accumulate or 1)
    if found.global_batch % pieces:
        raise SettingsError(
            f"train_batch_size ({found.global_batch}) must be a multiple of train_micro_batch_size_per_gpu × "
            f"gradient_accumulation_steps ({found.micro_batch} × {found.accumulate or 1})"
        )


def _stage(found: Translation, value: Any) -> str | None:
    found.stage = Stage.of(value).number
    return None


def _number(attribute: str, key: str, found: Translation, value: Any) -> str | None:
    if value == AUTO:
        return _SCRIPT
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise SettingsError(f"{key} must be a number or 'auto'; found {value!r}")
    setattr(found, attribute, value)
    return None


def _clip(found: Translation, value: Any) -> str | None:
    why = _number("clip_norm", "gradient_clipping", found, value)
    return why or "clipping is the loop's: torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)"


def _precision(name: str, found: Translation, value: Any) -> str | None:
    if value == AUTO:
        return _SCRIPT
    if value:
        found.precision = name
    return None


def _prefetch(found: Translation, value: Any) -> str | None:
    found.prefetch = 0 if value == 0 else 1
    return f"onecopy prefetches whole units: prefetch={found.prefetch}"


def _offload(what: str, found: Translation, value: Any) -> str | None:
    settings = value if isinstance(value, Mapping) else {"device": "cpu" if value else "none"}
    device = settings.get("device", "none")
    if device in ("none", None):
        return None
    if device not in ("cpu", "nvme"):
        raise SettingsError(f"the device for the offload of {what} must be none, cpu or nvme; found {device!r}")
    if device == "nvme" and not settings.get("nvme_path"):
        raise SettingsError(
            f"offload of {what} goes to nvme, but nvme_path is missing: give the directory on that disk"
        )
    found.rests[what] = "cpu" if device == "cpu" else str(settings["nvme_path"])
    return None


def _check_offload(found: Translation) -> None:
    stage = Stage.of(found.stage)
    for what, works in (("optimizer", stage.shards_optimizer), ("parameters", stage.shards_parameters)):
        if what in found.rests and not works:
            raise SettingsError(
                f"offloading {what} needs stage {1 if what == 'optimizer' else 3} or more; the config has stage "
                f"{found.stage}"
            )


def _optimizer(found: Translation, value: Any) -> str | None:
    found.optimizer = {"type": value.get("type"), **value.get("params", {})}
    return "the optimizer is the script's own; its arguments are in `optimizer`"


def _mics(found: Translation, value: Any) -> str | None:
    if isinstance(value, int) and value > 0:
        found.shard = value
        return "becomes a mesh with that many ranks on its shard axis"
    return None


def _hpz(found: Translation, value: Any) -> str | None:
    return None if value in (1, None) else f"a second copy of parameters in each node: {_NOT_YET}"


def _checkpoints(found: Translation, value: Any) -> str | None:
    found.checkpointing = True
    return "works through DeepSpeed's own checkpoint function alone; use shard(activations=onecopy.Activations())"


def _off(what: str, found: Translation, value: Any) -> str | None:
    return f"{what}: {_NOT_YET}" if value else None


_ZERO: Final[dict[str, Rule]] = {
    "stage": _stage,
    "reduce_bucket_size": _UNITS,
    "allgather_bucket_size": _UNITS,
    "allgather_partitions": "slices are always gathered with an all-gather",
    "reduce_scatter": "gradients are always reduce-scattered, at the paper's volume",
    "overlap_comm": "collectives always overlap computing",
    "contiguous_gradients": "gradients always leave through one flat buffer a unit",
    "round_robin_gradients": "slices are contiguous",
    "sub_group_size": "the optimizer steps over its slices at once",
    "stage3_prefetch_bucket_size": _prefetch,
    "stage3_param_persistence_threshold": "small parameters are gathered with their unit",
    "stage3_model_persistence_threshold": "small parameters are gathered with their unit",
    "stage3_max_live_parameters": "what is live is the root, the unit that computes and the prefetched ones",
    "stage3_max_reuse_distance": "a unit is released when it has computed",
    "stage3_gather_16bit_weights_on_model_save": "saving whole parameters is `with onecopy.gathered(model):`",
    "stage3_gather_fp16_weights_on_model_save": "saving whole parameters is `with onecopy.gathered(model):`",
    "ignore_unused_parameters": "unused parameters are always allowed",
    "elastic_checkpoint": "checkpoints are not DeepSpeed's",
    "load_from_fp32_weights": "checkpoints are not DeepSpeed's",
    "legacy_stage1": "there is one engine for all stages",
    "memory_efficient_linear": "modules are left as they are",
    "use_multi_rank_bucket_allreduce": _UNITS,
    "offload_optimizer": partial(_offload, "optimizer"),
    "offload_param": partial(_offload, "parameters"),
    "cpu_offload": partial(_offload, "optimizer"),
    "cpu_offload_params": partial(_offload, "parameters"),
    "mics_shard_size": _mics,
    "mics_hierarchical_params_gather": "gathers stay within the shard axis",
    "zero_hpz_partition_size": _hpz,
    "zero_quantized_weights": partial(_off, "quantised gathers"),
    "zero_quantized_nontrainable_weights": partial(_off, "quantised gathers"),
    "zero_quantized_gradients": partial(_off, "quantised reduces"),
}

_RULES: Final[dict[str, Rule]] = {
    **{f"zero_optimization.{name}": rule for name, rule in _ZERO.items()},
    "train_batch_size": partial(_number, "global_batch", "train_batch_size"),
    "train_micro_batch_size_per_gpu": partial(_number, "micro_batch", "train_micro_batch_size_per_gpu"),
    "gradient_accumulation_steps": partial(_number, "accumulate", "gradient_accumulation_steps"),
    "gradient_clipping": _clip,
    "bf16.enabled": partial(_precision, "bf16"),
    "bfloat16.enabled": partial(_precision, "bf16"),
    "fp16.enabled": partial(_precision, "fp16"),
    **{
        f"fp16.{name}": _LOSS_SCALE
        for name in (
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
        )
    },
    "fp16.auto_cast": "the model's inputs are always cast to the compute dtype",
    "optimizer": _optimizer,
    "scheduler": "the learning rate's schedule is the script's own",
    "activation_checkpointing": _checkpoints,
    "zero_allow_untested_optimizer": "every elementwise optimizer works",
    "zero_force_ds_cpu_optimizer": "there is no CPU optimizer",
    "prescale_gradients": "gradients are averaged with an fp32 sum, or by NCCL",
    "gradient_predivide_factor": "gradients are averaged with an fp32 sum, or by NCCL",
    "sparse_gradients": "sparse gradients are made dense",
    "communication_data_type": "gradients travel in the compute dtype; onecopy.Precision(reduce=) changes it",
    "data_types.grad_accum_dtype": 'gradients are summed in fp32; precision="bf16-lean" holds them in bf16',
    "aio": "files are read and written by four threads in pieces of 4 MiB",
    **dict.fromkeys(
        (
            "steps_per_print",
            "wall_clock_breakdown",
            "dump_state",
            "memory_breakdown",
            "flops_profiler",
            "comms_logger",
            "tensorboard",
            "wandb",
            "csv_monitor",
            "autotuning",
            "elasticity",
            "checkpoint",
            "data_efficiency",
            "curriculum_learning",
            "compression_training",
        ),
        "a tool of DeepSpeed's own",
    ),
}

KEYS: Final = tuple(_RULES)
"""Every key that is known, with dots between levels."""
