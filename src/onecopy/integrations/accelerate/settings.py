"""Accelerate: the FSDP settings of its YAML in onecopy's terms. Nothing of Accelerate is imported."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from onecopy.errors import SettingsError
from onecopy.integrations.translation import AUTO, Rule, Translation, apply_rules

_STRATEGIES: Final = {
    "FULL_SHARD": (3, False),
    "SHARD_GRAD_OP": (2, False),
    "NO_SHARD": (0, False),
    "HYBRID_SHARD": (3, True),
    "HYBRID_SHARD_ZERO2": (2, True),
}
"""Stage, and whether slices stay within a node, in the order of the numbers 1 to 5 that may stand for them."""


def from_accelerate(config: str | Path | Mapping[str, Any], model: Any = None) -> Translation:
    """Translate the FSDP plugin's settings.

    Args:
        config: the YAML file that ``accelerate config`` wrote, or what is in it.
        model: in which classes of ``fsdp_transformer_layer_cls_to_wrap`` are looked up as units.

    Returns:
        A `Translation`: ``onecopy.shard(model, **translation.arguments)``; ``translation.ignored`` lists every key
        that has no effect, and why.

    Raises:
        SettingsError: if the file cannot be read or has no ``fsdp_config``, or a value is none that Accelerate takes.
    """
    values = config if isinstance(config, Mapping) else _read(Path(config))
    if not isinstance(values.get("fsdp_config"), Mapping):
        raise SettingsError("the Accelerate settings must have an fsdp_config; found none")
    translation = Translation(stage=3)
    rules = {**_RULES, "fsdp_config.fsdp_transformer_layer_cls_to_wrap": partial(_units, model)}
    apply_rules(translation, values, rules)
    return translation


def _read(path: Path) -> dict[str, Any]:
    try:
        yaml: Any = import_module("yaml")
    except ModuleNotFoundError:
        raise SettingsError("reading YAML needs PyYAML; install it with: pip install 'onecopy[train]'") from None
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"cannot read Accelerate's settings from {str(path)!r}: {error}") from None
    if not isinstance(values, dict):
        raise SettingsError(f"{str(path)!r} must hold keys and values (a YAML mapping); found {type(values).__name__}")
    return values


def _strategy(found: Translation, value: Any) -> str | None:
    name = list(_STRATEGIES)[value - 1] if isinstance(value, int) and 1 <= value <= 5 else str(value)
    if name not in _STRATEGIES:
        raise SettingsError(f"fsdp_sharding_strategy must be one of {', '.join(_STRATEGIES)}; found {value!r}")
    found.stage, hybrid = _STRATEGIES[name]
    return "slices stay within a node: make a mesh with axes (replicate, shard)" if hybrid else None


def _reshard(found: Translation, value: Any) -> str | None:
    if isinstance(value, bool):
        # FSDP without resharding gathers in every micro-batch; stage 2 gathers once a step.
        found.stage = 3 if value else 2
        return None
    return _strategy(found, value)


def _units(model: Any, found: Translation, value: Any) -> str | None:
    classes = [name.strip() for name in value.split(",")] if isinstance(value, str) else list(value or [])
    if model is None:
        return f"units are found automatically; pass the model to look up {', '.join(classes)}"
    names = [name for name, module in model.named_modules() if type(module).__name__ in classes and name]
    if not names:
        raise SettingsError(f"fsdp_transformer_layer_cls_to_wrap names {value!r}, which the model does not contain")
    found.units = names
    return None


def _mixed(found: Translation, value: Any) -> str | None:
    if value in ("bf16", "fp16"):
        found.precision = value
        return None
    return None if value in ("no", None) else f"{value} is not a precision of onecopy's"


def _backward_prefetch(found: Translation, value: Any) -> str | None:
    found.prefetch = 0 if value == "NO_PREFETCH" else 1
    return (
        None
        if value == "NO_PREFETCH"
        else f"units are always prefetched in one agreed order: prefetch={found.prefetch}"
    )


def _offload(found: Translation, value: Any) -> str | None:
    if value:
        # FSDP moves all model states.
        found.rests = {"optimizer": "cpu", "parameters": "cpu"}
    return None


def _checkpointing(found: Translation, value: Any) -> str | None:
    found.checkpointing = bool(value)
    return "shard(activations=onecopy.Activations()) checkpoints every unit" if value else None


def _accumulate(found: Translation, value: Any) -> str | None:
    if value == AUTO:
        return None
    if not str(value).isdecimal() or int(value) < 1:
        raise SettingsError(f"gradient_accumulation_steps must be a whole number of at least 1; found {value!r}")
    found.accumulate = int(value)
    return None


_LAUNCHER = "of the launcher: torchrun starts the ranks"
_SAVING = "checkpoints are not FSDP's"

_RULES: Final[dict[str, Rule]] = {
    "fsdp_config.fsdp_version": "both versions mean the same here",
    "fsdp_config.fsdp_sharding_strategy": _strategy,
    "fsdp_config.fsdp_reshard_after_forward": _reshard,
    "fsdp_config.fsdp_auto_wrap_policy": "units are found automatically",
    "fsdp_config.fsdp_min_num_params": "units are found automatically",
    "fsdp_config.fsdp_backward_prefetch": _backward_prefetch,
    "fsdp_config.fsdp_backward_prefetch_policy": _backward_prefetch,
    "fsdp_config.fsdp_forward_prefetch": "units are always prefetched",
    "fsdp_config.fsdp_offload_params": _offload,
    "fsdp_config.fsdp_activation_checkpointing": _checkpointing,
    "fsdp_config.fsdp_cpu_ram_efficient_loading": "build the model on meta and use onecopy.materialize",
    "fsdp_config.fsdp_sync_module_states": "all ranks always take the first one's values",
    "fsdp_config.fsdp_use_orig_params": "parameters always keep their names, shapes and groups",
    "fsdp_config.fsdp_state_dict_type": _SAVING,
    "mixed_precision": _mixed,
    "gradient_accumulation_steps": _accumulate,
    **dict.fromkeys(
        (
            "compute_environment",
            "debug",
            "distributed_type",
            "downcast_bf16",
            "enable_cpu_affinity",
            "machine_rank",
            "main_process_ip",
            "main_process_port",
            "main_training_function",
            "num_machines",
            "num_processes",
            "rdzv_backend",
            "same_network",
            "tpu_env",
            "tpu_use_cluster",
            "tpu_use_sudo",
            "use_cpu",
            "gpu_ids",
        ),
        _LAUNCHER,
    ),
}
