"""A plain loop that survives the loss of ranks: two are killed on the way, and come back from their peers' memory.

    python -m onecopy.cli.main run --ranks 4 --spares 1 examples/survive_losses.py

(`onecopy run ...` is the same.) Under `torchrun --nproc-per-node 4` the script trains too; a lost rank then ends all of
them, and the next start goes on from the newest checkpoint, where `checkpoints=` names a directory.
"""

import os
import signal
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy

STEPS = 60


def make_model(width: int = 64) -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(4))
    return nn.Sequential(nn.Linear(8, width), *blocks, nn.Linear(width, 1))


def batches_from(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's batches of the steps from ``step`` on."""
    for number in range(step, STEPS):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1000 * number + dist.get_rank()))
        yield x, x.sin().sum(1, keepdim=True)


def be_killed(step: int) -> None:
    """What a failing machine would do: end ranks 2 and 0, once each."""
    first = os.environ.get("ONECOPY_RUN_STORE", "").split()[3:4] in (["process-0"], ["process-2"])
    if first and (dist.get_rank(), step) in ((2, 20), (0, 40)):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    onecopy.join()
    torch.manual_seed(0)
    model = onecopy.shard(make_model(), stage=3, mirror=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    seen: dict[str, list[float]] = {"losses": []}
    run = onecopy.resilient(model, optimizer, scheduler=scheduler, seen=seen)
    for x, y in run.loop(batches_from):
        with run:
            be_killed(run.steps)
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            run.step(loss.item())
            scheduler.step()
            seen["losses"].append(run.total[0] / dist.get_world_size())
    if dist.get_rank() == 0:
        print(f"loss: {seen['losses'][0]:.3f} -> {seen['losses'][-1]:.3f} after {run.steps} steps")


if __name__ == "__main__":
    main()
