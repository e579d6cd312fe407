"""Tensor parallelism for the models that the training job knows: the heads and the MLP of each block, over M ranks.

Embeddings, norms and the head of the language model stay whole on every rank of the tensor axis. Each block sends what
Megatron's does: an all-reduce after attention and one after the MLP, in forward and in backward.

One private torch name, read in torch 2.13 and tested in tests/house/test_private_apis.py: `_StridedShard`, a placement
that cuts each third of GPT-2's fused projection, so that a rank has its heads of q, k and v and `full_tensor()` is the
weight as the model has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from onecopy.errors import SettingsError
from onecopy.planner.model.tensor import check_tensor_parallel


def parallelize(model: Any, tensor: DeviceMesh) -> None:
    """Spread the blocks of a causal LM of transformers over the tensor axis, in place.

    Raises:
        SettingsError: if the model is of a type that is not known, or its heads cannot be divided.
    """
    if problem := check_tensor_parallel(model.config.to_dict(), tensor.size()):
        raise SettingsError(problem)
    if model.config.model_type == "gpt2":
        for block in model.transformer.h:
            _spread_gpt2_block(block, tensor)
    else:
        for block in model.model.layers:
            _spread_llama_block(block, tensor)


def _spread_llama_block(block: nn.Module, tensor: DeviceMesh) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    whole = Replicate()
    plan: dict[str, Any] = {
        # A module's input is made a DTensor once, so that its gradients from several projections are added before
        # they are sent.
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": whole}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        "mlp": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[name] = ColwiseParallel()
    parallelize_module(block, tensor, plan)


def _spread_gpt2_block(block: Any, tensor: DeviceMesh) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    attention, mlp = block.attn, block.mlp
    _spread(attention.c_attn, tensor, Replicate(), lambda dim: _StridedShard(dim, split_factor=3), along=-1)
    attention.split_size //= tensor.size()
    _spread(mlp.c_fc, tensor, Replicate(), Shard, along=-1)
    for layer in (attention.c_proj, mlp.c_proj):
        _spread(layer, tensor, Shard(-1), Shard, along=0)


def _spread(layer: nn.Module, tensor: DeviceMesh, inputs: Any, cut: Callable[[int], Any], *, along: int) -> None:
    """Spread a `Conv1D` of transformers, whose weight is (inputs, outputs), as PyTorch's styles do a `Linear`.

    Args:
        inputs: placement of the layer's input.
        cut: the placement that cuts a dimension.
        along: dimension of the weight that is cut: -1 its outputs (and the bias), 0 its inputs.
    """
    from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor

    def cut_parameters(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            is_whole = along == 0 and parameter.dim() == 1
            placement = Replicate() if is_whole else cut(along % parameter.dim())
            placed = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement]), parameter.requires_grad)
            module.register_parameter(name, placed)

    def take(_: nn.Module, arguments: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        return (DTensor.from_local(arguments[0], mesh, [inputs]), *arguments[1:])

    def give(_: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
        # Of a layer cut along its inputs ranks have sums that are still to be taken.
        local: Tensor = (output.redistribute(mesh, [Replicate()]) if along == 0 else output).to_local()
        return local

    distribute_module(layer, tensor, cut_parameters, take, give)  # type: ignore[arg-type]
