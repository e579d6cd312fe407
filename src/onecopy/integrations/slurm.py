"""Slurm: what `srun` tells the tasks of a step, as the variables that torchrun would set.

    slurm.set_environment()
    torch.distributed.init_process_group()

The variables are those of srun's manual, "Output environment variables". A batch script has some of them as well, and
is no step: it has to call srun.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from onecopy.errors import SettingsError

_NEEDED = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")
_FIRST_PORT, _PORTS = 15_000, 15_000
"""Below those that systems give to outgoing connections."""


def in_step(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether srun has started this process as one of several, and nobody has said yet who is who."""
    return "RANK" not in environment and int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1


def set_environment() -> None:
    """Set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT from what srun has set.

    The first host of the step is the address, and the port follows from the job's and the step's numbers, so that jobs
    on one host do not meet. What is set already stays.

    Raises:
        SettingsError: if srun has not started this process.
    """
    for name, value in variables(os.environ).items():
        os.environ.setdefault(name, value)


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables for the task that has this ``environment``.

    Raises:
        SettingsError: if it is not that of a task which srun has started.
    """
    if missing := [name for name in _NEEDED if name not in environment]:
        raise SettingsError(
            f"srun has not started this process: {missing[0]} is not set. Start it with srun, one task for each GPU, "
            f"also inside a batch script: srun --ntasks-per-node=8 python script.py"
        )
    job, step = (int(environment.get(name, 0)) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "localhost")
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_WORLD_SIZE": str(_tasks(environment["SLURM_STEP_TASKS_PER_NODE"])[int(environment["SLURM_NODEID"])]),
        "MASTER_ADDR": first_host(nodes),
        "MASTER_PORT": str(_FIRST_PORT + (job * 31 + step) % _PORTS),
    }


def first_host(nodes: str) -> str:
    """The first host of a list as Slurm writes it: node[07-12,20],gpu3 is node07."""
    without_lists = re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes)
    return without_lists.split(",")[0]


def _tasks(per_node: str) -> list[int]:
    """Tasks of each node, from a list like 4(x2),3."""
    found: list[int] = []
    for part in per_node.split(","):
        count, _, times = part.partition("(x")
        found += [int(count)] * int(times.rstrip(")") or 1)
    return found
