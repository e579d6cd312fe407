"""Optimizers and schedules that a DeepSpeed config names, as DeepSpeed makes them (its defaults read in 0.19.8).

A schedule's formula is its documentation's: warming up over w steps, by log(i + 1) / log(w) or by i / w, then constant,
linear or by a cosine. Before the first step the rate is the lowest one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final

import torch
from torch.optim import Optimizer

from onecopy.errors import SettingsError

_ADAM: Final = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
"""Of DeepSpeed's own Adam, in either mode; torch's AdamW decays by 0.01 where nobody says otherwise."""


def make_optimizer(section: Mapping[str, Any], parameters: Iterable[Any]) -> Optimizer:
    """The optimizer of a config's section "optimizer".

    Args:
        parameters: of the model, or groups of them.

    Raises:
        SettingsError: for a type or an argument that is not known.
    """
    kind, params = section["type"], dict(section["params"])
    if "max_grad_norm" in params:
        raise SettingsError("optimizer.params must not hold max_grad_norm: set gradient_clipping instead")
    if kind.lower() in ("adam", "adamw"):
        decoupled = kind.lower() == "adamw" or params.pop("adam_w_mode", True)
        params.pop("adam_w_mode", None)
        if not params.pop("bias_correction", True):
            raise SettingsError(
                "optimizer.params.bias_correction=False cannot be honoured, because torch's Adam always corrects "
                "the bias: take it out"
            )
        defaults = {} if params.pop("torch_adam", False) else _ADAM
        return _make(torch.optim.AdamW if decoupled else torch.optim.Adam, parameters, {**defaults, **params})
    known = {name.lower(): value for name, value in vars(torch.optim).items() if inspect.isclass(value)}
    if (made := known.get(kind.lower())) is None or not issubclass(made, Optimizer):
        near = get_close_matches(kind.lower(), ["adam", "adamw", *known], n=1)
        raise SettingsError(
            f"optimizer.type {kind!r} is none that onecopy makes"
            + (f"; did you mean {near[0]!r}" if near else "")
            + ". Others go to initialize(optimizer=), if they work element by element."
        )
    return _make(made, parameters, params)


def _make(kind: type[Optimizer], parameters: Iterable[Any], params: Mapping[str, Any]) -> Optimizer:
    known = [name for name in inspect.signature(kind).parameters if name not in ("params", "self")]
    for name in params:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise SettingsError(
                f"optimizer.params.{name} is no argument of {kind.__name__}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in params.items()}
    return kind(parameters, **given)


class Schedule:
    """The learning rate of each of an optimizer's groups as a function of steps made.

    Args:
        rates: from steps made since the first one, and the group's number, to the rate.
        first: rates before the first step.
    """

    def __init__(self, optimizer: Optimizer, rates: Callable[[int, int], float], first: list[float]) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = -1
        self._rates = rates
        self._set(first)

    def step(self) -> None:
        """The optimizer has stepped."""
        self.last_batch_iteration += 1
        self._set([self._rates(self.last_batch_iteration, place) for place in range(len(self.optimizer.param_groups))])

    def _set(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def get_last_lr(self) -> list[float]:
        """The rates now."""
        return [group["lr"] for group in self.optimizer.param_groups]

    get_lr = get_last_lr

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]


def make_schedule(section: Mapping[str, Any], optimizer: Optimizer) -> Any:
    """The schedule of a config's section "scheduler".

    Raises:
        SettingsError: for a type or an argument that is not known.
    """
    kind, params = section["type"], section["params"]
    makers: dict[str, Callable[..., Any]] = {
        "WarmupLR": _warmup,
        "WarmupDecayLR": _warmup_decay,
        "WarmupCosineLR": _warmup_cosine,
    }
    maker = makers.get(kind) or getattr(torch.optim.lr_scheduler, kind, None)
    if maker is None:
        near = get_close_matches(kind, makers, n=1)
        raise SettingsError(
            f"scheduler.type {kind!r} is none that onecopy makes"
            + (f"; did you mean {near[0]!r}?" if near else f" ({', '.join(makers)}, and torch's by their names)")
            + ". Others go to initialize(lr_scheduler=)."
        )
    known = [name for name in inspect.signature(maker).parameters if name not in ("optimizer", "self")]
    for name in params:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise SettingsError(
                f"scheduler.params.{name} is no argument of {kind}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
    return maker(optimizer, **params)


def _ramp(step: int, steps: int, kind: str) -> float:
    return math.log(step + 1) / math.log(steps) if kind == "log" else step / steps


def _each(optimizer: Optimizer, value: float | list[float]) -> list[float]:
    count = len(optimizer.param_groups)
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise SettingsError(
            f"the schedule must give one rate, or one for each of the optimizer's {count} groups; found {len(value)} "
            "rates"
        )
    return list(value)


def _check_ramp(steps: int, kind: str) -> int:
    if not isinstance(steps, int) or steps < 1:
        raise SettingsError(f"warmup_num_steps must be a whole number of at least 1; found {steps!r}")
    if kind not in ("log", "linear"):
        raise SettingsError(f"warmup_type must be 'log' or 'linear'; found {kind!r}")
    return max(2, steps)


def _warmup(
    optimizer: Optimizer,
    warmup_min_lr: float | list[float] = 0.0,
    warmup_max_lr: float | list[float] | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    *,
    after: Callable[[int, int], float] = lambda step, steps: 1.0,
) -> Schedule:
    steps = _check_ramp(warmup_num_steps, warmup_type)
    low = _each(optimizer, warmup_min_lr)
    high = _each(optimizer, optimizer.param_groups[0]["lr"] if warmup_max_lr is None else warmup_max_lr)

    def rate(step: int, place: int) -> float:
        share = _ramp(step, steps, warmup_type) if step < steps else after(step, steps)
        return low[place] + (high[place] - low[place]) * share

    return Schedule(optimizer, rate, low)


def _warmup_decay(
    optimizer: Optimizer,
    total_num_steps: int,
    warmup_min_lr: float | list[float] = 0.0,
    warmup_max_lr: float | list[float] = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Schedule:
    def after(step: int, steps: int) -> float:
        return max(0.0, (total_num_steps - step) / max(1.0, total_num_steps - steps))

    return _warmup(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, after=after)


def _warmup_cosine(
    optimizer: Optimizer,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> Schedule:
    steps = _check_ramp(warmup_num_steps, warmup_type)
    own: list[float] = [group["lr"] for group in optimizer.param_groups]

    def rate(step: int, place: int) -> float:
        if step < steps:
            return own[place] * (warmup_min_ratio + (1 - warmup_min_ratio) * _ramp(step, steps, warmup_type))
        progress = min(1.0, (step - steps + 1) / max(1, total_num_steps - steps))
        return own[place] * max(0.0, cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)

    return Schedule(optimizer, rate, [0.0] * len(own))
