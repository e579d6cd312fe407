"""ZeRO-R: the five configurations of the paper's Table 3 on one job, by its formulas and as onecopy would hold them.

==  ==============================  =========================
C1  stage 1                         checkpoints whole
C2  stage 1                         P_a, cut over M ranks
C3  stage 2                         checkpoints whole
C4  stage 2                         P_a
C5  stage 2                         P_a+cpu, on the host
==  ==============================  =========================

All with buffers of constant size (C_B) and without fragments (M_D). The paper grew a model in each until it filled 400
V100s of 32 GB (M = 16, 16 samples of 1024 tokens): Figure 6 and its appendix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from onecopy.planner.answer.estimate import Estimate, Job, Option, estimate
from onecopy.planner.formulas.activations import IN_PLACE_LOSS_BYTES, checkpoint_bytes
from onecopy.planner.formulas.memory import model_state_bytes
from onecopy.planner.machine.machine import Machine, gpu_of
from onecopy.planner.model.shape import Checkpointing, Transformer, from_sizes

CONFIGURATIONS: Final[dict[str, tuple[int, Checkpointing]]] = {
    "C1": (1, "units"),
    "C2": (1, "P_a"),
    "C3": (2, "units"),
    "C4": (2, "P_a"),
    "C5": (2, "P_a+cpu"),
}

PAPER: Final = {"C1": (50, 8192), "C2": (132, 6144), "C3": (62, 8192), "C4": (175, 8192), "C5": (187, 8192)}
"""Layers and hidden size of the largest model that the paper ran in each."""


@dataclass(frozen=True)
class Configured:
    """One configuration.

    Attributes:
        name: "C1" to "C5".
        parameters: Ψ of the model.
        states: bytes of model states on a rank by ZeRO §5, divided by M.
        checkpoints: bytes of activation checkpoints by ZeRO §6.1.
        found: what onecopy would hold and take, overheads, logits and the block that computes included.
    """

    name: str
    parameters: int
    states: float
    checkpoints: float
    found: Estimate

    def as_dict(self) -> dict[str, Any]:
        """For JSON: bytes."""
        return {
            "name": self.name,
            "parameters": self.parameters,
            "states": self.states,
            "checkpoints": self.checkpoints,
            "peak": self.found.peak,
            "limit": self.found.limit,
            "fits": self.found.fits,
        }


def configure(name: str, job: Job, sizes: Transformer, machine: Machine, micro_batch: int, tensor: int) -> Configured:
    """The configuration ``name`` of a job with one micro-batch a step.

    Args:
        sizes: of the job's shape.
        tensor: M.
    """
    stage, checkpointing = CONFIGURATIONS[name]
    shard = machine.gpus // tensor
    widths = job.widths
    states = model_state_bytes(
        stage,
        job.shape.parameters,
        shard,
        model_parallel=tensor,
        parameter_bytes=widths.compute,
        gradient_bytes=widths.reduce,
        optimizer_bytes=3 * widths.master,
    )
    kept = checkpoint_bytes(
        micro_batch,
        job.sequence,
        sizes.hidden,
        sizes.layers,
        model_parallel=tensor,
        partitioned=checkpointing.startswith("P_a"),
        on_cpu=checkpointing == "P_a+cpu",
        element_bytes=widths.compute,
    )
    found = estimate(job, machine, Option(stage, micro_batch, 1, checkpointing, "none", shard, tensor=tensor))
    return Configured(name, job.shape.parameters, states.total, kept, found)


def paper() -> list[Configured]:
    """Each configuration with the largest model that the paper ran in it, on the paper's machine."""
    machine = Machine(400, gpu_of("v100"), nodes=25)
    found = []
    for name, (layers, hidden) in PAPER.items():
        shape = from_sizes(layers, hidden, vocabulary=50_257)
        assert shape.transformer is not None
        job = Job(shape, 1024, "fp16", "fused", IN_PLACE_LOSS_BYTES)
        found.append(configure(name, job, shape.transformer, machine, 16, 16))
    return found
