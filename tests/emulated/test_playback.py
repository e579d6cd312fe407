"""The simulation of time: against closed formulas, and what the engine's schedule leaves exposed beside fully_shard's.

Oracles: the time of a chain of equal layers, worked out by hand; a run of two ranks with arithmetic; fully_shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import onecopy
from models import TinyGPT, seeded, token_batches
from on_device import run_on_device, the_device
from playback import Asked, Span, jobs_of, play, spans
from rehearse import Mark, rehearse
from training import on, parts_of

pytestmark = pytest.mark.emulated

LAYERS = 6
WIDTH = 256
RANKS = 64
Seconds = Callable[[Asked], float]


def asked(what: str, name: str = "", agent: int = 1, *, other: int = 0, group: int = 0, nbytes: int = 0) -> Asked:
    return Asked(what, name, agent, other, group, nbytes, False, ())


def ends(program: list[Asked], seconds: float = 1.0) -> list[float]:
    jobs = jobs_of(program, lambda _: seconds)
    play(jobs)
    return [job.end for job in jobs]


def test_streams_run_side_by_side_and_wait_for_what_they_are_told_to() -> None:
    kernel, other = asked("kernel"), asked("kernel", agent=2)
    assert ends([kernel, kernel, other]) == [1, 2, 1]
    record, wait = asked("record", other=7), asked("wait", agent=2, other=7)
    assert ends([kernel, record, kernel, wait, other]) == [1, 2, 2]


def test_collectives_of_one_group_come_one_after_the_other_and_those_of_two_share_the_link() -> None:
    def gather(stream: int, group: int) -> Asked:
        return asked("collective", "all_gather", stream, other=1, group=group)

    assert ends([gather(2, 1), gather(3, 1)]) == [1, 2]
    assert ends([gather(2, 1), gather(3, 2)]) == [2, 2]
    # The third begins when the first is over, a second's work of two, and runs beside the last half of the second.
    program = [gather(2, 1), asked("kernel", agent=4), asked("collective", "all_gather", 3, other=4, group=2)]
    assert ends(program) == [1, 1, 2]
    assert ends([gather(2, 1), asked("wait for collective", other=0), asked("kernel")]) == [1, 2]


class Chain(nn.Module):
    """Equal layers, each of one matrix product forward and two backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def onecopys(stage: int, **settings: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: onecopy.shard(model, stage, **{"prefetch_bytes": 0} | settings)


def fully_sharded(model: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def chain(wrap: Callable[[nn.Module], nn.Module]) -> list[Asked]:
    """Rows so many that activations, as in training, weigh more than a layer."""

    def train(device: torch.device, mark: Mark) -> None:
        model = wrap(on(device, Chain))
        x = torch.zeros(4 * WIDTH, WIDTH, device=device, requires_grad=True)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            mark("step")
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        mark("end")

    return rehearse(RANKS, train)


def last_step(program: list[Asked], *, product: float, gather: float, reduce: float) -> Span:
    """The last step, where a matrix product and a collective take so long and all else no time."""
    took = {"aten::mm": product, "all_gather": gather, "reduce_scatter": reduce, "all_reduce": reduce}
    return spans(program, lambda one: took.get(one.name, 0.0))[-1]


@pytest.fixture(scope="module")
def programs() -> dict[object, list[Asked]]:
    wraps = {stage: onecopys(stage) for stage in (0, 1, 2, 3)}
    return {key: chain(wrap) for key, wrap in [*wraps.items(), ("fully_shard", fully_sharded)]}


@pytest.mark.parametrize("system", [0, 1, 2, 3, "fully_shard"])
def test_where_computing_takes_longer_the_first_gather_and_the_last_reduce_are_exposed(
    system: object, programs: dict[object, list[Asked]]
) -> None:
    """Beside the backward of a layer run the gather of the next and the reduce of the one before."""
    span = last_step(programs[system], product=1.0, gather=0.6, reduce=0.7)
    assert span.computing == pytest.approx(3 * LAYERS)
    assert span.exposed == pytest.approx(0.7 if system == 0 else 0.6 + 0.7)


@pytest.mark.parametrize("system", [0, 1, 2, 3, "fully_shard"])
def test_where_the_link_is_slow_a_step_takes_what_its_bytes_take(
    system: object, programs: dict[object, list[Asked]]
) -> None:
    """ZeRO §7's collectives. At stage 3 the two units with which backward begins are gathered once."""
    gathers = {0: 0, 1: LAYERS, 2: LAYERS, 3: 2 * LAYERS - 2, "fully_shard": 2 * LAYERS}[system]
    span = last_step(programs[system], product=0.0, gather=2.0, reduce=3.0)
    assert span.seconds == pytest.approx(gathers * 2.0 + LAYERS * 3.0)
    assert span.seconds == pytest.approx(span.messages)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_reduce_never_delays_a_gather(stage: int, programs: dict[object, list[Asked]]) -> None:
    jobs = jobs_of(programs[stage], lambda one: 0.0)
    gathers = [job for job in jobs if job.asked.name == "all_gather"]
    assert len(gathers) >= 3 * LAYERS
    for gather in gathers:
        assert all(jobs[place].asked.name != "reduce_scatter" for place in gather.after)
    # As long as the link has room, all that reduces cost is the last one.
    without = last_step(programs[stage], product=1.0, gather=0.6, reduce=0.0)
    beside = last_step(programs[stage], product=1.0, gather=0.6, reduce=0.7)
    assert beside.seconds - without.seconds == pytest.approx(0.7)


@pytest.mark.parametrize("gather", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("reduce", [0.1, 1.0, 3.0])
def test_stage_3_is_never_more_exposed_than_fully_shard(
    gather: float, reduce: float, programs: dict[object, list[Asked]]
) -> None:
    ours, theirs = (
        last_step(programs[system], product=1.0, gather=gather, reduce=reduce) for system in (3, "fully_shard")
    )
    assert ours.seconds <= theirs.seconds + 1e-9
    assert ours.peak <= 1.001 * theirs.peak


def test_further_units_are_gathered_ahead_while_they_hold_few_bytes() -> None:
    """Of a prefetch in bytes for three layers, the first three after the one that computes have begun."""
    program = chain(onecopys(3, prefetch_bytes=3 * WIDTH * WIDTH * 4))
    jobs = jobs_of(program, lambda one: 1.0 if one.name == "aten::mm" else 0.0)
    play(jobs)
    begin = [job.end for job in jobs if job.asked.what == "mark"][-2]
    starts = [job.start - begin for job in jobs if job.asked.name == "all_gather" and job.start >= begin]
    # Backward begins with the last four, and each of its layers takes two seconds.
    assert starts == pytest.approx([0, 0, 0, 0, 1, 2, LAYERS + 2, LAYERS + 4])


def test_a_rehearsal_asks_for_the_collectives_of_a_run() -> None:
    def step(model: nn.Module, batch: Any) -> None:
        for _ in range(3):
            model(*batch).backward()

    def run(rank: int, device: torch.device) -> list[str]:
        model = onecopy.shard(on(device, lambda: seeded(TinyGPT, layers=3)), 3, prefetch_bytes=0)
        the_device().clear()
        step(model, parts_of(token_batches(1), rank, 2, device)[0])
        return [operation for operation, *_ in the_device().collectives()]

    def train(device: torch.device, mark: Mark) -> None:
        model = onecopy.shard(on(device, lambda: seeded(TinyGPT, layers=3)), 3, prefetch_bytes=0)
        batch = parts_of(token_batches(1), 0, 2, device)[0]
        mark("run")
        step(model, batch)

    program = rehearse(2, train)
    begin = [one.what for one in program].index("mark")
    found = [one.name for one in program[begin:] if one.what == "collective"]
    assert found == run_on_device(2, run)[0].result
    assert len(found) > 20
