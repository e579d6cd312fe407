"""Translation: what another library's settings are in onecopy, and what became of every one of their keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from onecopy.errors import SettingsError
from onecopy.memory.store.offload import HOST, Offload
from onecopy.stage import Stage

AUTO = "auto"

UNKNOWN = "not a key that onecopy knows"
"""Why a key has no effect that no rule names."""


@dataclass(frozen=True)
class Ignored:
    """A key that has no effect in onecopy.

    Attributes:
        key: with dots between levels.
        value: as it was written.
        why: what stands in its place, or that nothing does.
    """

    key: str
    value: Any
    why: str


@dataclass
class Translation:
    """Settings of another library in onecopy's terms.

    Attributes:
        stage: 0 to 3.
        precision: for `onecopy.shard`.
        accumulate: micro-batches in a step; None where the file leaves it to the training script.
        micro_batch, global_batch: samples; None likewise.
        prefetch: units gathered ahead.
        units: names of modules, or "auto".
        shard: ranks that share slices when not all do; None for all.
        checkpointing: whether activations are to be checkpointed.
        rests: where optimizer states ("optimizer") and parameters ("parameters") are to rest: "cpu" or a directory.
        clip_norm: for `torch.nn.utils.clip_grad_norm_` in the loop.
        optimizer: name and arguments of the optimizer, if the file makes one.
        resolved: values that were "auto", and what they became.
        ignored: every key without effect.
    """

    stage: int = 0
    precision: str | None = None
    accumulate: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    prefetch: int = 1
    units: str | list[str] = "auto"
    shard: int | None = None
    checkpointing: bool = False
    rests: dict[str, str] = field(default_factory=dict)
    clip_norm: float | None = None
    optimizer: dict[str, Any] | None = None
    resolved: dict[str, Any] = field(default_factory=dict)
    ignored: list[Ignored] = field(default_factory=list)

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `onecopy.shard`; a mesh for ``shard`` is the caller's to make."""
        found: dict[str, Any] = {
            "stage": self.stage,
            "precision": self.precision,
            "accumulate": self.accumulate or 1,
            "prefetch": self.prefetch,
            "units": self.units,
        }
        return found | ({"offload": self.offload} if self.offload is not None else {})

    @property
    def offload(self) -> Offload | None:
        """Where states rest, for `onecopy.shard`. Masters, which are larger, go at least as far as parameters do.

        Parameters stay on the device below stage 3, and everything does at stage 0.
        """
        stage = Stage.of(self.stage)
        optimizer = self.rests.get("optimizer")
        parameters = self.rests.get("parameters") if stage.shards_parameters else None
        if parameters is not None and optimizer in (None, HOST):
            optimizer = parameters
        return None if optimizer is None or not stage.shards_optimizer else Offload(optimizer, parameters)

    def text(self) -> str:
        """Everything, one line each."""
        lines = [f"{name} = {value!r}" for name, value in self.arguments.items()]
        extra = {
            "micro_batch": self.micro_batch,
            "global_batch": self.global_batch,
            "shard": self.shard,
            "checkpointing": self.checkpointing or None,
            "clip_norm": self.clip_norm,
            "optimizer": self.optimizer,
        }
        lines += [f"{name}: {value!r}" for name, value in extra.items() if value is not None]
        lines += [f"auto: {name} = {value!r}" for name, value in self.resolved.items()]
        lines += [f"ignored: {found.key} = {found.value!r}: {found.why}" for found in self.ignored]
        return "\n".join(lines)


Rule = str | Callable[[Translation, Any], str | None]
"""What happens to a key: why it is ignored, or a function that uses the value and may say why it did not."""


def apply_rules(
    translation: Translation, values: Mapping[str, Any], rules: Mapping[str, Rule], prefix: str = ""
) -> None:
    """Run every leaf of ``values`` through its rule; those without one are listed as unknown.

    Raises:
        SettingsError: if there is a value where a section belongs.
    """
    for name, value in values.items():
        key = f"{prefix}{name}"
        rule = rules.get(key)
        if rule is None and not isinstance(value, Mapping) and any(known.startswith(f"{key}.") for known in rules):
            raise SettingsError(f"{key} must hold keys and values; found {value!r}")
        if rule is None and isinstance(value, Mapping):
            apply_rules(translation, value, rules, f"{key}.")
            continue
        why = rule(translation, value) if callable(rule) else rule or UNKNOWN
        if why is not None:
            translation.ignored.append(Ignored(key, value, why))
