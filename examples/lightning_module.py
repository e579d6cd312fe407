"""A LightningModule trained at stage 3, with validation, accumulation and the best checkpoint.

    torchrun --nproc-per-node 2 examples/lightning_module.py

What differs from a run under DDP: the import of the strategies, and `strategy="onecopy_stage_3"`.
"""

import tempfile

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import onecopy.integrations.lightning  # noqa: F401 (registers the strategies)


class Net(pl.LightningModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(4))
        self.net = nn.Sequential(nn.Linear(8, width), *blocks, nn.Linear(width, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x).squeeze(-1), y)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        x, y = batch
        self.log("validated", nn.functional.mse_loss(self.net(x).squeeze(-1), y), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def make_data(seed: int, rows: int) -> DataLoader:
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x.sum(-1).sin()), batch_size=16)


pl.seed_everything(0)
module = Net()
with tempfile.TemporaryDirectory() as own:
    best = ModelCheckpoint(monitor="validated", save_top_k=1)
    trainer = pl.Trainer(
        strategy="onecopy_stage_3",
        accelerator="cpu",
        devices=2,
        max_epochs=4,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        default_root_dir=own,
        callbacks=[best],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, make_data(0, 2048), make_data(1, 256))
    trainer.validate(ckpt_path="best", dataloaders=make_data(1, 256), weights_only=False)

if trainer.is_global_zero:
    print(f"best validation loss: {best.best_model_score:.3f}")
    print(f"loss: {module.losses[0]:.3f} -> {sum(module.losses[-5:]) / 5:.3f}")
