"""DeepSpeed's config as its engine is to carry it out: each key does what it says, or is an error with a sentence.

`integrations/deepspeed.py` translates it and lists what `shard` alone has no use for. Of that, `_DONE` is done by the
engine here, and `_NO_DIFFERENCE` decides how fast DeepSpeed is, not what it computes. All else must be off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from onecopy.errors import SettingsError
from onecopy.integrations.deepspeed import KEYS, from_deepspeed, read_settings
from onecopy.integrations.translation import AUTO, UNKNOWN
from onecopy.memory.store.offload import Offload
from onecopy.sharding.tensor.precision import Precision

_DONE: Final = (
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "fp16.",
    "communication_data_type",
    "data_types.grad_accum_dtype",
    "zero_optimization.mics_shard_size",
    "steps_per_print",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save",
)

_NO_DIFFERENCE: Final = {
    *(
        f"zero_optimization.{name}"
        for name in (
            "reduce_bucket_size",
            "allgather_bucket_size",
            "allgather_partitions",
            "reduce_scatter",
            "overlap_comm",
            "contiguous_gradients",
            "round_robin_gradients",
            "sub_group_size",
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "stage3_model_persistence_threshold",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "ignore_unused_parameters",
            "load_from_fp32_weights",
            "memory_efficient_linear",
            "use_multi_rank_bucket_allreduce",
            "mics_hierarchical_params_gather",
        )
    ),
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "prescale_gradients",
    "gradient_predivide_factor",
    "sparse_gradients",
    "activation_checkpointing",
    "aio",
}

_DTYPES: Final = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_DTYPES_LONG: Final = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

_CLIP: Final = 1.0
"""To what norm DeepSpeed clips where the config says nothing (`GRADIENT_CLIPPING_DEFAULT`, read in 0.19.8)."""


@dataclass(frozen=True)
class LossScale:
    """DeepSpeed's section fp16, with its defaults.

    Attributes:
        static: the scale; 0 for one that follows overflows.
        power: the dynamic scale begins at two to this power.
        window: steps without overflow until it doubles.
        hysteresis: overflows until it halves.
        consecutive: whether a step without overflow resets the count.
        least: it halves no further.
    """

    static: float = 0.0
    power: int = 16
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    least: float = 1.0


@dataclass(frozen=True)
class Config:
    """What the engine carries out.

    Attributes:
        stage: 0 to 3.
        precision: for `onecopy.shard`.
        half: dtype that the model computes in, if it is a narrow one.
        scale: of the loss, under fp16.
        accumulate: micro-batches in a step.
        micro_batch, train_batch: samples of a rank's micro-batch, and of a step on all ranks.
        clip: most norm of gradients; 0 for no clipping.
        optimizer, scheduler: type and params, None if the program makes its own.
        shard: ranks that share slices; None for all.
        prefetch: units gathered ahead.
        print_every: steps; 0 never.
        gathers_on_save: whether a 16-bit save is allowed at stage 3.
        offload: where states rest, None on the device.
    """

    stage: int
    precision: Precision
    half: torch.dtype | None
    scale: LossScale | None
    accumulate: int
    micro_batch: int
    train_batch: int
    clip: float
    optimizer: Mapping[str, Any] | None
    scheduler: Mapping[str, Any] | None
    shard: int | None
    prefetch: int
    print_every: int
    gathers_on_save: bool
    offload: Offload | None


def read_config(config: str | Path | Mapping[str, Any], model: nn.Module | None, ranks: int) -> Config:
    """Read a config file, or what is in one.

    Args:
        ranks: over which batches are spread.

    Raises:
        SettingsError: for an unknown key (with the nearest known one), for a key whose effect onecopy does not have,
            for "auto", which Hugging Face's Trainer would have resolved, and for batch sizes that do not fit together.
    """
    values = config if isinstance(config, Mapping) else read_settings(Path(config))
    found = from_deepspeed(values, model)
    for one in found.ignored:
        _check(one.key, one.value, one.why)
    fp16, bf16 = values.get("fp16", {}), values.get("bf16", values.get("bfloat16", {}))
    if fp16.get("enabled") and bf16.get("enabled"):
        raise SettingsError("fp16 and bf16 must not both be enabled")
    micro, accumulate, train = _batches(found.micro_batch, found.accumulate, found.global_batch, ranks)
    zero = values.get("zero_optimization", {})
    half = _DTYPES.get(found.precision or "")
    return Config(
        stage=found.stage,
        precision=Precision(
            compute=half,
            reduce=_dtype("communication_data_type", values.get("communication_data_type")),
            accumulate=_dtype("data_types.grad_accum_dtype", values.get("data_types", {}).get("grad_accum_dtype")),
            master=torch.float32 if half is not None else None,
        ),
        half=half,
        scale=_scale(fp16) if fp16.get("enabled") else None,
        accumulate=accumulate,
        micro_batch=micro,
        train_batch=train,
        clip=_CLIP if found.clip_norm is None else found.clip_norm,
        optimizer=_section("optimizer", values.get("optimizer")),
        scheduler=_section("scheduler", values.get("scheduler")),
        shard=found.shard,
        prefetch=found.prefetch,
        print_every=values.get("steps_per_print") or 0,
        gathers_on_save=bool(
            zero.get("stage3_gather_16bit_weights_on_model_save")
            or zero.get("stage3_gather_fp16_weights_on_model_save")
        ),
        offload=found.offload,
    )


def _check(key: str, value: Any, why: str) -> None:
    if why == UNKNOWN:
        near = get_close_matches(key, KEYS, n=1)
        raise SettingsError(
            f"{key} is not a key of DeepSpeed's that is known" + (f"; did you mean {near[0]}?" if near else "")
        )
    if key in _NO_DIFFERENCE:
        return
    if value == AUTO:
        raise SettingsError(f'{key} is "auto", which only Hugging Face\'s Trainer resolves: give a value')
    if not key.startswith(_DONE) and not _is_off(value):
        raise SettingsError(f"{key}={value!r} cannot be honoured ({why}): take it out of the config")


def _is_off(value: Any) -> bool:
    if isinstance(value, Mapping):
        return not value.get("enabled", any(not _is_off(inner) for inner in value.values()))
    return value in (None, False, 0, "none", "")


def _batches(micro: int | None, accumulate: int | None, train: int | None, ranks: int) -> tuple[int, int, int]:
    """Micro-batch, micro-batches in a step and batch of a step: of three, what is missing follows from the others."""
    if micro is None and train is None:
        raise SettingsError("the config must give train_batch_size or train_micro_batch_size_per_gpu")
    if micro is None and train is not None:
        micro = train // (ranks * (accumulate or 1))
    assert micro is not None
    if accumulate is None:
        accumulate = max(1, train // (ranks * micro)) if train is not None and micro else 1
    whole = micro * accumulate * ranks
    if (train is not None and train != whole) or micro < 1:
        raise SettingsError(
            f"train_batch_size must be train_micro_batch_size_per_gpu × gradient_accumulation_steps × ranks; found "
            f"{train} and {micro} × {accumulate} × {ranks}"
        )
    return micro, accumulate, whole


def _dtype(key: str, name: Any) -> torch.dtype | None:
    if name is None:
        return None
    short = _DTYPES_LONG.get(name, name)
    if short not in _DTYPES:
        raise SettingsError(f"{key} must be one of {', '.join(_DTYPES)}; found {name!r}")
    return _DTYPES[short]


def _scale(fp16: Mapping[str, Any]) -> LossScale:
    given = {
        "static": fp16.get("loss_scale"),
        "power": fp16.get("initial_scale_power"),
        "window": fp16.get("loss_scale_window"),
        "hysteresis": fp16.get("hysteresis"),
        "consecutive": fp16.get("consecutive_hysteresis"),
        "least": fp16.get("min_loss_scale"),
    }
    return LossScale(**{name: value for name, value in given.items() if value is not None})


def _section(name: str, section: Any) -> Mapping[str, Any] | None:
    if section is None:
        return None
    if not isinstance(section, Mapping) or not isinstance(section.get("type"), str):
        raise SettingsError(f'{name} must hold a "type"; found {section!r}')
    if unknown := set(section) - {"type", "params", "legacy_fusion"}:
        raise SettingsError(f"{name} must hold type and params; found {', '.join(sorted(unknown))}")
    for key, value in section.get("params", {}).items():
        if value == AUTO:
            raise SettingsError(
                f'{name}.params.{key} is "auto", which only Hugging Face\'s Trainer resolves: give a value'
            )
    return {"type": section["type"], "params": dict(section.get("params", {}))}
