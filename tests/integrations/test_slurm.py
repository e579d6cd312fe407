"""Programs under srun, without Slurm: its variables are set as its manual has them. Oracle: one process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from onecopy.errors import SettingsError
from onecopy.integrations import slurm
from programs import interpreter

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "node[07-08,11],gpu3",
    "SLURM_STEP_NUM_TASKS": "14",
    "SLURM_STEP_TASKS_PER_NODE": "4(x3),2",
    "SLURM_PROCID": "12",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
}
"""What srun's manual says that the first task on the fourth node is told."""


def test_sruns_variables_become_torchruns() -> None:
    found = slurm.variables(TASK)
    port = found.pop("MASTER_PORT")
    assert found == {
        "RANK": "12",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "14",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node07",
    }
    assert 1024 < int(port) < 32768
    assert slurm.variables(TASK | {"SLURM_JOB_ID": "4712"})["MASTER_PORT"] != port


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("node3", "node3"),
        ("a1,b2", "a1"),
        ("n[001-128]", "n001"),
        ("rack[2-3]n[05,09],x", "rack2n05"),
        ("c[7].l", "c7.l"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert slurm.first_host(nodes) == first


def test_a_batch_script_without_srun_is_told_so() -> None:
    """It has SLURM_PROCID and SLURM_NTASKS, and is no step."""
    batch = {
        "SLURM_JOB_ID": "4711",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "8",
    }
    assert not slurm.in_step(batch)
    with pytest.raises(SettingsError, match="Start it with srun"):
        slurm.variables(batch)


PROGRAM = """
import torch, torch.distributed as dist, onecopy
from onecopy.integrations import slurm

slurm.set_environment()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = onecopy.shard(torch.nn.Linear(6, 2), 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.arange(12.0).view(2, 6)[dist.get_rank()]
for _ in range(3):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
with onecopy.gathered(model):
    print(model.weight.flatten().tolist())
dist.destroy_process_group()
"""


def _step(rank: int) -> dict[str, str]:
    return TASK | {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def test_tasks_of_a_step_train_together(tmp_path: Path) -> None:
    """A script's three lines. Oracle: plain PyTorch on the whole batch."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.arange(12.0).view(2, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    (tmp_path / "script.py").write_text(PROGRAM)
    with interpreter() as programs:
        codes, outputs, errors = programs.run(
            [str(tmp_path / "script.py")], [_step(rank) for rank in range(2)], tmp_path
        )
    assert codes == [0, 0], errors
    for output in outputs:
        assert json.loads(output) == pytest.approx(model.weight.flatten().tolist(), rel=1e-5)


def test_onecopy_train_is_a_rank_for_each_task(tmp_path: Path) -> None:
    """Oracle: what each rank's config says of the ranks."""
    (tmp_path / "text.txt").write_text("Some words to learn. " * 600)
    (tmp_path / "script.py").write_text("import sys\nfrom onecopy.cli.main import main\nmain()\n")
    own = ["--train", str(tmp_path / "text.txt"), "--directory", str(tmp_path / "run"), "--device=cpu", "--steps=2"]
    small = ["--layers=1", "--hidden=16", "--heads=2", "--sequence-length=16", "--batch=4", "--tokenizer=bytes"]
    with interpreter() as programs:
        codes, outputs, errors = programs.run(
            [str(tmp_path / "script.py"), "train", *own, *small, "--evaluate-every=0"],
            [_step(rank) for rank in range(2)],
            tmp_path,
        )
    assert codes == [0, 0], errors
    assert "ranks = 2" in (tmp_path / "run" / "config.toml").read_text()
    assert outputs[0]
