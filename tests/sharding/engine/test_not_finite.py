"""nan and inf: never saved over what is good, never in metrics.jsonl, and named where they begin.

Oracles: torch.isfinite on what was saved, a JSON parser that takes no NaN, and the rank whose loss the test spoils.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

import onecopy
from jobs import CPU, SMALL
from models import Stack, seeded, vector_batches
from one_fork import Forked, On, one_fork
from onecopy.errors import NotFiniteError
from onecopy.recipes.settings import load
from onecopy.recipes.train import train
from onecopy.recipes.world import World
from oracle import gathered_weights, part
from ranks import run_ranks


@pytest.mark.parametrize("what", ["parameter", "state"])
@one_fork
def test_what_is_not_finite_is_not_saved_over_what_is(what: str, tmp_path: Path) -> Forked:
    """One element of one parameter, in the last rank's slice."""

    def run(rank: int) -> tuple[str, str]:
        model = onecopy.shard(seeded(Stack), 3)
        optimizer = torch.optim.AdamW(model.parameters())
        model(*part(vector_batches(1)[0], rank, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
        onecopy.save(tmp_path, model, optimizer, step=1, keep=1)
        found: list[tuple[str, Any]] = [(name, p) for name, p in model.named_parameters() if p.local.numel()]  # type: ignore[attr-defined]
        name, parameter = found[1]
        spoiled = parameter if what == "parameter" else optimizer.state[parameter]["exp_avg_sq"]
        if rank == 2:
            spoiled.local.detach().view(-1)[-1] = math.inf
        with pytest.raises(NotFiniteError) as caught:
            onecopy.save(tmp_path, model, optimizer, step=2, keep=1)
        assert [path.name for path in sorted(tmp_path.iterdir())] == [".writer", "latest", "step-00000001"]
        onecopy.save(tmp_path, model, optimizer, step=3, allow_not_finite=True)
        other = onecopy.shard(seeded(Stack), 3)
        onecopy.load(tmp_path / "step-00000001", other)
        assert all(weight.isfinite().all() for weight in gathered_weights(other).values())
        return str(caught.value), name

    results = yield On(3, run)
    for message, _ in results:
        assert "failed on rank 2" in message
        assert f"{results[2][1]!r} holds nan or inf" in message
        assert ("state 'exp_avg_sq' of" in message) == (what == "state")


def _job(directory: Path, rank: int, size: int, **settings: Any) -> bool:
    dotted = {name.replace("__", "."): value for name, value in settings.items()}
    config = load(None, {**SMALL, "parallel.ranks": size, "run.directory": str(directory), **dotted})
    return train(config, World(rank, rank, size, CPU))


def _records(directory: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


@one_fork
def test_a_job_that_diverges_stops_with_its_last_finite_checkpoint(tmp_path: Path) -> Forked:
    """The learning rate of the issue, where pruning to one checkpoint would delete the last finite one."""

    def run(rank: int) -> str:
        with pytest.raises(NotFiniteError) as caught:
            _job(
                tmp_path / "run",
                rank,
                2,
                optimizer__learning_rate=1e30,
                checkpoint__save_every=1,
                checkpoint__keep=1,
                optimizer__not_finite_steps=2,
            )
        return str(caught.value)

    first, second = yield On(2, run)
    assert first == second
    assert first.startswith(
        "2 steps in a row had a loss or gradients that were not finite, and changed no weights. The first was step "
    )
    assert "on every rank" in first
    assert "'transformer." in first
    records = _records(tmp_path / "run")
    steps = [record for record in records if record["kind"] == "train"]
    assert [record["loss"] is None for record in steps[-2:]] == [True, True]

    def look(rank: int) -> int:
        from onecopy.checkpoint.export import export

        done = export(tmp_path / "run" / "checkpoints", tmp_path / "out")
        from safetensors.torch import load_file

        assert all(tensor.isfinite().all() for tensor in load_file(tmp_path / "out" / "model.safetensors").values())
        return done.step

    assert (yield On(1, look, group=False))[0] == steps[-1]["step"] - 2


def test_one_ranks_nan_is_named_and_reaches_no_weight(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In step 3, of rank 1 alone. The steps after it go on from the weights before it."""

    def run(rank: int) -> bool:
        forward, calls = GPT2LMHeadModel.forward, 0

        def spoiled(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            out = forward(self, *args, **kwargs)
            calls += 1
            if rank == 1 and calls == 3:
                out.loss = out.loss * math.nan
            return out

        GPT2LMHeadModel.forward = spoiled  # type: ignore[method-assign]
        return _job(
            tmp_path / "run", rank, 2, schedule__steps=6, checkpoint__save_every=1, evaluation__evaluate_every=0
        )

    assert run_ranks(2, run) == [True, True]
    losses = [record["loss"] for record in _records(tmp_path / "run")]
    assert [loss is None for loss in losses] == [False, False, True, False, False, False]
    output = capfd.readouterr().out
    assert "step 3 changes nothing: the loss is nan on rank 1; the first gradient" in output
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")) == [
        "step-00000005",
        "step-00000006",
    ]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 6
