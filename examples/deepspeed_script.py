"""A program written for DeepSpeed, trained over onecopy: one import differs.

    torchrun --nproc-per-node 2 examples/deepspeed_script.py

What differs from the original:

    - import deepspeed
    + from onecopy.compat import deepspeed
"""

import tempfile

import torch
from torch import nn

from onecopy.compat import deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 32,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 5, "warmup_max_lr": 3e-3, "total_num_steps": 80},
    },
    "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
}


def make_model(width: int = 64) -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(4))
    return nn.Sequential(nn.Linear(8, width), *blocks, nn.Linear(width, 1))


torch.manual_seed(0)
with deepspeed.zero.Init():
    model = make_model()
deepspeed.init_distributed()
engine, optimizer, _, scheduler = deepspeed.initialize(model=model, config=CONFIG)

generator = torch.Generator().manual_seed(engine.global_rank)
losses = []
while engine.global_steps < 60:
    x = torch.randn(engine.train_micro_batch_size_per_gpu(), 8, generator=generator)
    loss = nn.functional.mse_loss(engine(x).squeeze(-1), x.sum(-1).sin())
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())

with tempfile.TemporaryDirectory() as own:
    folder = [own]
    torch.distributed.broadcast_object_list(folder)
    engine.save_checkpoint(folder[0], client_state={"losses": losses})
    path, client = engine.load_checkpoint(folder[0])

if engine.global_rank == 0:
    print(
        f"{engine.global_steps} steps, learning rate {engine.get_lr()[0]:.5f}, norm {engine.get_global_grad_norm():.3f}"
    )
    print(f"loss: {losses[0]:.3f} -> {sum(losses[-5:]) / 5:.3f}")
torch.distributed.destroy_process_group()
