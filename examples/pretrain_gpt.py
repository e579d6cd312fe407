"""A small GPT pre-trained from scratch on characters, at stage 2, with checkpoints and a sample at the end.

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py

What differs from a run under DDP: `onecopy.shard` in place of the wrapper.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import onecopy

TEXT = " ".join(f"{a} and {b} is {a + b}." for a in range(30) for b in range(30))
CHARACTERS, LENGTH = sorted(set(TEXT)), 48


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.attend(self.norms[0](x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.feed(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, width: int = 96, layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(len(CHARACTERS), width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T


dist.init_process_group("gloo")
torch.manual_seed(0)
data = torch.tensor([CHARACTERS.index(character) for character in TEXT])
model = onecopy.shard(GPT(), stage=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
with tempfile.TemporaryDirectory() as own:
    folder = [own]
    dist.broadcast_object_list(folder)
    for step in range(1, 61):
        starts = torch.randint(len(data) - LENGTH, (8,), generator=generator)
        rows = torch.stack([data[start : start + LENGTH] for start in starts])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0:
            onecopy.save(folder[0], model, optimizer, step=step, keep=2)
    sample = data[:8]
    with torch.no_grad(), onecopy.gathered(model):
        for _ in range(24):
            sample = torch.cat([sample, model(sample[None])[0, -1].argmax()[None]])
if dist.get_rank() == 0:
    print("".join(CHARACTERS[token] for token in sample))
    print(f"loss: {losses[0]:.3f} -> {sum(losses[-5:]) / 5:.3f}")
dist.destroy_process_group()
