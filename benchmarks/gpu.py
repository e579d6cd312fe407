"""python benchmarks/gpu.py: step time, exposed communication and memory on this machine's GPUs, one table.

Trains the same GPT in bf16 over fp32 masters with fully_shard, onecopy's stages and DeepSpeed, where that is installed,
and in bf16 alone with DDP; one after the other in the same ranks, one for each GPU. A communication kernel is exposed
while no other kernel runs, by the profiler's record of one step on the first rank.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import onecopy
from trained.cases import tokens
from trained.gpt import GPT, Shape

SHAPES: Final = {
    "350m": Shape(layers=24, hidden=1024, heads=16, vocabulary=32768, positions=1024),
    "1b": Shape(layers=24, hidden=2048, heads=16, vocabulary=32768, positions=1024),
}
Span = tuple[str, float, float]
"""A kernel's name, and when it ran, in microseconds."""


@dataclass(frozen=True)
class Row:
    """What one system did.

    Attributes:
        step: milliseconds, the median of the timed steps.
        exposed: milliseconds of communication in a step beside which nothing ran; None where no profiler sees kernels.
        peak: bytes of tensors at most, of this rank.
        reserved: bytes that the allocator took for them.
        loss: of the last step, the mean over ranks.
    """

    system: str
    step: float
    exposed: float | None
    peak: int
    reserved: int
    loss: float


def exposed(spans: Iterable[Span]) -> float:
    """Microseconds in which communication kernels ran and no other kernel did."""
    events = []
    for name, start, stop in spans:
        kind = "nccl" in name.lower()
        events += [(start, 1, kind), (stop, -1, kind)]
    running = {True: 0, False: 0}
    total = before = 0.0
    for moment, change, kind in sorted(events, key=lambda event: event[:2]):
        if running[True] and not running[False]:
            total += moment - before
        running[kind] += change
        before = moment
    return total


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model.to(torch.bfloat16), gradient_as_bucket_view=True)


def _fully_shard(reshard: bool) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: Any) -> nn.Module:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for module in (*model.blocks, model):
            fully_shard(module, mp_policy=policy, reshard_after_forward=reshard)
        return model

    return wrap


def _onecopy(stage: int) -> Callable[[nn.Module], nn.Module]:
    return lambda model: onecopy.shard(model, stage, precision="bf16")


def _deepspeed(stage: int) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        import deepspeed

        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=_adamw(model),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "bf16": {"enabled": True},
                "gradient_clipping": 1.0,
                "zero_optimization": {"stage": stage},
            },
        )
        return engine

    return wrap


SYSTEMS: Final[dict[str, Callable[[nn.Module], nn.Module]]] = {
    "DDP": _ddp,
    **{f"onecopy stage {stage}": _onecopy(stage) for stage in range(4)},
    "fully_shard, reshard_after_forward=False": _fully_shard(False),
    "fully_shard, reshard_after_forward=True": _fully_shard(True),
    **{f"DeepSpeed stage {stage}": _deepspeed(stage) for stage in (1, 2, 3)},
}


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _stepper(model: Any) -> Callable[[tuple[Tensor, ...]], Tensor]:
    """Takes a step and returns its loss, for which nobody has waited."""
    if hasattr(model, "set_gradient_accumulation_boundary"):  # DeepSpeed's engine, which has the optimizer

        def deepspeed_step(batch: tuple[Tensor, ...]) -> Tensor:
            loss: Tensor = model(*batch)
            model.backward(loss)
            model.step()
            return loss.detach()

        return deepspeed_step
    optimizer = _adamw(model)

    def step(batch: tuple[Tensor, ...]) -> Tensor:
        loss: Tensor = model(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measure(system: str, shape: Shape, device: torch.device, *, samples: int, steps: int, warmup: int) -> Row:
    """Train with ``system`` on ``device``; every rank of the default process group calls it."""
    torch.manual_seed(0)
    with device:
        model = SYSTEMS[system](GPT(shape))
    step = _stepper(model)
    draw = tokens(shape.vocabulary)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [
        tuple(t.to(device) for t in draw(generator, samples, shape.positions)) for _ in range(steps + warmup + 1)
    ]
    for batch in batches[:warmup]:
        step(batch)
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for batch in batches[warmup:-1]:
        torch.accelerator.synchronize(device)
        start = perf_counter()
        loss = step(batch)
        torch.accelerator.synchronize(device)
        seconds.append(perf_counter() - start)
    mean = loss.float() / dist.get_world_size()
    dist.all_reduce(mean)
    row = Row(
        system,
        1e3 * sorted(seconds)[len(seconds) // 2],
        _profile(step, batches[-1], device) if on_cuda else None,
        torch.cuda.max_memory_allocated(device) if on_cuda else 0,
        torch.cuda.max_memory_reserved(device) if on_cuda else 0,
        mean.item(),
    )
    del model, step
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
    return row


def _profile(step: Callable[[tuple[Tensor, ...]], Tensor], batch: tuple[Tensor, ...], device: torch.device) -> float:
    """Milliseconds of exposed communication in a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(batch)
        torch.cuda.synchronize(device)
    spans = [
        (event.name, float(event.time_range.start), float(event.time_range.end))
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return exposed(spans) / 1e3


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'system':<42}{'step ms':>9}{'exposed ms':>12}{'peak GB':>9}{'reserved GB':>13}{'loss':>9}"]
    for row in rows:
        hidden = "—" if row.exposed is None else f"{row.exposed:.1f}"
        lines.append(
            f"{row.system:<42}{row.step:>9.1f}{hidden:>12}{row.peak / 1e9:>9.2f}{row.reserved / 1e9:>13.2f}"
            f"{row.loss:>9.4f}"
        )
    return "\n".join(lines)


def _rank(rank: int, options: argparse.Namespace, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ["WORLD_SIZE"] = str(options.ranks)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rows = []
    for system in options.only or SYSTEMS:
        if system.startswith("DeepSpeed") and importlib.util.find_spec("deepspeed") is None:
            continue
        rows.append(
            measure(
                system,
                SHAPES[options.model],
                device,
                samples=options.samples,
                steps=options.steps,
                warmup=options.warmup,
            )
        )
    if rank == 0:
        name = torch.cuda.get_device_name(device)
        print(f"GPT {options.model}, bf16, {options.samples} samples a rank, {options.ranks} × {name}\n{table(rows)}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="350m")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count(), help="one for each GPU unless given")
    parser.add_argument("--samples", type=int, default=8, help="of 1,024 tokens, on each rank")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, metavar="SYSTEM")
    options = parser.parse_args()
    if not options.ranks:
        parser.error("no GPU was found on this machine")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, args=(options, port), nprocs=options.ranks)


if __name__ == "__main__":
    main()
