"""The emulated device itself. Oracles: what is right by CUDA's rules of streams, and DDP and fully_shard of PyTorch,
whose waits are in place; each found again once a wait is taken away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from models import Stack, seeded, vector_batches
from on_device import reports_of, run_on_device, the_device
from oracle import part

pytestmark = pytest.mark.emulated

STEPS = 3


def seen_of_one(function: Callable[[torch.device], Any], **kwargs: Any) -> Any:
    (seen,) = run_on_device(1, lambda rank, device: function(device), **kwargs)
    return seen


def _side(device: torch.device) -> torch.Stream:
    side = torch.Stream(device)
    side.wait_stream(torch.accelerator.current_stream(device))
    return side


# --- CUDA's rules


def test_values_are_the_cpus() -> None:
    def run(device: torch.device) -> None:
        torch.manual_seed(0)
        x, w = torch.randn(5, 7), torch.randn(7, 3)
        found = (x.to(device) @ w.to(device)).relu().t().contiguous()[1:]
        assert torch.equal(found.cpu(), (x @ w).relu().t().contiguous()[1:])
        assert torch.ones(3, 4, device=device).cumsum(0)[:, 1].tolist() == [1.0, 2.0, 3.0]

    assert not seen_of_one(run).reports


def test_a_read_that_does_not_wait_for_a_write_is_reported_with_both_lines() -> None:
    def run(device: torch.device) -> None:
        x = torch.zeros(8, device=device)
        side = _side(device)
        x.add_(1)
        with side:
            x.sum()

    (report,) = seen_of_one(run).reports
    assert report.startswith("race: the read by aten::sum")
    assert "does not wait for the write by aten::add" in report
    assert report.count("test_device.py") >= 2


def test_reads_beside_reads_and_writes_to_other_bytes_are_no_race() -> None:
    def run(device: torch.device) -> None:
        x = torch.zeros(8, device=device)
        side = _side(device)
        x.max()
        with side:
            x.max()
        torch.accelerator.synchronize(device)
        x[:4].add_(1)
        with side:
            x[4:].add_(1)
            x[4:].sum()

    assert not seen_of_one(run).reports


def test_an_event_a_stream_and_the_host_each_order() -> None:
    def run(device: torch.device) -> None:
        x = torch.zeros(8, device=device)
        main, side = torch.accelerator.current_stream(device), _side(device)
        x.add_(1)
        event = main.record_event()
        side.wait_event(event)
        with side:
            x.add_(1)
        main.wait_stream(side)
        x.add_(1)
        torch.accelerator.synchronize(device)
        with torch.Stream(device):
            x.add_(1)

    assert not seen_of_one(run).reports


def test_an_event_does_not_order_what_came_after_it() -> None:
    def run(device: torch.device) -> None:
        x = torch.zeros(8, device=device)
        side = _side(device)
        event = torch.accelerator.current_stream(device).record_event()
        x.add_(1)
        side.wait_event(event)
        with side:
            x.add_(1)

    assert {report.split(" by ")[0] for report in seen_of_one(run).reports} == {"race: the read", "race: the write"}


@pytest.mark.parametrize("records", [False, True])
def test_memory_that_may_be_handed_out_too_early_is_reported(records: bool) -> None:
    def run(device: torch.device) -> None:
        x = torch.zeros(8, device=device)
        side = _side(device)
        with side:
            x.sum()
        if records:
            x.record_stream(side)
        del x
        torch.zeros(8, device=device)

    reports = seen_of_one(run).reports
    assert len(reports) == (0 if records else 1)
    assert all("freed at" in report and "without record_stream" in report for report in reports)


@pytest.mark.parametrize("pinned, non_blocking, waits", [(False, False, 2), (False, True, 2), (True, True, 0)])
def test_the_host_waits_for_copies_but_for_those_of_pinned_memory(pinned: bool, non_blocking: bool, waits: int) -> None:
    def run(device: torch.device) -> None:
        host = torch.zeros(8, pin_memory=pinned)
        there = host.to(device, non_blocking=non_blocking)
        host.copy_(there, non_blocking=non_blocking)

    assert len(seen_of_one(run).host_waits) == waits


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("act", [lambda host: host.sum(), lambda host: torch._foreach_add_([host], 1)])
def test_what_the_host_does_with_pinned_memory_while_it_is_copied_is_a_race(
    act: Callable[[Tensor], object], waits: bool
) -> None:
    def run(device: torch.device) -> None:
        host = torch.zeros(8, pin_memory=True)
        host.copy_(torch.ones(8, device=device), non_blocking=True)
        view = host[2:].view(2, 3)
        if waits:
            torch.accelerator.current_stream(device).record_event().synchronize()
        act(view)
        host.to(device, non_blocking=True)

    reports = seen_of_one(run).reports
    assert bool(reports) != waits
    assert all("on the host does not wait for the write by copy to the host" in report for report in reports)


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x[0] > 0),
        lambda x: x[[0, 2]],
        lambda x: x[x > 0],
        lambda x: torch.tensor([1.0], device=x.device),
        lambda x: torch.equal(x, x),
        lambda x: torch.accelerator.synchronize(x.device),
    ],
)
def test_the_host_waits_where_cudas_would(act: Callable[[Tensor], object]) -> None:
    def run(device: torch.device) -> None:
        x = torch.zeros(4, device=device)
        assert not the_device().host_waits()
        act(x)

    waits = seen_of_one(run).host_waits
    assert waits
    assert all("test_device.py" in wait for wait in waits)


# --- NCCL's


def test_a_collective_waits_for_the_caller_and_the_caller_must_wait_for_it() -> None:
    def run(rank: int, device: torch.device, waits: bool) -> None:
        x = torch.full((64,), float(rank), device=device)
        work = dist.all_reduce(x, async_op=True)
        if waits:
            work.wait()
        assert x.sum().item() == 64.0

    assert not reports_of(run_on_device(2, lambda rank, device: run(rank, device, True)))
    found = reports_of(run_on_device(2, lambda rank, device: run(rank, device, False)))
    assert len(found) == 2
    assert all("does not wait for" in report and "all_reduce" in report for report in found)


def test_ranks_that_come_to_different_collectives_are_told() -> None:
    def run(rank: int, device: torch.device) -> None:
        x = torch.zeros(64, device=device)
        dist.all_reduce(x) if rank else dist.broadcast(x, 0)
        assert x.isnan().all()

    first, second = reports_of(run_on_device(2, run))
    assert first.startswith("unlike: ranks come to different collectives, this one to broadcast")
    assert second.startswith("unlike: ranks come to different collectives, this one to all_reduce")


def test_an_address_off_16_bytes_is_reported() -> None:
    def run(rank: int, device: torch.device) -> None:
        dist.all_reduce(torch.zeros(66, device=device)[2:])
        dist.all_reduce(torch.zeros(68, device=device)[4:])

    assert [report.split(":")[0] for report in reports_of(run_on_device(2, run))] == ["alignment"] * 2


# --- PyTorch's own


def _train(rank: int, device: torch.device, wrap: Callable[[nn.Module], nn.Module], *, breaks: bool = False) -> Any:
    """Some steps; the losses, and the host waits of the last step but for that of the loss."""
    model = wrap(seeded(Stack, width=16).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    parts = [tuple(t.to(device) for t in part(b, rank, 2)) for b in vector_batches(STEPS, width=16)]
    losses = []
    the_device().clear()
    the_device().disregard_all(breaks)
    for batch in parts:
        before = len(the_device().host_waits())
        loss = model(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        waits = the_device().host_waits()[before:]
        losses.append(loss.detach())
    the_device().disregard_all(False)
    return [loss.item() for loss in losses], waits


def _fully_shard(model: nn.Module, **kwargs: Any) -> nn.Module:
    mesh = dist.init_device_mesh("emu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


PEERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": lambda model: DistributedDataParallel(model, bucket_cap_mb=0.001),
    "fully_shard": _fully_shard,
    "fully_shard in bf16": lambda model: _fully_shard(
        model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ),
}


@pytest.mark.parametrize("peer", PEERS)
def test_of_pytorchs_own_nothing_is_reported_and_their_steps_make_no_host_wait(peer: str) -> None:
    seen = run_on_device(2, lambda rank, device: _train(rank, device, PEERS[peer]))
    # fully_shard starts a slice wherever rows divide, which need not be at a multiple of 16 bytes.
    assert [report for report in reports_of(seen) if not report.startswith("alignment: all_gather")] == []
    losses, waits = seen[0].result
    assert losses[-1] < losses[0]
    assert waits == []


@pytest.mark.parametrize("peer", PEERS)
def test_of_pytorchs_own_without_their_waits_much_is_reported(peer: str) -> None:
    seen = run_on_device(2, lambda rank, device: _train(rank, device, PEERS[peer], breaks=True))
    assert all(len(rank.reports) > 50 for rank in seen)
