"""An image classifier with BatchNorm at stage 1: a moving average of its weights, and early stopping on it.

    torchrun --nproc-per-node 2 examples/image_classifier.py

What differs from a run under DDP: `onecopy.shard` in place of the wrapper, and `onecopy.ema`.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import onecopy

CLASSES, SIZE, PATIENCE = 8, 16, 3


def make_data(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Stripes in eight directions under noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    angles = labels * torch.pi / CLASSES
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    waves = torch.cos(angles)[:, None, None] * x + torch.sin(angles)[:, None, None] * y
    return (waves.sin() + 0.7 * torch.randn(rows, SIZE, SIZE, generator=generator))[:, None], labels


def block(inside: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inside, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    right = (model(images).argmax(1) == labels).float().mean()
    model.train()
    dist.all_reduce(right)
    return right.item() / dist.get_world_size()


dist.init_process_group("gloo")
torch.manual_seed(0)
rank = dist.get_rank()
images, labels = make_data(1024, seed=rank)
held_out = make_data(256, seed=100 + rank)
layers = block(1, 24), block(24, 24), nn.MaxPool2d(2), block(24, 24), nn.AdaptiveAvgPool2d(1)
model = onecopy.shard(nn.Sequential(*layers, nn.Flatten(), nn.Linear(24, CLASSES)), stage=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
average = onecopy.ema(model, 0.95)
losses, best, bad = [], 0.0, 0
with tempfile.TemporaryDirectory() as own:
    folder = [own]
    dist.broadcast_object_list(folder)
    for epoch in range(12):
        for batch in torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch)).split(64):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update()
            losses.append(loss.item())
        with average.applied():
            accuracy = evaluate(model, *held_out)
        bad = 0 if accuracy > best else bad + 1
        if not bad:
            best = accuracy
            onecopy.save(folder[0], model, optimizer, step=epoch, rank_extra=average.state_dict(), keep=1)
        if bad == PATIENCE:
            break
    average.load_state_dict(onecopy.load(folder[0], model, optimizer).rank_extra)
if rank == 0:
    print(f"best accuracy of the average: {best:.3f} after {epoch + 1} epochs")
    print(f"loss: {losses[0]:.3f} -> {sum(losses[-5:]) / 5:.3f}")
dist.destroy_process_group()
