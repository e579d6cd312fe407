"""Workload: what is tuned: a user's own model and loop, or a config of `onecopy train`. It travels to probes by pickle.

A workload is asked for a model and a batch, and how it is sharded, stepped and priced. Everything that a rank does in a
probe it does through these few methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

import onecopy
from onecopy.errors import SettingsError
from onecopy.planner.engine.simulate import Batch, call, loss_of
from onecopy.planner.model.shape import Transformer
from onecopy.recipes.sharded import units_of
from onecopy.recipes.world import World
from onecopy.stage import Stage
from onecopy.tuner.candidate import Candidate

MakeModel = Callable[[], nn.Module]
MakeBatch = Callable[[int], Batch]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[[nn.Module, Batch], Tensor]


class Workload(ABC):
    """What is tuned.

    Attributes:
        name: for people.
        precision: as `onecopy.shard` takes it; None keeps every parameter's own dtype.
        implementation: of AdamW, for the planner.
    """

    name: str
    precision: str | None
    implementation: str

    @abstractmethod
    def build(self) -> nn.Module:
        """The model, on torch's default device."""

    @abstractmethod
    def batch(self, samples: int) -> Batch:
        """One micro-batch of so many samples: the model's keyword or positional arguments."""

    @abstractmethod
    def shard(self, model: nn.Module, candidate: Candidate, world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model spread over the ranks, and its optimizer."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """What is trained for."""
        return loss_of(call(model, batch))

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The end of a step."""
        optimizer.step()
        optimizer.zero_grad()

    def warm(self) -> None:  # noqa: B027  (most have nothing to import)
        """Import what every probe needs. It must not compute, for probes are forks of the process that calls it."""

    @property
    def transformer(self) -> Transformer | None:
        """Sizes for the planner where blocks can be cut over tensor ranks; None for other models."""
        return None

    def identity(self) -> dict[str, Any]:
        """What a journal is recognised by."""
        return {"name": self.name, "precision": self.precision}


@dataclass(frozen=True)
class OwnLoop(Workload):
    """A user's model and loop.

    Attributes:
        model: makes the model; a function at the top of a module, as for `torch.multiprocessing`.
        batches: makes a micro-batch of a number of samples, likewise.
        optimizer: makes the optimizer of the parameters; None for AdamW, fused.
        objective: of a model and a batch; None takes the output's ``loss``, or the output.
        states: the directory for states on a disk.
    """

    model: MakeModel
    batches: MakeBatch
    optimizer: MakeOptimizer | None = None
    objective: Loss | None = None
    precision: str | None = None
    states: str = ""
    implementation: str = "fused"

    @property
    def name(self) -> str:  # type: ignore[override]
        return _name(self.model)

    def build(self) -> nn.Module:
        built = self.model()
        if not isinstance(built, nn.Module):
            raise SettingsError(f"{self.name} must make an nn.Module; found {type(built).__name__}")
        return built

    def batch(self, samples: int) -> Batch:
        made = self.batches(samples)
        if not isinstance(made, dict | tuple):
            raise SettingsError(
                f"batches({samples}) must return a dict of the model's keyword arguments or a tuple of its positional "
                f"ones; found {type(made).__name__}"
            )
        sizes = [leaf.shape[0] for leaf in tree_leaves(made) if isinstance(leaf, Tensor) and leaf.dim()]
        if samples not in sizes:
            raise SettingsError(
                f"batches({samples}) must make {samples} samples, the first dimension of its tensors; found "
                f"{', '.join(map(str, sizes)) or 'no tensors'}"
            )
        return made

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().loss(model, batch) if self.objective is None else self.objective(model, batch)

    def shard(self, model: nn.Module, candidate: Candidate, world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = model.to(world.device)
        mesh = None
        if candidate.replicate > 1 and Stage.of(candidate.stage).shards_optimizer:
            mesh = init_device_mesh(
                world.device.type, (candidate.replicate, candidate.shard), mesh_dim_names=("replicate", "shard")
            )
        onecopy.shard(
            model,
            candidate.stage,
            mesh=mesh,
            units=units_of(candidate.units),
            precision=self.precision,
            accumulate=candidate.accumulate,
            prefetch=candidate.prefetch,
            bucket_bytes=candidate.bucket_bytes or None,
            activations=activations_of(candidate),
            offload=offload_of(candidate, self.states),
        )
        if self.optimizer is None:
            return model, torch.optim.AdamW(model.parameters(), fused=True)
        return model, self.optimizer(model.parameters())

    def identity(self) -> dict[str, Any]:
        functions = (self.batches, self.optimizer, self.objective)
        return super().identity() | {"functions": [None if one is None else _name(one) for one in functions]}


def _name(function: Callable[..., Any]) -> str:
    """The function's module and name, and what a partial one has been given."""
    if isinstance(function, partial):
        given = [repr(value) for value in function.args] + [f"{k}={value!r}" for k, value in function.keywords.items()]
        return f"{_name(function.func)}({', '.join(given)})"
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"


def activations_of(candidate: Candidate) -> onecopy.Activations | None:
    """What `onecopy.shard` takes as ``activations``."""
    if candidate.checkpointing == "off":
        return None
    return onecopy.Activations(
        "selective" if candidate.checkpointing == "selective" else "units",
        partition=candidate.checkpointing.startswith("P_a"),
        offload="cpu" if candidate.checkpointing.endswith("+cpu") else None,
    )


def offload_of(candidate: Candidate, states: str) -> onecopy.Offload | None:
    """What `onecopy.shard` takes as ``offload``; ``states`` is the directory on a disk."""
    if candidate.offload == "none":
        return None
    place = "cpu" if candidate.offload.endswith("cpu") else states
    if candidate.offload.startswith("parameters"):
        return onecopy.Offload(place, place, candidate.prefetch)
    return onecopy.Offload(place)


def ranks_agree(flag: bool, device: torch.device) -> bool:
    """The first rank's answer, on all."""
    if not dist.is_initialized():
        return flag
    answer = torch.tensor(float(flag), device=device)
    dist.broadcast(answer, 0)
    return bool(answer.item())
