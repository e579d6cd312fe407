"""The engine's core on the emulated device. Oracle: plain PyTorch in one process on the CPU; the device's reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy
from models import token_batches
from onecopy.sharding.setup.api import engine_of
from oracle import OPTIMIZERS, Batch, HalfTwin, assert_same_weights, whole_weights
from training import on, parts_of, run_clean, tiny, trains_like_one_process, weights_of

pytestmark = pytest.mark.emulated

STAGES = (0, 1, 2, 3)

BF16: dict[str, Any] = {"precision": "bf16", "half": torch.bfloat16, "rtol": 1e-2, "atol": 5e-3}
"""bf16 keeps 8 bits, and sums of it are rounded at every rank of a ring."""

CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fused": {"optimizer": OPTIMIZERS["adamw-fused"], "atol": 1e-4},
    "bf16": BF16,
    "accumulate": {"accumulate": 2},
    "small buffers": {"bucket_bytes": 1000},
    "prefetch 2": {"prefetch": 2},
}


@pytest.mark.parametrize("case, num_ranks", [*((case, n) for case in CASES for n in (2, 3)), ("fp32", 4), ("bf16", 4)])
def test_training_equals_one_process(case: str, num_ranks: int) -> None:
    def run(rank: int, device: torch.device) -> None:
        for stage in STAGES:
            trains_like_one_process(rank, device, num_ranks, stage=stage, **CASES[case])

    run_clean(num_ranks, run)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_hybrid_training_equals_one_process(num_ranks: int) -> None:
    def run(rank: int, device: torch.device) -> None:
        mesh = dist.init_device_mesh("emu", (2, num_ranks // 2), mesh_dim_names=("replicate", "shard"))
        for stage in STAGES:
            trains_like_one_process(rank, device, num_ranks, stage=stage, mesh=mesh)
            trains_like_one_process(rank, device, num_ranks, stage=stage, mesh=mesh, **BF16)

    run_clean(num_ranks, run)


@pytest.mark.parametrize("how", ["units", "selective", "cpu", "files"])
def test_recomputed_training_equals_one_process(how: str, tmp_path: Path) -> None:
    if how in ("units", "selective"):
        activations = onecopy.Activations(how)
    else:
        activations = onecopy.Activations(offload=str(tmp_path) if how == "files" else how)

    def run(rank: int, device: torch.device) -> None:
        for stage in STAGES:
            trains_like_one_process(rank, device, 2, stage=stage, accumulate=2, activations=activations)

    run_clean(2, run)


def _is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and "blocks" in name


@pytest.mark.parametrize("bucket_bytes", [None, 512])
def test_whole_parameters_travel_in_slices_of_different_lengths(bucket_bytes: int | None) -> None:
    """Hidden matrices lie whole on one rank each, which leaves slices of a unit in no two lengths alike."""

    def run(rank: int, device: torch.device) -> None:
        for stage in STAGES:
            for case in ({}, BF16):
                model = trains_like_one_process(
                    rank, device, 3, stage=stage, bucket_bytes=bucket_bytes, whole=_is_hidden_matrix, **case
                )
                lengths = [b.layout.ragged for unit in engine_of(model).units for b in unit.buckets]
                assert (None not in lengths) == (stage > 0)

    run_clean(3, run)


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_muon_steps_over_whole_matrices_on_the_device_and_off_it(offload: str | None) -> None:
    """Oracle: the default layout's stage 0, where every rank steps over all of them. Newton-Schulz computes in bf16."""

    def run(rank: int, device: torch.device) -> None:
        found = []
        for stage, whole in ((0, None), (3, _is_hidden_matrix)):
            where = None if offload is None or stage == 0 else onecopy.Offload(optimizer=offload)
            model = onecopy.shard(on(device, tiny), stage, whole=whole, offload=where)
            named = list(model.named_parameters())
            muon = torch.optim.Muon([p for name, p in named if _is_hidden_matrix(name, p)], lr=0.02)
            adamw = torch.optim.AdamW([p for name, p in named if not _is_hidden_matrix(name, p)], lr=1e-2)
            for batch in parts_of(token_batches(3), rank, 2, device):
                model(*batch).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                for optimizer in (muon, adamw):
                    optimizer.step()
                    optimizer.zero_grad()
            assert all(
                state["momentum_buffer"].device.type == ("cpu" if where else device.type)
                for state in muon.state.values()
            )
            found.append(weights_of(model))
        assert_same_weights(found[1], found[0], 5e-3)

    run_clean(2, run)


def test_gradient_scaling_equals_one_process() -> None:
    """Oracle: the same scaler around plain PyTorch in fp16 on the CPU, which skips a step whose gradient overflows."""

    def loop(model: nn.Module, batches: Sequence[Batch], kind: str) -> list[float]:
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        scaler = torch.amp.GradScaler(kind, init_scale=2.0**10)
        scales = []
        for number, batch in enumerate(batches):
            loss = model(*batch) * (1e30 if number == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales

    def run(rank: int, device: torch.device) -> None:
        batches = token_batches(4)
        twin = tiny()
        expected = loop(HalfTwin(twin, torch.float16), batches, "cpu")
        assert len(set(expected)) == 2
        for stage in STAGES:
            model = onecopy.shard(on(device, tiny), stage, precision="fp16")
            assert loop(model, parts_of(batches, rank, 2, device), device.type) == expected
            assert_same_weights(weights_of(model), whole_weights(twin), 1e-3)

    run_clean(2, run)


def test_a_graph_that_was_retained_may_run_backward_again() -> None:
    """Oracle: the same in one process, with micro-batches whose gradients add up."""

    def loop(model: nn.Module, batches: Sequence[Batch]) -> None:
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        for batch in batches:
            loss = model(*batch)
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def run(rank: int, device: torch.device) -> None:
        twin = tiny()
        loop(twin, token_batches(2))
        for stage in (0, 2, 3):
            model = onecopy.shard(on(device, tiny), stage, accumulate=2)
            loop(model, parts_of(token_batches(2), rank, 2, device))
            assert_same_weights(weights_of(model), whole_weights(twin), 1e-6)

    run_clean(2, run)


def test_rounding_of_sums_in_bf16_and_in_fp32(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the mean in float64 of what each rank computes in bf16. NCCL rounds sums of bf16 at every hop."""

    def errors(rank: int, device: torch.device) -> list[float]:
        (batch,) = token_batches(1, rows=16)
        exact: dict[str, Tensor] = {}
        for other in range(4):
            plain = on(device, tiny).to(torch.bfloat16)
            plain(*parts_of([batch], other, 4, device)[0]).backward()
            for name, parameter in plain.named_parameters():
                exact[name] = exact.get(name, 0) + parameter.grad.cpu().double() / 4
        found = []
        for reduce in (None, torch.float32):
            model = onecopy.shard(on(device, tiny), 2, precision=onecopy.Precision(torch.bfloat16, reduce=reduce))
            model(*parts_of([batch], rank, 4, device)[0]).backward()
            with onecopy.gathered([p.grad for p in model.parameters()]) as gradients:
                pairs = zip(model.named_parameters(), gradients, strict=True)
                off = [(g.cpu().double() - exact[name]).square().sum() for (name, _), g in pairs]
            found.append((torch.stack(off).sum() / sum(e.square().sum() for e in exact.values())).sqrt().item())
        return found

    for seen in run_clean(4, errors):
        in_bf16, in_fp32 = seen.result
        assert 1e-3 < in_bf16 < 1e-2
        assert in_fp32 < 1e-6
    with capsys.disabled():
        print(f"\nrelative error of the mean over 4 ranks: {in_bf16:.1e} in bf16, {in_fp32:.1e} with reduce=float32")
