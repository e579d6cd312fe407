"""A program written for PyTorch's FSDP2, trained over onecopy: one import differs.

    torchrun --nproc-per-node 2 examples/fsdp2_script.py

What differs from the original:

    - from torch.distributed.fsdp import fully_shard
    + from onecopy.compat.fsdp2 import fully_shard
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from onecopy.compat.fsdp2 import fully_shard


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(self.norm(x))


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.entry = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)


dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = Net()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

accumulate, losses = 2, []
generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(60):
    for micro_batch in range(accumulate):
        model.set_requires_gradient_sync(micro_batch == accumulate - 1)
        x = torch.randn(32, 8, generator=generator)
        loss = nn.functional.mse_loss(model(x), x.sum(-1).sin())
        (loss / accumulate).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if dist.get_rank() == 0:
    print(f"{len(weights)} whole tensors to save")
    print(f"loss: {losses[0]:.3f} -> {sum(losses[-5:]) / 5:.3f}")
dist.destroy_process_group()
