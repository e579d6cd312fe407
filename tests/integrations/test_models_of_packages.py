"""Models of packages, made from small configs, in a plain loop. Oracle: the same model under DDP, in the same fork."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import onecopy
from ranks import run_ranks

Loss = Callable[[nn.Module, Tensor], Tensor]
"""Of a model on random numbers, (8, n)."""


def _unet() -> tuple[nn.Module, Loss]:
    from diffusers import UNet2DModel

    sizes: Any = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 4}
    kinds: Any = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    model = UNet2DModel(sample_size=8, in_channels=2, out_channels=2, **sizes, **kinds)
    return model, lambda own, x: own(x.view(-1, 2, 8, 8), torch.arange(len(x))).sample.square().mean()


def _dit() -> tuple[nn.Module, Loss]:
    from diffusers import DiTTransformer2DModel

    sizes: Any = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3, "patch_size": 2}
    model = DiTTransformer2DModel(
        in_channels=2, out_channels=2, sample_size=8, num_embeds_ada_norm=10, dropout=0.0, norm_num_groups=2, **sizes
    )

    def loss(own: nn.Module, x: Tensor) -> Tensor:
        steps, labels = torch.arange(len(x)), torch.arange(len(x)) % 5
        found: Tensor = own(x.view(-1, 2, 8, 8), timestep=steps, class_labels=labels).sample
        return (found - 1).square().mean()

    # Labels are dropped at random in training mode.
    return model.eval(), loss


def _vit() -> tuple[nn.Module, Loss]:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=8, patch_size=4, in_chans=2, depth=3, num_classes=5)
    return model, _classified


def _resnet_of_timm() -> tuple[nn.Module, Loss]:
    import timm

    return timm.create_model("resnet10t", in_chans=2, num_classes=5), _classified


def _resnet() -> tuple[nn.Module, Loss]:
    import torchvision

    model = torchvision.models.resnet18(num_classes=5)
    model.conv1 = nn.Conv2d(2, 64, 3, bias=False)
    return model, _classified


def _classified(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x.view(-1, 2, 8, 8)), torch.arange(len(x)) % 5)


def _titan() -> tuple[nn.Module, Loss]:
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        # FlexAttention has no backward on the CPU.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_states()

    def loss(own: nn.Module, x: Tensor) -> Tensor:
        tokens = x.abs().mul(500).long().clamp(max=2047)
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        found: Tensor = own(tokens, attention_masks=None, positions=places)
        return F.cross_entropy(found[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return model, loss


UNITS = {
    # The model's last layer calls the first block's embedding: these are the units that the error without them names.
    _dit: ["transformer_blocks.0.attn1", "transformer_blocks.0.ff", "transformer_blocks.1", "transformer_blocks.2"]
}

MODELS = {
    "diffusers": (_unet, _dit),
    "timm": (_vit, _resnet_of_timm),
    "torchvision": (_resnet,),
    "torchtitan": (_titan,),
}
CASES = [(package, make) for package, makes in MODELS.items() for make in makes]


@pytest.mark.parametrize("package, make", CASES, ids=[f"{package} {make.__name__[1:]}" for package, make in CASES])
def test_models_train_as_under_ddp(package: str, make: Callable[[], tuple[nn.Module, Loss]]) -> None:
    """Losses of three steps; weights and buffers of rank 0: under DDP others keep statistics of their own."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        pytest.skip(f"{package} is not installed, or not for this torch: {error}")

    def run(rank: int) -> list[tuple[list[float], dict[str, Tensor]]]:
        found = []
        for stage in (None, 0, 1, 2, 3):
            torch.manual_seed(0)
            model, loss_of = make()
            own: nn.Module = (
                DistributedDataParallel(model)
                if stage is None
                else onecopy.shard(model, stage, units=UNITS.get(make, "auto"))
            )
            optimizer = torch.optim.SGD(own.parameters(), lr=1e-2, momentum=0.9)
            losses = []
            for step in range(3):
                x = torch.randn(4, 128, generator=torch.Generator().manual_seed(2 * step + rank))
                loss = loss_of(own, x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            if stage is None:
                whole = {name: value.detach().clone() for name, value in model.state_dict().items()}
            else:
                with onecopy.gathered(model):
                    whole = {name: value.detach().clone() for name, value in model.state_dict().items()}
            found.append((losses, whole))
        return found

    first, second = run_ranks(2, run, timeout=240)
    for (losses, _), *others in (first, second):
        assert len(set(losses)) == 3
        for own_losses, _ in others:
            assert own_losses == pytest.approx(losses, rel=1e-4)
    for (_, weights), *ours in [first]:
        for _, own_weights in ours:
            assert own_weights.keys() == weights.keys()
            for name, value in weights.items():
                torch.testing.assert_close(
                    own_weights[name], value, rtol=1e-3, atol=1e-4, msg=lambda t, n=name: f"{n}: {t}"
                )
