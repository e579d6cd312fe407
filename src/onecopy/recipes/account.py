"""Account: what a run has done so far: losses, tokens, seconds, memory, and bytes beside the paper's formula."""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, Final

import torch
from torch import nn

import onecopy
from onecopy.observe.categories import MEANINGS
from onecopy.observe.ledger import STATE_OPERATIONS
from onecopy.planner.formulas.traffic import step_elements
from onecopy.recipes.config import Config
from onecopy.recipes.metrics import Record
from onecopy.recipes.world import World

_ELEMENT_BYTES: Final = {"fp32": 4, "bf16": 2, "bf16-lean": 2}

STEP_VALUES: Final = {
    "loss": "The mean over the whole batch.",
    "learning_rate": "The one that this step used.",
    "gradient_norm": "The global norm of the gradients before clipping.",
    "seconds": "The step's time on the first rank, without evaluations and saves.",
    "tokens_per_second": "Tokens of the whole batch, over `seconds`.",
    "bytes_sent": "Model states that the first rank sent since the step before.",
    **{f"sent/{op}": f"The part of `bytes_sent` that left by {op}." for op in STATE_OPERATIONS},
    "activations_sent": "Activation checkpoints that the first rank sent over the tensor axis.",
    "exposed_seconds": "Time that computing stood still for a collective.",
    "peak_memory": "The most that was in use so far: of the device, or on the CPU the process's resident set.",
    **{f"memory/{name}": f"At the step's highest moment: {meaning}." for name, meaning in MEANINGS.items()},
    "off_device/checkpoints": "The most that activation checkpoints had in host memory or in files.",
}
"""What `metrics.jsonl` holds of a step, by name, and what each value means."""


_KEPT: Final = (
    "_resumed_at",
    "_first_loss",
    "_last_loss",
    "_steps",
    "_first_seconds",
    "_later_seconds",
    "_validation_loss",
)
"""What `Account` knows of the run, and not of this rank's memory and traffic."""


@dataclass(frozen=True)
class Sent:
    """Bytes of model states that a rank sends in one step by one operation.

    Attributes:
        measured: by the ledger, the mean over steps; those after an evaluation, whose gathers came on top, left out.
        formula: by ZeRO §7.
        elements: the same formula as a multiple of Ψ.
    """

    measured: float
    formula: float
    elements: float


@dataclass(frozen=True)
class Summary:
    """A run in numbers.

    Attributes:
        steps: optimizer steps taken, those before a resume included.
        resumed_at: the step after which this run went on from a checkpoint; 0 if it began at the start. What follows is
            of the steps after it.
        checkpoint: the last one that was saved, None without one.
        interrupted: whether a signal ended it early.
        first_loss: of the first step, the mean over the whole batch.
        last_loss: of the last step, likewise.
        validation_loss: of the last evaluation, None without one.
        tokens_per_second: of all ranks, evaluations and the first step left out.
        peak_memory: bytes, rank by rank: of the device, or the resident set of the process on CPU.
        stage: 0 to 3.
        parameters: elements of the model's parameters.
        padded_parameters: Ψ, what one gather moves: parameters and the padding between them.
        element_bytes: bytes of an element on the wire.
        shard: ranks that share one copy of the model states, N.
        replicate: copies of the model states.
        micro_batches: in a step, g.
        bytes_sent_per_step: bytes of model states that a rank sends, by operation.
        planned: what the planner expected, see `plan.py`; None if it was not asked.
        highest_memory: by category, the most bytes that a step's highest moment had.
        highest_off_device: by category, the most bytes in host memory or files.
        activations_sent_per_step: bytes of activation checkpoints that a rank sent over the tensor axis.
    """

    steps: int
    resumed_at: int
    checkpoint: str | None
    interrupted: bool
    first_loss: float
    last_loss: float
    validation_loss: float | None
    tokens_per_second: float
    peak_memory: list[int]
    stage: int
    parameters: int
    padded_parameters: int
    element_bytes: int
    shard: int
    replicate: int
    micro_batches: int
    bytes_sent_per_step: dict[str, Sent]
    planned: dict[str, Any] | None = None
    highest_memory: dict[str, float] = field(default_factory=dict)
    highest_off_device: dict[str, float] = field(default_factory=dict)
    activations_sent_per_step: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Account:
    """Counts along with the training loop.

    Args:
        config: one whose ranks are known.
        model: the sharded model.
        resumed_at: steps that were taken before.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        model: nn.Module,
        resumed_at: int = 0,
        planned: dict[str, Any] | None = None,
    ) -> None:
        self._resumed_at = resumed_at
        self._planned = planned
        self._highest: dict[str, float] = {}
        self._highest_off_device: dict[str, float] = {}
        self._config = config
        self._world = world
        self._ledger = onecopy.ledger(model)
        self._meter = onecopy.meter(model)
        self._parameters = sum(parameter.numel() for parameter in model.parameters())
        self._padded = onecopy.padded_numel(model)
        self._tokens = config.data.batch * config.data.sequence_length
        self._first_loss = self._last_loss = 0.0
        self._steps = 0
        self._first_seconds = self._later_seconds = 0.0
        self._validation_loss: float | None = None
        self._sent: Counter[str] = Counter()
        self._steps_counted = 0
        self._evaluated = False
        self._mark = perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """What a rank that takes this one's place goes on with."""
        return {name: getattr(self, name) for name in _KEPT}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, here or on another rank."""
        for name, value in state.items():
            setattr(self, name, value)

    def step_done(
        self, step: int, loss: float, learning_rate: float, gradient_norm: float, *, skipped: bool = False
    ) -> Record:
        """Note a step that has just ended. One that the optimizer skipped leaves its traffic to the next one's."""
        traffic = self._ledger.current if skipped else self._ledger.last_step
        assert traffic is not None
        seconds = perf_counter() - self._mark
        self._last_loss = loss
        self._steps += 1
        if self._steps == 1:
            self._first_loss, self._first_seconds = loss, seconds
        else:
            self._later_seconds += seconds
        if not self._evaluated and not skipped:
            self._steps_counted += 1
            for entry in traffic.entries:
                if entry.phase != "setup":
                    self._sent[entry.op] += entry.bytes_sent
        self._evaluated = skipped
        self._mark = perf_counter()
        peak = self._meter.peak
        values = {
            "loss": loss,
            "learning_rate": learning_rate,
            "gradient_norm": gradient_norm,
            "seconds": seconds,
            "tokens_per_second": self._tokens / seconds,
            "bytes_sent": float(traffic.state_bytes),
            **{f"sent/{op}": float(traffic.bytes_sent(op)) for op in STATE_OPERATIONS},
            "activations_sent": float(traffic.bytes_sent("activations")),
            "exposed_seconds": sum(entry.exposed for entry in traffic.entries),
            "peak_memory": float(peak_memory(self._world.device)),
            **{f"memory/{category}": float(nbytes) for category, nbytes in peak.items()},
            "off_device/checkpoints": float(self._meter.off_device_peak.get("checkpoints", 0)),
        }
        _raise(self._highest, peak)
        _raise(self._highest_off_device, {"checkpoints": 0} | self._meter.off_device_peak)
        self._meter.reset_peaks()
        return Record("train", step, values)

    def evaluated(self, step: int, loss: float) -> Record:
        """Note an evaluation that has just ended."""
        self._validation_loss = loss
        self._evaluated = True
        self._mark = perf_counter()
        return Record("evaluation", step, {"loss": loss})

    def skip_time(self) -> None:
        """Leave the time since the last step out: something else was done."""
        self._mark = perf_counter()

    def summary(self, *, interrupted: bool, checkpoint: str | None) -> Summary:
        """The run in numbers. Every rank must ask."""
        parallel = self._config.parallel
        timed = (self._steps - 1, self._later_seconds) if self._steps > 1 else (1, self._first_seconds)
        return Summary(
            steps=self._resumed_at + self._steps,
            resumed_at=self._resumed_at,
            checkpoint=checkpoint,
            interrupted=interrupted,
            first_loss=self._first_loss,
            last_loss=self._last_loss,
            validation_loss=self._validation_loss,
            tokens_per_second=self._tokens * timed[0] / timed[1],
            peak_memory=self._world.gather(peak_memory(self._world.device)),
            stage=parallel.stage,
            parameters=self._parameters,
            padded_parameters=self._padded,
            element_bytes=_ELEMENT_BYTES[parallel.precision],
            shard=self._world.size // parallel.tensor // parallel.replicate,
            replicate=parallel.replicate,
            micro_batches=parallel.accumulate,
            bytes_sent_per_step=self._bytes_sent(),
            planned=self._planned,
            highest_memory=self._highest,
            highest_off_device=self._highest_off_device,
            activations_sent_per_step=self._sent["activations"] / max(1, self._steps_counted),
        )

    def _bytes_sent(self) -> dict[str, Sent]:
        parallel = self._config.parallel
        elements = step_elements(
            parallel.stage,
            self._padded,
            self._world.size // parallel.tensor // parallel.replicate,
            parallel.accumulate,
            parallel.replicate,
        )
        width = _ELEMENT_BYTES[parallel.precision]
        rows = {
            op: Sent(self._sent[op] / max(1, self._steps_counted), count * width, count / self._padded)
            for op, count in elements._asdict().items()
        }
        rows["total"] = Sent(
            sum(row.measured for row in rows.values()), elements.total * width, elements.total / self._padded
        )
        return rows


def _raise(highest: dict[str, float], seen: Mapping[str, int]) -> None:
    """Take over what is more than the most so far."""
    for category, nbytes in seen.items():
        highest[category] = max(highest.get(category, 0.0), float(nbytes))


def peak_memory(device: torch.device) -> int:
    """The most bytes in use so far: of the device, or of the whole process on CPU."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
