"""torch.compile of blocks, before sharding and after it, in place and by replacement: same numbers, no extra graphs.

The oracle is the whole-batch twin, which runs eagerly. The backend aot_eager traces as the default one does, and needs
no compiler on the machine.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import onecopy
from models import Block, Chain, TinyGPT, seeded, token_batches, vector_batches
from onecopy.errors import UsageError
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


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_compiled_model_trains_like_twin(stage: int) -> None:
    """In place. Its graph ends at each unit."""

    def run(rank: int) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        twin = seeded(Residuals)
        train(twin, OPTIMIZERS["sgd"](twin.parameters()), vector_batches(3))
        model = seeded(Residuals)
        onecopy.shard(model, stage, units=[Residual])
        model.compile(backend="aot_eager")
        train(model, OPTIMIZERS["sgd"](model.parameters()), [part(b, rank, 2) for b in vector_batches(3)])
        assert_same_weights(gathered_weights(model), whole_weights(twin))
        assert _graphs() >= 1

    run_ranks(2, run, timeout=120)


def test_one_graph_of_a_block_is_made_and_one_of_a_model_is_refused_in_words() -> None:
    """A model that is a unit alone is one graph, too."""

    def run(rank: int) -> str:
        torch._dynamo.reset()
        twin = seeded(Residuals)
        train(twin, OPTIMIZERS["sgd"](twin.parameters()), vector_batches(3))
        model = seeded(Residuals)
        onecopy.shard(model, 3, units=[Residual])
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        train(model, OPTIMIZERS["sgd"](model.parameters()), [part(b, rank, 2) for b in vector_batches(3)])
        assert_same_weights(gathered_weights(model), whole_weights(twin))
        alone = onecopy.shard(seeded(Residuals), 3, units=[])
        alone.compile(backend="aot_eager", fullgraph=True)
        alone(*part(vector_batches(1)[0], rank, 2)).backward()
        refused = onecopy.shard(seeded(Residuals), 3, units=[Residual])
        refused.compile(backend="aot_eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
            refused(*part(vector_batches(1)[0], rank, 2))
        return str(caught.value)

    for told in run_ranks(2, run, timeout=120):
        assert "block.compile(fullgraph=True)" in told


def test_recomputed_blocks_are_compiled_by_replacement_and_refused_in_place() -> None:
    def run(rank: int) -> str:
        torch._dynamo.reset()
        twin = seeded(Residuals)
        train(twin, OPTIMIZERS["sgd"](twin.parameters()), vector_batches(3))
        for kind in ("units", "selective"):
            model = seeded(Residuals)
            _replace_by_compiled(model)
            onecopy.shard(model, 3, activations=onecopy.Activations(kind))
            train(model, OPTIMIZERS["sgd"](model.parameters()), [part(b, rank, 2) for b in vector_batches(3)])
            found = {name.replace("_orig_mod.", ""): value for name, value in gathered_weights(model).items()}
            assert_same_weights(found, whole_weights(twin))
        refused = onecopy.shard(seeded(Residuals), 3, activations=onecopy.Activations())
        _compile_in_place(refused)
        with pytest.raises(UsageError) as caught:
            refused(*part(vector_batches(1)[0], rank, 2))
        return str(caught.value)

    for told in run_ranks(2, run, timeout=120):
        assert "its recomputation is not" in told


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["blocks", "model"])
def test_inductor_trains_like_twin(what: str) -> None:
    """The default backend, at every stage; it compiles C++, which takes a minute on a machine that is busy."""
    if shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler: there is no g++")

    def run(rank: int) -> None:
        for stage in (0, 1, 2, 3):
            torch._dynamo.reset()
            twin = seeded(TinyGPT)
            train(twin, OPTIMIZERS["sgd"](twin.parameters()), token_batches(3))
            model = onecopy.shard(seeded(TinyGPT), stage, units=[Block])
            for part_of_it in model.blocks if what == "blocks" else [model]:
                part_of_it.compile(fullgraph=what == "blocks")
            train(model, OPTIMIZERS["sgd"](model.parameters()), [part(b, rank, 2) for b in token_batches(3)])
            assert_same_weights(gathered_weights(model), whole_weights(twin))

    run_ranks(2, run, timeout=500)
