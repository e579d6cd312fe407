"""Half precision as PyTorch writes it: GradScaler, autocast, bf16 and fp16 compute, and decisions that all ranks share.

The oracle is the same loop in one process; where PyTorch has no such loop, the arithmetic that a dtype is defined by.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call
from torch.optim import SGD, AdamW, Optimizer

import onecopy
from models import Stack, TinyGPT, seeded, token_batches, vector_batches
from one_fork import Forked, On, one_fork
from oracle import (
    OPTIMIZERS,
    HalfTwin,
    Mine,
    assert_loop_like_twin,
    assert_same_weights,
    gathered_weights,
    part,
    train,
    train_in_rank_order,
    whole_weights,
)
from ranks import every_stage
from stack_loops import stack

# --- GradScaler


@every_stage
@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-loop", "adamw", "sgd"])
@one_fork
def test_grad_scaler_trains_like_twin(optimizer: str, stage: int, num_ranks: int) -> Forked:
    """With unscale_ and clipping between; powers of two cost no rounding."""

    def loop(model: nn.Module, mine: Mine) -> list[float]:
        made = OPTIMIZERS[optimizer](model.parameters())
        scaler, norms = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2), []
        for batch in vector_batches(4):
            scaler.scale(model(*mine(batch))).backward()
            scaler.unscale_(made)
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
            scaler.step(made)
            scaler.update()
            made.zero_grad()
        assert scaler.get_scale() == 4096.0
        return norms

    yield On(num_ranks, lambda rank: assert_loop_like_twin(rank, num_ranks, loop, stack, stage=stage) and None)


@every_stage
@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-loop", "sgd"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@one_fork
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    bad: float, optimizer: str, stage: int, num_ranks: int
) -> Forked:
    """In the third of five steps the last rank's data is bad; the twin leaves that batch out and halves its scale."""

    def train_some(model: nn.Module, mine: Mine, rank: int | None) -> float:
        made = OPTIMIZERS[optimizer](model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        for index, batch in enumerate(vector_batches(5)):
            x, y = mine(batch)
            if index == 2:
                if rank is None:
                    continue
                y = y * (bad if rank == num_ranks - 1 else 1.0)
            scaler.scale(model(x, y)).backward()
            scaler.step(made)
            scaler.update()
            made.zero_grad()
        return float(scaler.get_scale())

    def run(rank: int) -> None:
        twin, model = stack(), onecopy.shard(stack(), stage)
        train_some(twin, lambda batch: batch, None)
        assert train_some(model, lambda batch: part(batch, rank, num_ranks), rank) == 512.0
        assert_same_weights(gathered_weights(model), whole_weights(twin))

    yield On(num_ranks, run)


@every_stage
@one_fork
def test_fp16_compute_over_fp32_masters_with_a_scaler(stage: int, num_ranks: int) -> Forked:
    """Against the twin that computes with fp16 copies; limits as in the bf16 parity, for a dtype eight times finer."""

    def scaled(model: nn.Module, optimizer: Optimizer, batches: list[Any]) -> list[float]:
        scaler, losses = torch.amp.GradScaler("cpu", init_scale=256.0), []
        for batch in batches:
            loss = model(*batch)
            losses.append(loss.item())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 256.0
        return losses

    def run(rank: int) -> None:
        batches = token_batches(4)
        twin, start = seeded(TinyGPT), whole_weights(seeded(TinyGPT))
        scaled(HalfTwin(twin, torch.float16), OPTIMIZERS["sgd"](twin.parameters()), batches)
        model = onecopy.shard(seeded(TinyGPT), stage, precision="fp16")
        scaled(model, OPTIMIZERS["sgd"](model.parameters()), [part(b, rank, num_ranks) for b in batches])
        expected, found = whole_weights(twin), gathered_weights(model)
        assert all(weight.dtype == torch.float32 for weight in found.values())
        error = sum((found[name] - value).square().sum() for name, value in expected.items())
        update = sum((start[name] - value).square().sum() for name, value in expected.items())
        assert error**0.5 <= 2**-8 * update**0.5

    yield On(num_ranks, run)


# --- autocast


@every_stage
@pytest.mark.parametrize("accumulate", [1, 2])
@one_fork
def test_autocast_trains_like_rank_ordered_twin(accumulate: int, stage: int, num_ranks: int) -> Forked:
    """To the last bit, with parameters used twice in one autocast region.

    Without autocast's cache, which would add the two uses' gradients in bf16; onecopy never fills that cache.
    """

    class Autocast(Stack):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                for block in self.blocks:
                    x = x + block(block(x))
                return F.mse_loss(self.head(x).float(), y)

    def run(rank: int) -> None:
        batches = vector_batches(4)
        twin = train_in_rank_order(
            seeded(Autocast),
            OPTIMIZERS["sgd"],
            batches,
            num_ranks,
            accumulate=accumulate,
            sum_first=stage < 2,
        )
        model = onecopy.shard(seeded(Autocast), stage, accumulate=accumulate)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        train(model, optimizer, [part(batch, rank, num_ranks) for batch in batches], accumulate=accumulate)
        assert_same_weights(gathered_weights(model), twin.weights, atol=0)

    yield On(num_ranks, run)


@pytest.mark.parametrize("stage", [1, 3])
@one_fork
def test_autocast_around_the_call_sees_new_weights_in_every_step(stage: int) -> Forked:
    """Autocast caches cast weights by their identity while its block is open; here it stays open over three steps."""

    def loop(model: nn.Module, mine: Mine) -> list[float]:
        optimizer, losses = SGD(model.parameters(), lr=0.5), []
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=hasattr(model, "no_sync")):
            for _ in range(3):
                loss = model(*mine(vector_batches(1)[0]))
                losses.append(loss.item())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return losses

    def run(rank: int) -> None:
        # bf16 activations: 2^-8 of the loss; a stale weight would leave it where it was.
        assert_loop_like_twin(rank, 2, loop, stack, stage=stage, rtol=2**-8, atol=2e-2)

    yield On(2, run)


# --- what each dtype is for


def _spread(rank: int) -> tuple[Tensor, Tensor]:
    """Rows whose gradients differ by far more than a bf16 mantissa between ranks and between micro-batches."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, 10, generator=generator), torch.randn(2, 3, generator=generator)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulate", [None, torch.bfloat16])
@one_fork
def test_64_micro_batches_are_summed_in_fp32_unless_told_otherwise(
    accumulate: torch.dtype | None, stage: int
) -> Forked:
    """A peer's fault: gradients accumulated in bf16 over 64 micro-batches were off by 1e-2.

    Parameters are bf16 throughout (no masters). Oracle: the 64 bf16 gradients of each rank, summed in fp64. One
    rounding to bf16 is left at the end (2^-9), and in stages 0 and 1 one on the wire. Told to sum in bf16, it does.
    """
    batches = [_spread(index) for index in range(64)]

    def gradients(rank: int) -> Tensor:
        model = stack().bfloat16()
        total = torch.zeros(30, dtype=torch.float64)
        for x, y in batches:
            model.zero_grad()
            (model(x.bfloat16() + rank, y.bfloat16()) / 64).backward()
            total += model.head.weight.grad.double().flatten()
        return total

    def run(rank: int) -> float:
        expected = (gradients(0) + gradients(1)) / 2
        precision = None if accumulate is None else onecopy.Precision(accumulate=accumulate)
        model = onecopy.shard(stack().bfloat16(), stage, accumulate=64, precision=precision)
        for x, y in batches:
            (model(x.bfloat16() + rank, y.bfloat16()) / 64).backward()
        # The step adds the gradient to weights of zero, so that the weight is the gradient and nothing is lost.
        with onecopy.gathered(model, write=True), torch.no_grad():
            model.head.weight.zero_()
        SGD(model.parameters(), lr=1.0).step()
        found = -gathered_weights(model)["head.weight"].double().flatten()
        return float((found - expected).norm() / expected.norm())

    for error in (yield On(2, run)):
        assert error <= 2**-8 if accumulate is None else 2**-8 < error < 0.1


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_master_dtype_is_what_the_optimizer_updates(stage: int) -> Forked:
    """Updates of 2^-12 of a weight vanish in bf16 and add up in masters of fp32 and fp64. Oracle: arithmetic."""

    def run(rank: int, master: torch.dtype) -> tuple[torch.dtype, float]:
        model = nn.Linear(4, 1, bias=False)
        nn.init.ones_(model.weight)
        onecopy.shard(model, stage, precision=onecopy.Precision(compute=torch.bfloat16, master=master))
        optimizer = SGD(model.parameters(), lr=2**-12)
        for _ in range(16):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weight = gathered_weights(model)["weight"]
        return weight.dtype, weight.double().mean().item()

    for dtype, expected in ((torch.bfloat16, 1.0), (torch.float32, 1 - 2**-8), (torch.float64, 1 - 2**-8)):
        assert (yield On(2, run, dtype)) == [(dtype, expected)] * 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@one_fork
def test_reduce_dtype_is_what_travels(wire: torch.dtype, stage: int) -> Forked:
    """Bytes of gradients sent are elements times the wire dtype's size; bytes of parameters, the compute dtype's."""

    def run(rank: int) -> tuple[int, int, int]:
        precision = onecopy.Precision(compute=torch.bfloat16, reduce=wire, master=torch.float32)
        model = onecopy.shard(stack(), stage, precision=precision)
        optimizer = SGD(model.parameters(), lr=0.1)
        train(model, optimizer, [part(batch, rank, 3) for batch in vector_batches(3)])
        sent = onecopy.ledger(model).last_step
        assert sent is not None
        return sent.bytes_sent("all_gather"), sent.bytes_sent("reduce_scatter"), sent.bytes_sent("all_reduce")

    model = (yield On(3, lambda rank: onecopy.padded_numel(onecopy.shard(stack(), stage))))[0]
    for gathered, scattered, reduced in (yield On(3, run)):
        share = model * 2 // 3
        assert gathered == {0: 0, 1: 2, 2: 2, 3: 4}[stage] * share
        assert scattered == (wire.itemsize * share if stage else 0)
        assert reduced == (0 if stage else 2 * wire.itemsize * share)


@pytest.mark.parametrize("stage", [1, 2, 3])
@one_fork
def test_optimizer_states_and_gradients_are_fp32_under_bf16_compute(stage: int) -> Forked:
    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage, precision="bf16")
        optimizer = AdamW(model.parameters(), lr=1e-3)
        model(*part(vector_batches(1)[0], rank, 2)).backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        optimizer.step()
        kept = [value for state in optimizer.state.values() for value in state.values()]
        assert {value.dtype for value in kept} == {torch.float32}

    yield On(2, run)


@pytest.mark.parametrize(
    "make", [lambda model: model, lambda model: model.bfloat16()], ids=["fp32 model", "bf16 model"]
)
@one_fork
def test_inputs_of_half_precision_models_are_cast(make: Callable[[nn.Module], nn.Module]) -> Forked:
    """fp32 inputs meet bf16 weights: as fully_shard's mixed precision does, they are cast on the way in."""

    def run(rank: int) -> torch.dtype:
        seen: list[torch.dtype] = []
        model = make(stack())
        model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
        onecopy.shard(model, 3, precision="bf16")
        model(*part(vector_batches(1)[0], rank, 2)).backward()
        return seen[0]

    assert (yield On(2, run)) == [torch.bfloat16] * 2


class Widening(nn.Module):
    """Its blocks return fp32, as a block does that normalises or sums in it, and take what the one before returned."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(10, 12)
            self.down = nn.Linear(12, 10)

        def forward(self, x: Tensor, *, more: Any) -> Tensor:
            return self.down(torch.tanh(self.up(x + more[0]))).float() * 1.5

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(3))
        self.head = nn.Linear(10, 3)
        self.container: Callable[[Tensor], Any] = lambda tensor: {0: tensor}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, more=self.container(torch.ones(10)))
        return self.head(x.bfloat16())


@every_stage
@pytest.mark.parametrize("checkpointed", [False, True])
@one_fork
def test_what_a_unit_is_handed_is_cast_at_its_entrance(checkpointed: bool, stage: int, num_ranks: int) -> Forked:
    """Oracle: fully_shard with the same units, on the same data, whose `cast_forward_inputs` does it."""

    def train(model: nn.Module, rank: int) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outputs = []
        for x, _ in vector_batches(3):
            outputs.append(model(x[rank::num_ranks]))
            outputs[-1].float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [output.detach() for output in outputs]

    def run(rank: int) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cpu", (num_ranks,))
        peer = seeded(Widening)
        for block in peer.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(peer, mesh=mesh, mp_policy=policy)
        model = onecopy.shard(seeded(Widening), stage, precision=onecopy.Precision(torch.bfloat16, torch.float32))
        if checkpointed:
            model.container = peer.container = lambda tensor: (tensor,)
            for block in model.blocks:
                block.forward = partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)
        for found, expected in zip(train(model, rank), train(peer, rank), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
            assert found.dtype == torch.bfloat16

    yield On(num_ranks, run)


class WithBatchNorm(nn.Module):
    """Convolutional blocks with BatchNorm, and an InstanceNorm that keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.BatchNorm1d(2), nn.ReLU()) for _ in range(2)
        )
        self.norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.view(-1, 2, 5)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(self.norm(x).flatten(1)).float(), y.float())


class _Mixed(nn.Module):
    """Half-width copies of all parameters, those of norms with statistics in fp32 again; buffers stay fp32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *batch: Tensor) -> Tensor:
        narrow = {name: p.bfloat16() for name, p in self.model.named_parameters()}
        for name, p in narrow.items():
            if isinstance(self.model.get_submodule(name.rpartition(".")[0]), nn.BatchNorm1d | nn.InstanceNorm1d):
                narrow[name] = p.float()
        return functional_call(self.model, narrow, tuple(tensor.bfloat16() for tensor in batch))


@pytest.mark.parametrize("units", ["auto", [nn.BatchNorm1d, nn.InstanceNorm1d]])
@pytest.mark.parametrize("stage", [0, 3])
@one_fork
def test_norms_with_statistics_compute_in_the_dtype_of_these(stage: int, units: Any) -> Forked:
    """Oracle: one process with fp32 norms and statistics between bf16 layers, as kernels define it. One rank's data."""

    def run(rank: int) -> None:
        twin = seeded(WithBatchNorm)
        mixed = _Mixed(twin)
        batches = vector_batches(3)
        expected = train(mixed, torch.optim.SGD(twin.parameters(), lr=0.1), batches)
        model = onecopy.shard(seeded(WithBatchNorm), stage, precision="bf16", units=units)
        found = train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)
        assert found.losses == pytest.approx(expected.losses, rel=1e-2)
        for (name, buffer), value in zip(model.named_buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(buffer, value, rtol=1e-2, atol=1e-2, msg=lambda text, name=name: name + text)
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(*batches[0]), mixed.eval()(*batches[0]), rtol=1e-2, atol=1e-2)
            with onecopy.gathered(model):
                x, norm = torch.ones(1, 2, 5), model.norm
                weight, bias = norm.weight.bfloat16().float(), norm.bias.bfloat16().float()
                statistics = norm.running_mean, norm.running_var
                kernel = F.instance_norm(x.bfloat16(), *statistics, weight, bias, use_input_stats=False)
                assert torch.equal(norm(x), kernel)
        assert all(isinstance(parameter, onecopy.SlicedTensor) for parameter in model.parameters())

    yield On(2, run)
