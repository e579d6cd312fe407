"""torch.compile of blocks, before sharding and after it, in place and by replacement: same numbers, no extra graphs.

The oracle is the whole-batch twin, which runs eagerly. The backend aot_eager traces as the default one does, and needs
no compiler on the machine.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import onecopy
from models import Block, Chain, TinyGPT, seeded, token_batches, vector_batches
from oracle import OPTIMIZERS, assert_same_weights, gathered_weights, part, train, whole_weights
from ranks import run_ranks


class Residual(nn.Module):
    """A block with a forward of its own: torch's compiler leaves those of torch.nn, such as Sequential's, alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 20)
        self.down = nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Residuals(Chain):
    def __init__(self) -> None:
        super().__init__(Residual)


def _compile_in_place(model: Residuals) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")


def _replace_by_compiled(model: Residuals) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="aot_eager")


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("compile_blocks", [_compile_in_place, _replace_by_compiled], ids=["in place", "replaced"])
@pytest.mark.parametrize("when", ["before sharding", "after sharding"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_compiled_blocks_train_like_twin(stage: int, when: str, compile_blocks: Callable[[Residuals], None]) -> None:
    """And in one graph for all blocks and all steps: no graph break inside a block, no new graph in a later step."""

    def run(rank: int) -> int:
        torch._dynamo.reset()
        twin = seeded(Residuals)
        train(twin, OPTIMIZERS["sgd"](twin.parameters()), vector_batches(3))
        model = seeded(Residuals)
        if when == "before sharding":
            compile_blocks(model)
        onecopy.shard(model, stage)
        if when == "after sharding":
            compile_blocks(model)
        torch._dynamo.utils.counters.clear()
        train(model, OPTIMIZERS["sgd"](model.parameters()), [part(batch, rank, 2) for batch in vector_batches(3)])
        found = {name.replace("_orig_mod.", ""): value for name, value in gathered_weights(model).items()}
        assert_same_weights(found, whole_weights(twin))
        return _graphs()

    assert run_ranks(2, run, timeout=120) == [1, 1]


def test_block_of_the_model_is_what_is_compiled() -> None:
    """Guards the test above against comparing eager with eager: the block's own code is in the graph."""

    def run(rank: int) -> list[str]:
        torch._dynamo.reset()
        seen: list[str] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
            seen.extend(str(node.target) for node in graph.graph.nodes)
            return graph.forward

        model = onecopy.shard(seeded(TinyGPT), 3)
        for block in model.blocks:
            assert isinstance(block, Block)
            block.compile(backend=backend)
        model(*part(token_batches(1)[0], rank, 2)).backward()
        return seen

    for seen in run_ranks(2, run, timeout=120):
        assert any("scaled_dot_product_attention" in target for target in seen)
        assert any("gelu" in target for target in seen)
