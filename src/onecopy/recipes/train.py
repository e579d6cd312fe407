"""Train: the loop, as one would write it in plain PyTorch. Only `onecopy.shard` makes it a sharded one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

import onecopy
from onecopy.recipes.account import Account
from onecopy.recipes.config import Config
from onecopy.recipes.data import Batch, prepare
from onecopy.recipes.keeper import Keeper
from onecopy.recipes.metrics import JsonLines, Record, Sink, TensorBoard, make_run_directory, write_summary, writing
from onecopy.recipes.model import build_model
from onecopy.recipes.plan import plan_run
from onecopy.recipes.report import Report, plain_console, print_start, print_summary
from onecopy.recipes.schedule import Schedules, build_optimizers
from onecopy.recipes.settings import dump
from onecopy.recipes.sharded import shard_as
from onecopy.recipes.steps import Events, make_steps
from onecopy.recipes.stop import StopRequest
from onecopy.recipes.watch import Watch
from onecopy.recipes.world import World
from onecopy.report.machine import write_machine


def train(config: Config, world: World) -> bool:
    """Train as the config says. Every rank calls it.

    Args:
        config: one that `checks.resolve` returned.

    Returns:
        Whether it ran to the last step; a signal ends it earlier.

    Raises:
        SettingsError: if the data or the model do not fit the settings.
        NotFiniteError: if too many steps in a row have a loss or gradients that are not finite.
    """
    config, directory = _enter_run_directory(config, world)
    parallel, steps = config.parallel, config.schedule.steps
    console = plain_console()
    say = partial(console.print, soft_wrap=True) if world.rank == 0 else None
    batches, evaluation_batches, vocabulary = prepare(config, world, directory, say)

    torch.manual_seed(config.run.seed)
    model = shard_as(config, world, build_model(config, vocabulary))
    # The same weights everywhere, but dropout of its own on each rank that sees data of its own.
    torch.manual_seed(config.run.seed + world.among_data(parallel.tensor).rank)
    optimizers = build_optimizers(model, config.optimizer)
    schedule = Schedules(optimizers, config.schedule)

    keeper = Keeper(config, world, directory, model, optimizers, schedule)
    resumed = keeper.resume()
    if resumed >= steps:
        keeper.say(f"nothing to do: {keeper.last} is of step {resumed}, and schedule.steps is {steps}")
        return True

    # Rank by rank, and a newcomer is waited for.
    planned = plan_run(config, world, vocabulary) if world.rank == 0 and not world.is_new else None
    account = Account(config, world, model, resumed, planned)
    watch = Watch(model, world, config.optimizer.not_finite_steps)
    # Changes from step to step; a rank that takes a lost one's place gets it from the others.
    progress: dict[str, int | bool] = {"start": resumed, "step": resumed, "finite": False, "stops": False}
    kept = {"scheduler": schedule, "account": account, "watch": watch, "progress": progress}
    run = make_steps(config, model, optimizers, **kept)

    def batches_from(done: int) -> Iterable[tuple[int, list[Batch]]]:
        first = progress["start"] + done
        return zip(range(first + 1, steps + 1), batches.after(first), strict=False)

    # A newcomer goes on in the files of the rank whose place it takes.
    after = steps if world.is_new else resumed
    evaluated = 0
    with StopRequest() as stop, _open_sinks(config, world, directory, model, after, console) as write:

        def finish_step() -> None:
            """What follows a step and sends messages; with recovery it may be done over."""
            nonlocal evaluated
            step = int(progress["step"])
            if step == progress["start"]:
                return
            if progress["finite"] and (progress["stops"] or step == steps or keeper.is_due(step)):
                keeper.save(step)
                account.skip_time()
            due = step % config.evaluation.evaluate_every == 0 if config.evaluation.evaluate_every else False
            if evaluation_batches and not progress["stops"] and (due or step == steps):
                loss = evaluate(model, evaluation_batches, world)
                record = account.evaluated(step, loss)
                if evaluated != step:
                    evaluated = step
                    write(record)

        events = Events(run)
        for step, micro_batches in run.loop(batches_from):
            with run:
                finish_step()
                with _profiled(step, config, world, directory, model):
                    loss = torch.zeros((), device=world.device)
                    for batch in micro_batches:
                        micro_loss = model(**batch).loss / parallel.accumulate
                        micro_loss.backward()
                        loss += micro_loss.detach()
                    norm = torch.nn.utils.clip_grad_norm_(
                        model.parameters(), config.optimizer.clip_norm or math.inf
                    ).item()
                    learning_rate = schedule.learning_rate
                    # Before the step: what is not finite on one rank must not reach the weights of all.
                    loss_sum, norm_sum, stops = world.sum(loss.item(), norm, stop.made)
                    everywhere = math.isfinite(loss_sum + norm_sum)
                    finite = watch.step_was_finite(step, loss.item(), norm, everywhere=everywhere)
                    run.step(update=finite)
                schedule.step()
                progress.update(step=step, finite=finite, stops=bool(stops))
                record = account.step_done(step, loss_sum / world.size, learning_rate, norm, skipped=not finite)
            if progress["step"] != step:
                continue
            for event in events.before(step) if world.rank == 0 else ():
                write(event)
            if step % config.run.log_every == 0 or step in (1, steps) or not finite:
                write(record)
            watch.check()
            if stops:
                break
        for _ in run.attempts():
            with run:
                finish_step()
        checkpoint = keeper.finish()
        for _ in run.attempts():
            with run:
                summary = account.summary(interrupted=int(progress["step"]) < steps, checkpoint=checkpoint)

    if world.rank == 0:
        write_summary(directory, summary.as_dict())
        print_summary(console, summary)
    return not summary.interrupted


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[Batch], world: World) -> float:
    """Mean loss over the batches of all ranks."""
    model.eval()
    losses = [model(**batch).loss for batch in batches]
    model.train()
    (total,) = world.sum(torch.stack(losses).mean().item())
    return total / world.size


def _enter_run_directory(config: Config, world: World) -> tuple[Config, Path]:
    """The run directory that the first rank makes, and the config with its name, as written into it."""
    if world.is_new:
        return config, Path(config.run.directory)
    made = make_run_directory(config.run.directory) if world.rank == 0 else None
    directory = world.gather(made)[0]
    assert directory is not None
    directory.mkdir(parents=True, exist_ok=True)  # on other hosts
    config = config.model_copy(update={"run": config.run.model_copy(update={"directory": str(directory)})})
    if world.rank == 0:
        with writing(directory):
            (directory / "config.toml").write_text(dump(config), encoding="utf-8")
            write_machine(directory, world.device)
    return config, directory


@contextmanager
def _profiled(step: int, config: Config, world: World, directory: Path, model: nn.Module) -> Iterator[None]:
    """Profile the step if it is the one that the config names."""
    if step != config.run.profile_step:
        yield
        return
    with onecopy.profile(model) as seen:
        yield
    with writing(directory / "trace"):
        seen.save(directory / "trace" / f"rank-{world.rank}.json", step=step)


@contextmanager
def _open_sinks(
    config: Config, world: World, directory: Path, model: nn.Module, start: int, console: Console
) -> Iterator[Callable[[Record], None]]:
    """A function that hands a record to the terminal and the files; on other ranks than the first to nobody."""
    sinks: list[Sink] = []
    if world.rank == 0:
        print_start(console, config, model)
        sinks.append(JsonLines(directory / "metrics.jsonl", start))
        if config.run.tensorboard:
            sinks.append(TensorBoard(directory, start))
        sinks.append(Report(console, config.schedule.steps))

    def write(record: Record) -> None:
        with writing(directory):
            for sink in sinks:
                sink.write(record)

    try:
        yield write
    except BaseException:
        for sink in sinks:
            # A disk that failed before fails here again, and what went wrong first is what is told.
            with suppress(OSError):
                sink.close()
        raise
    with writing(directory):
        for sink in sinks:
            sink.close()
