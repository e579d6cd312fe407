"""Tensor parallelism for the models that the training job knows: the heads and the MLP of each block, over M ranks.

Embeddings, norms and the head of the language model stay whole on every rank of the tensor axis, unless ``sequence``
cuts them too. Each block sends what Megatron's does: an all-reduce after attention and one after the MLP, in forward
and in backward, or as many bytes in gathers and reduce-scatters along the sequence.

One private torch name, read in torch 2.13 and tested in tests/house/test_private_apis.py: `_StridedShard`, a placement
that cuts each third of GPT-2's fused projection, so that a rank has its heads of q, k and v and `full_tensor()` is the
weight as the model has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from onecopy.errors import SettingsError
from onecopy.integrations.chunked_loss import ChunkedHead
from onecopy.planner.model.tensor import check_tensor_parallel


def parallelize(model: Any, tensor: DeviceMesh, *, sequence: bool = False) -> None:
    """Spread a causal LM of transformers over the tensor axis, in place.

    Args:
        sequence: norms and what stands between blocks are cut along the sequence, embedding and head along the
            vocabulary, so that no activation and no large weight is whole on a rank. Of
            activation checkpoints every rank has its part already (``Activations(partition=False)``).

    Raises:
        SettingsError: if the model is of a type that is not known, or its heads or vocabulary cannot be divided.
    """
    if problem := check_tensor_parallel(model.config.to_dict(), tensor.size(), sequence=sequence):
        raise SettingsError(problem)
    if model.config.model_type == "gpt2":
        for block in model.transformer.h:
            _spread_gpt2_block(block, tensor, sequence)
        if sequence:
            _spread_gpt2_ends(model, tensor)
        return
    for block in model.model.layers:
        _spread_llama_block(block, tensor, sequence)
    if sequence:
        _spread_ends(model, tensor)


def _spread_llama_block(block: nn.Module, tensor: DeviceMesh, sequence: bool) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    whole = Replicate()
    comes: Any = Shard(1) if sequence else whole
    plan: dict[str, Any] = {
        # A module's input is made a DTensor once, so that its gradients from several projections are added before
        # they are sent.
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": comes}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        "mlp": PrepareModuleInput(input_layouts=comes, desired_input_layouts=whole),
        "self_attn.o_proj": RowwiseParallel(output_layouts=comes),
        "mlp.down_proj": RowwiseParallel(output_layouts=comes),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[name] = ColwiseParallel()
    if sequence:
        plan |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
    parallelize_module(block, tensor, plan)


def _spread_ends(model: Any, tensor: DeviceMesh) -> None:
    """Cut embedding and head along the vocabulary, and what is between them and the blocks along the sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel, parallelize_module

    plan: dict[str, Any] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
    }
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    parallelize_module(model.model, tensor, plan)
    _cut_head(model, tensor, tied=tied)


def _spread_gpt2_ends(model: Any, tensor: DeviceMesh) -> None:
    """As `_spread_ends`; the table of positions is cut as the embedding is."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel, parallelize_module

    table = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    plan: dict[str, Any] = {"wte": table, "wpe": table, "ln_f": SequenceParallel(use_local_output=True)}
    parallelize_module(model.transformer, tensor, plan)
    # The model gives its result the shape of what it was given: of this rank's part, and not of all tokens.
    model.transformer.register_forward_pre_hook(_with_embeddings, with_kwargs=True)
    _cut_head(model, tensor, tied=tied)


def _with_embeddings(model: Any, arguments: Any, named: dict[str, Any]) -> Any:
    tokens = named["input_ids"] if "input_ids" in named else arguments[0]
    return (), {**named, "input_ids": None, "inputs_embeds": model.wte(tokens)}


def _cut_head(model: Any, tensor: DeviceMesh, *, tied: bool) -> None:
    """Cut the head along the vocabulary, where the embedding is cut already.

    Args:
        tied: whether head and embedding are one parameter.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    made = CutHead(head, model, tensor)
    weight = head.weight
    made.weight = (
        table.weight
        if tied
        else nn.Parameter(distribute_tensor(weight.detach(), tensor, [Shard(0)]), weight.requires_grad)
    )
    made.attend(model)
    # The model counts positions by what it embedded, which is this rank's part.
    model.register_forward_pre_hook(_with_positions, with_kwargs=True)


def _with_positions(_: nn.Module, arguments: Any, named: dict[str, Any]) -> Any:
    tokens = named["input_ids"] if "input_ids" in named else arguments[0]
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    return arguments, {"position_ids": positions, **named}


class CutHead(ChunkedHead):
    """A head of which each rank has some classes: the loss is made of them, logits are brought together.

    Args:
        head: the whole one; a `ChunkedHead` gives way to this one.
        model: of transformers.
    """

    def __init__(self, head: Any, model: Any, tensor: DeviceMesh) -> None:
        super().__init__(head, head.whole if isinstance(head, ChunkedHead) else model.loss_function)
        self._tensor = tensor
        if isinstance(head, ChunkedHead):
            head.retire()

    def forward(self, input: Tensor) -> Tensor:
        """Of this rank's part of the sequence to all logits, or to the loss."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        whole = DTensor.from_local(input, self._tensor, [Shard(1)]).redistribute(self._tensor, [Replicate()])
        hidden = whole.to_local(grad_placements=[Partial()])
        weight = self.weight
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        if self._named is not None:
            return self._chunked(hidden, local, self._named, self._tensor.get_group())
        logits = DTensor.from_local(nn.functional.linear(hidden, local), self._tensor, [Shard(-1)])
        found: Tensor = logits.full_tensor()
        return found


def _spread_gpt2_block(block: Any, tensor: DeviceMesh, sequence: bool) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
    from torch.distributed.tensor.placement_types import _StridedShard

    outside: Any = Shard(1) if sequence else Replicate()
    attention, mlp = block.attn, block.mlp
    _spread(attention.c_attn, tensor, outside, lambda dim: _StridedShard(dim, split_factor=3), along=-1)
    attention.split_size //= tensor.size()
    _spread(mlp.c_fc, tensor, outside, Shard, along=-1)
    for layer in (attention.c_proj, mlp.c_proj):
        _spread(layer, tensor, outside, Shard, along=0)
    if sequence:
        norms: dict[str, Any] = {name: SequenceParallel(use_local_output=True) for name in ("ln_1", "ln_2")}
        parallelize_module(block, tensor, norms)


def _spread(layer: nn.Module, tensor: DeviceMesh, outside: Any, cut: Callable[[int], Any], *, along: int) -> None:
    """Spread a `Conv1D` of transformers, whose weight is (inputs, outputs), as PyTorch's styles do a `Linear`.

    Args:
        outside: placement of what stands between attention or MLP and others.
        cut: the placement that cuts a dimension.
        along: dimension of the weight that is cut: -1 its outputs (and the bias), 0 its inputs.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

    def cut_parameters(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            is_whole = along == 0 and parameter.dim() == 1
            placement = Replicate() if is_whole else cut(along % parameter.dim())
            placed = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement]), parameter.requires_grad)
            module.register_parameter(name, placed)

    def take(_: nn.Module, arguments: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        if along == 0:
            return (DTensor.from_local(arguments[0], mesh, [Shard(-1)]), *arguments[1:])
        whole = DTensor.from_local(arguments[0], mesh, [outside]).redistribute(mesh, [Replicate()])
        return (whole, *arguments[1:])

    def give(_: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
        # Of a layer cut along its inputs ranks have sums that are still to be taken.
        local: Tensor = (output.redistribute(mesh, [outside]) if along == 0 else output).to_local()
        return local

    distribute_module(layer, tensor, cut_parameters, take, give)  # type: ignore[arg-type]
